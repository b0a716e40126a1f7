// The list of examples and the view of one example, on images.

import assert from "node:assert/strict";
import {
  answered,
  cards,
  expected,
  field,
  listed,
  lists,
  normalise,
  open,
  reads,
  rowsOf,
  sideOf,
  until,
} from "./driving.mjs";

export const examples = {
  async examples_sorted_both_ways({ page, world }) {
    await open(page, world, "examples");
    await lists(page, expected(world));
    await field(page, "Sort by").selectOption({ label: "Loss" });
    await lists(page, expected(world, undefined, "loss"));
    await page.getByRole("button", { name: "Highest first: switch to lowest first" }).click();
    await lists(page, expected(world, undefined, "loss", 1));
    await page.getByRole("button", { name: "Lowest first: switch to highest first" }).waitFor();
    const [least] = expected(world, undefined, "loss", 1);
    const loss = world.rows[least].loss;
    const told = await cards(page)
      .first()
      .getByTitle(/^[\d.e+-]+$/)
      .getAttribute("title");
    assert.ok(Math.abs(Number(told) - loss) <= 1e-5 * loss, `${told} is not ${loss}`);
  },

  async examples_by_class({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Class").selectOption({ label: "3" });
    await lists(
      page,
      expected(world, (row) => row.label === 3),
    );
    await field(page, "Prediction").selectOption({ label: "5" });
    const both = expected(world, (row) => row.label === 3 && row.prediction === 5);
    if (both.length) await lists(page, both);
    else await page.getByRole("heading", { name: "No matches" }).waitFor();
    await page.getByRole("button", { name: "Remove filter: class 3" }).click();
    await lists(
      page,
      expected(world, (row) => row.prediction === 5),
    );
  },

  async examples_where_the_prediction_differs({ page, world }) {
    await open(page, world, "examples");
    await page.getByRole("checkbox", { name: "Prediction differs" }).check();
    await lists(
      page,
      expected(world, (row) => row.label !== row.prediction),
    );
  },

  async examples_by_group({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Group").selectOption({ label: "scanner: old" });
    await lists(
      page,
      expected(world, (row) => row.scanner === "old"),
    );
    await field(page, "Group").selectOption({ label: "corrupted: true" });
    await lists(
      page,
      expected(world, (row) => row.corrupted),
    );
  },

  async examples_by_quantile({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Quantile").selectOption({ label: "Highest 10%" });
    const total = await until(
      () => listed(page),
      (found) => found < 200,
      "a tenth of 200 is",
    );
    assert.ok(Math.abs(total - 20) <= 1, `a tenth of 200 rows are 20, not ${total}`);
    await lists(page, expected(world).slice(0, total));
    await field(page, "Quantile").selectOption({ label: "Lowest quarter" });
    const lowest = await until(
      () => listed(page),
      (found) => found > total,
      "a quarter of 200 is",
    );
    assert.ok(Math.abs(lowest - 50) <= 1, `a quarter of 200 rows are 50, not ${lowest}`);
    await lists(page, expected(world).slice(-lowest));
  },

  async examples_by_id({ page, world }) {
    await open(page, world, "examples");
    await page.keyboard.press("/");
    await page.keyboard.type("digit-01");
    await lists(
      page,
      expected(world, (row) => row.id.includes("digit-01")),
    );
    await field(page, "Search").fill("no such thing");
    await page.getByRole("heading", { name: "No matches" }).waitFor();
    await page.getByRole("link", { name: "Clear the filters" }).click();
    await lists(page, expected(world));
  },

  async examples_scrolled({ page, world }) {
    const asked = [];
    page.on("request", (request) => {
      const url = new URL(request.url());
      if (url.pathname === "/api/examples") asked.push(url.searchParams);
    });
    await open(page, world, "examples");
    await lists(page, expected(world));
    await until(
      () => cards(page).count(),
      (count) => count > 0 && count < 150,
      "cards in the document",
    );
    assert.equal(asked[0].get("limit"), "60");
    assert.ok(asked.length < 4, `${asked.length} pages were asked for before anybody scrolled`);
    const order = expected(world);
    await until(
      async () => {
        await page.mouse.wheel(0, 700);
        return (await rowsOf(page)).at(-1);
      },
      (row) => row === order.at(-1),
      `the last row should be ${order.at(-1)}, and is`,
    );
    const offsets = asked.map((one) => Number(one.get("offset") ?? 0));
    assert.deepEqual(
      offsets.toSorted((a, b) => a - b),
      [0, 60, 120, 180],
    );
    assert.ok(asked.every((one) => Number(one.get("limit")) <= 60));
    assert.ok((await cards(page).count()) < 200, "all rows are in the document at once");
    const shown = await rowsOf(page);
    assert.deepEqual(shown, order.slice(order.length - shown.length));
  },

  async examples_as_images({ page, world }) {
    await open(page, world, "examples");
    await page.reload(); // or it is where it was left
    await lists(page, expected(world));
    const pictures = await until(
      () =>
        cards(page)
          .getByRole("img")
          .evaluateAll((found) => found.map((one) => [one.alt, one.complete && one.naturalWidth])),
      (found) => found.length > 11 && found.every(([, width]) => width === 28),
      "every card should have an image of 28 pixels",
    );
    const [top] = expected(world);
    assert.equal(pictures[0][0], `row ${top}, label ${world.rows[top].label}, predicted ${world.rows[top].prediction}`);
    assert.ok(pictures.every(([alt]) => /^row \d+, label \d, predicted \d$/.test(alt)));
  },

  async examples_by_keys({ page, world }) {
    await open(page, world, "examples");
    const order = expected(world);
    await lists(page, order);
    const focused = () =>
      page.evaluate(() => Number(/row (\d+)/.exec(document.activeElement.ariaLabel ?? "")?.[1] ?? -1));
    await page.keyboard.press("j");
    await reads(focused, order[0], "the row in focus");
    await page.keyboard.press("j");
    await reads(focused, order[1], "the row in focus");
    await page.keyboard.press("ArrowRight");
    await reads(focused, order[2], "the row in focus");
    await page.keyboard.press("k");
    await reads(focused, order[1], "the row in focus");
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: `Row ${order[1]}` }).waitFor();
    await page.keyboard.press("j");
    await page.getByRole("heading", { level: 1, name: `Row ${order[2]}` }).waitFor();
    await page.keyboard.press("?");
    await page.getByRole("dialog", { name: "Keyboard shortcuts" }).waitFor();
    await page.keyboard.press("Escape");
    await reads(() => page.getByRole("dialog").count(), 0, "dialogs");
    await page.keyboard.press("1");
    await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  },

  async example_sides({ page, world }) {
    const { row, none } = world.explained;
    await open(page, world, `example/${row}`);
    await page.getByRole("heading", { level: 1, name: `Row ${row}` }).waitFor();
    await answered(page, none);
    assert.ok((await sideOf(page, "Proponents")).every(([, score]) => score > 0));
    assert.ok((await sideOf(page, "Opponents")).every(([, score]) => score < 0));
    await page.getByText(/In nats: the predicted increase/).waitFor();
    const facts = page.getByRole("region", { name: new RegExp(`^row ${row},`) });
    assert.match(await facts.innerText(), /1 of 200/);
    assert.match(await facts.innerText(), new RegExp(world.rows[row].id));
  },

  async example_normalised({ page, world }) {
    const { row, none, gradient } = world.explained;
    await open(page, world, `example/${row}`);
    await answered(page, none);
    await normalise(page, "Gradient");
    await answered(page, gradient);
    assert.notDeepEqual(gradient.proponents, none.proponents);
    await page.reload();
    await answered(page, gradient);
    await normalise(page, "None");
    await answered(page, none);
    await page.getByRole("checkbox", { name: "Same label only" }).check();
    const { label } = world.rows[row];
    const labelsOf = async () => (await sideOf(page, "Proponents")).map(([of]) => world.rows[of].label);
    await until(
      labelsOf,
      (found) => found.length > 0 && found.every((one) => one === label),
      `all should be of label ${label}`,
    );
  },

  async example_scored_exactly({ page, world }) {
    const { row, none, exact } = world.explained;
    await open(page, world, `example/${row}`);
    await answered(page, none);
    assert.notDeepEqual(exact, none);
    await page.getByRole("button", { name: "Compute exact scores" }).click();
    await answered(page, exact);
    await page.getByText(/^Exact scores\./).waitFor();
  },

  async example_to_example_and_back({ page, world }) {
    const { row, none } = world.explained;
    await open(page, world, "examples");
    await lists(page, expected(world));
    await cards(page)
      .getByRole("link", { name: new RegExp(`^row ${row},`) })
      .click();
    await answered(page, none);
    const [to] = none.proponents[0];
    await page.getByRole("link", { name: new RegExp(`^Proponent: row ${to},`) }).click();
    await page.getByRole("heading", { level: 1, name: `Row ${to}` }).waitFor();
    await page.goBack();
    await page.getByRole("heading", { level: 1, name: `Row ${row}` }).waitFor();
    await answered(page, none);
    await page.goBack();
    await page.getByRole("heading", { level: 1, name: "Examples" }).waitFor();
    await lists(page, expected(world));
  },

  async example_that_is_not_there({ page, world }) {
    await open(page, world, "example/200");
    await page.getByRole("heading", { name: "There is no such row" }).waitFor();
    await page.getByRole("link", { name: "Choose another" }).click();
    await page.getByLabel(/^Row, 0 to 199/).fill("17");
    await page.getByRole("button", { name: "Open" }).click();
    await page.getByRole("heading", { level: 1, name: "Row 17" }).waitFor();
  },
};
