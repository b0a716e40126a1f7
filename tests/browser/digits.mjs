// A run of images with classes: all that people can see and do.

import assert from "node:assert/strict";
import {
  accessible,
  answered,
  cards,
  decided,
  expected,
  field,
  leading,
  listed,
  lists,
  open,
  press,
  quiet,
  reads,
  rowsOf,
  save,
  Server,
  sideOf,
  tallies,
  tour,
  until,
} from "./driving.mjs";
import { reported } from "./report.mjs";

const beyond = (page) => page.getByText(/lie beyond/);
const slider = (page) => page.getByRole("slider", { name: "Threshold on self-influence" });

/** The count beyond the threshold, once the server has told it. */
async function exactly(page) {
  const text = await until(() => beyond(page).innerText(), (words) => !words.startsWith("about"), "no exact count");
  return leading(text);
}

async function thresholdOf(page) {
  const link = page.getByRole("region", { name: "Which rows stand out" }).getByRole("link", { name: "Show these" });
  return Number(new URLSearchParams((await link.getAttribute("href")).split("?")[1]).get("above"));
}

const scenarios = {
  async overview_facts({ page, world }) {
    await open(page, world);
    await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
    const facts = await page.getByRole("term").evaluateAll((terms) =>
      Object.fromEntries(terms.map((term) => [term.textContent, term.nextElementSibling.textContent])),
    );
    assert.equal(facts["training examples"], "200");
    assert.equal(facts["numbers per example"], String(world.features));
    assert.equal(facts.method, "arnoldi");
    assert.match(Object.keys(facts).join(), /δ/);
    assert.match(await page.title(), /^Overview · run · eigentrace$/);
    assert.equal(await page.getByRole("link", { name: "Overview" }).getAttribute("aria-current"), "page");
  },

  async overview_spectrum({ page, world }) {
    await open(page, world);
    const { spectrum } = await (await page.request.get(`${world.server.url}api/overview`)).json();
    const negative = spectrum.filter((value) => value < 0).length;
    const picture = page.getByRole("img", { name: `Spectrum: ${spectrum.length} eigenvalues` });
    await picture.waitFor();
    assert.match(await picture.getAttribute("aria-label"), new RegExp(`${negative} of them negative`));
    assert.equal(await picture.locator("circle").count(), spectrum.length - negative);
    await page.getByText(`${spectrum.length - negative} positive`).waitFor();
  },

  async overview_threshold_by_mouse({ page, world }) {
    await open(page, world);
    const before = await exactly(page);
    const box = await slider(page).boundingBox();
    await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
    await page.mouse.down();
    await page.mouse.move(box.x - 60, box.y + 40, { steps: 4 });
    await page.mouse.move(box.x - 160, box.y + 40, { steps: 4 });
    await page.mouse.up();
    const threshold = await thresholdOf(page);
    const wanted = world.rows.filter((row) => row.self_influence > threshold).length;
    assert.ok(wanted > before, `${wanted} rows beyond after the drag, ${before} before`);
    await until(() => exactly(page), (found) => found === wanted, `${wanted} rows lie beyond ${threshold}, the page says`);
    await page.getByRole("region", { name: "Which rows stand out" }).getByRole("link", { name: "Show these" }).click();
    await lists(page, expected(world, (row) => row.self_influence > threshold));
  },

  async overview_threshold_by_keys({ page, world }) {
    await open(page, world);
    await exactly(page);
    await slider(page).focus();
    const place = async () => Number(await slider(page).getAttribute("aria-valuenow"));
    const start = await place();
    for (let time = 0; time < 10; time += 1) await page.keyboard.press("ArrowLeft");
    assert.ok((await place()) < start);
    const threshold = await thresholdOf(page);
    const wanted = world.rows.filter((row) => row.self_influence > threshold).length;
    await until(() => exactly(page), (found) => found === wanted, `${wanted} rows lie beyond ${threshold}, the page says`);
    assert.match(await slider(page).getAttribute("aria-valuetext"), new RegExp(`${wanted} rows beyond`));
    await page.keyboard.press("End");
    await reads(place, 100, "the place of the slider");
    await reads(() => exactly(page), 0, "the count beyond");
    assert.ok(await page.getByRole("button", { name: "Mark all as drop" }).isDisabled());
    await page.keyboard.press("Home");
    await until(() => exactly(page), (found) => found >= 190, "nearly all rows lie beyond the least, the page says");
  },

  async overview_histogram_of_another_column({ page, world }) {
    await open(page, world);
    await page.getByLabel("Column of the histogram").selectOption({ label: "Loss" });
    await page.getByRole("slider", { name: "Threshold on loss" }).waitFor();
    await page.getByRole("img", { name: "Histogram of loss over 200 rows." }).waitFor();
  },

  async overview_brush({ page, world }) {
    await open(page, world);
    const region = page.getByRole("region", { name: "Loss and self-influence" });
    const picture = region.getByRole("img", { name: /^Scatter/ });
    await picture.scrollIntoViewIfNeeded();
    const box = await picture.boundingBox();
    await page.mouse.move(box.x + 0.55 * box.width, box.y + 0.1 * box.height);
    await page.mouse.down();
    await page.mouse.move(box.x + 0.95 * box.width, box.y + 0.6 * box.height, { steps: 5 });
    await page.mouse.up();
    const text = await until(
      () => region.getByText(/in the chosen range/).innerText().catch(() => ""),
      (words) => words !== "",
      "nothing was chosen",
    );
    await region.getByRole("link", { name: "Show these" }).click();
    await page.getByRole("heading", { level: 1, name: "Examples" }).waitFor();
    const ranges = new URLSearchParams(new URL(page.url()).hash.split("?")[1]).getAll("within").map((one) => one.split(":"));
    const number = (word) => ({ inf: Infinity, "-inf": -Infinity })[word] ?? Number(word);
    const inside = (row) => ranges.every(([name, low, high]) => row[name] >= number(low) && row[name] <= number(high));
    const wanted = expected(world, inside);
    assert.equal(ranges.length, 2);
    assert.equal(leading(text), wanted.length);
    assert.ok(wanted.length > 0 && wanted.length < 200);
    await lists(page, wanted);
    assert.equal(await page.getByRole("button", { name: /^Remove filter/ }).count(), 2);
    await page.getByRole("button", { name: /^Remove filter: loss/ }).click();
    await until(() => listed(page), (found) => found >= wanted.length, "without the range of losses");
  },

  async overview_brush_by_numbers({ page, world }) {
    await open(page, world);
    const region = page.getByRole("region", { name: "Loss and self-influence" });
    await region.getByText("Choose by numbers").click();
    await region.getByLabel("Loss from").fill("1");
    await region.getByLabel("Loss from").press("Tab");
    const wanted = world.rows.filter((row) => row.loss >= 1).length;
    await region.getByText(`${wanted} rows in the chosen range.`).waitFor();
  },

  async overview_click_on_a_point({ page, world }) {
    await open(page, world);
    const picture = page.getByRole("img", { name: /^Scatter/ });
    await picture.scrollIntoViewIfNeeded();
    const [top] = expected(world);
    const highest = await picture.locator("circle, [fill='var(--amber)'] path").evaluateAll((marks) => {
      const boxes = marks.map((mark) => mark.getBoundingClientRect());
      const { x, y, width, height } = boxes.sort((a, b) => a.y + a.height / 2 - b.y - b.height / 2)[0];
      return [x + width / 2, y + height / 2];
    });
    await page.mouse.click(...highest);
    await page.getByRole("heading", { level: 1, name: `Row ${top}` }).waitFor();
  },

  async overview_classes({ page, world }) {
    await open(page, world);
    const box = page.getByRole("region", { name: "Table of classes" });
    const numbers = () => box.locator("tbody td:nth-of-type(1)").allInnerTexts();
    assert.equal((await numbers()).reduce((sum, text) => sum + Number(text), 0), 200);
    await box.getByRole("button", { name: "Rows" }).click();
    const sorted = (await numbers()).map(Number);
    assert.deepEqual(sorted, sorted.toSorted((a, b) => b - a));
    assert.equal(await box.getByRole("columnheader", { name: "Rows" }).getAttribute("aria-sort"), "descending");
    await box.getByRole("link", { name: "7" }).click();
    await lists(page, expected(world, (row) => row.label === 7));
  },

  async overview_groups({ page, world }) {
    await open(page, world);
    await page.getByLabel("Column of the groups").selectOption("scanner");
    const box = page.getByRole("region", { name: "Table of groups by scanner" });
    await box.getByRole("row", { name: /^new 133/ }).waitFor();
    await box.getByRole("row", { name: /^old 67/ }).waitFor();
    await box.getByRole("link", { name: "old" }).click();
    await lists(page, expected(world, (row) => row.scanner === "old"));
  },

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
    const told = await cards(page).first().getByTitle(/^[\d.e+-]+$/).getAttribute("title");
    assert.ok(Math.abs(Number(told) - loss) <= 1e-5 * loss, `${told} is not ${loss}`);
  },

  async examples_by_class({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Class").selectOption({ label: "3" });
    await lists(page, expected(world, (row) => row.label === 3));
    await field(page, "Prediction").selectOption({ label: "5" });
    const both = expected(world, (row) => row.label === 3 && row.prediction === 5);
    if (both.length) await lists(page, both);
    else await page.getByRole("heading", { name: "Nothing matches" }).waitFor();
    await page.getByRole("button", { name: "Remove filter: class 3" }).click();
    await lists(page, expected(world, (row) => row.prediction === 5));
  },

  async examples_where_the_prediction_differs({ page, world }) {
    await open(page, world, "examples");
    await page.getByRole("checkbox", { name: "Prediction differs" }).check();
    await lists(page, expected(world, (row) => row.label !== row.prediction));
  },

  async examples_by_group({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Group").selectOption({ label: "scanner: old" });
    await lists(page, expected(world, (row) => row.scanner === "old"));
    await field(page, "Group").selectOption({ label: "corrupted: true" });
    await lists(page, expected(world, (row) => row.corrupted));
  },

  async examples_by_share({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Share").selectOption({ label: "Highest 10%" });
    const total = await until(() => listed(page), (found) => found < 200, "a tenth of 200 is");
    assert.ok(Math.abs(total - 20) <= 1, `a tenth of 200 rows are 20, not ${total}`);
    await lists(page, expected(world).slice(0, total));
    await field(page, "Share").selectOption({ label: "Lowest quarter" });
    const lowest = await until(() => listed(page), (found) => found > total, "a quarter of 200 is");
    assert.ok(Math.abs(lowest - 50) <= 1, `a quarter of 200 rows are 50, not ${lowest}`);
    await lists(page, expected(world).slice(-lowest));
  },

  async examples_by_id({ page, world }) {
    await open(page, world, "examples");
    await page.keyboard.press("/");
    await page.keyboard.type("digit-01");
    await lists(page, expected(world, (row) => row.id.includes("digit-01")));
    await field(page, "Search").fill("no such thing");
    await page.getByRole("heading", { name: "Nothing matches" }).waitFor();
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
    await until(() => cards(page).count(), (count) => count > 0 && count < 150, "cards in the document");
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
    assert.deepEqual(offsets.toSorted((a, b) => a - b), [0, 60, 120, 180]);
    assert.ok(asked.every((one) => Number(one.get("limit")) <= 60));
    assert.ok((await cards(page).count()) < 200, "all rows are in the document at once");
    const shown = await rowsOf(page);
    assert.deepEqual(shown, order.slice(order.length - shown.length));
  },

  async examples_as_images({ page, world }) {
    await open(page, world, "examples");
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
    const focused = () => page.evaluate(() => Number(/row (\d+)/.exec(document.activeElement.ariaLabel ?? "")?.[1] ?? -1));
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
    await page.getByRole("dialog", { name: "Keys" }).waitFor();
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
    await page.getByText(/Scores in nats/).waitFor();
    const facts = page.getByRole("region", { name: new RegExp(`^row ${row},`) });
    assert.match(await facts.innerText(), /1 of 200/);
    assert.match(await facts.innerText(), new RegExp(world.rows[row].id));
  },

  async example_normalised({ page, world }) {
    const { row, none, gradient } = world.explained;
    await open(page, world, `example/${row}`);
    await answered(page, none);
    await page.getByRole("radio", { name: "Gradient" }).check();
    await answered(page, gradient);
    assert.notDeepEqual(gradient.proponents, none.proponents);
    await page.reload();
    await answered(page, gradient);
    await page.getByRole("radio", { name: "None" }).check();
    await answered(page, none);
    await page.getByRole("checkbox", { name: "Same label only" }).check();
    const { label } = world.rows[row];
    const labelsOf = async () => (await sideOf(page, "Proponents")).map(([of]) => world.rows[of].label);
    await until(labelsOf, (found) => found.length > 0 && found.every((one) => one === label), `all should be of label ${label}`);
  },

  async example_to_example_and_back({ page, world }) {
    const { row, none } = world.explained;
    await open(page, world, "examples");
    await lists(page, expected(world));
    await cards(page).getByRole("link", { name: new RegExp(`^row ${row},`) }).click();
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

  async ask_without_the_model({ page, world }) {
    await open(page, world, "ask");
    await page.getByRole("heading", { name: "The model is not loaded" }).waitFor();
    assert.equal(await page.getByRole("button", { name: "Ask" }).count(), 0);
  },

  async decide_by_keys({ page, world }) {
    await open(page, world, "examples");
    const [first, second] = expected(world);
    await lists(page, expected(world));
    await decided(page, { drop: 0, keep: 0, relabel: 0 });
    const pressed = (row) =>
      page.getByRole("group", { name: `Decide on row ${row}` }).getByRole("button", { pressed: true }).allInnerTexts();
    const isPressed = (word, row) => page.getByRole("button", { name: `${word} row ${row}`, pressed: true }).waitFor();
    await page.keyboard.press("j");
    await press(page, "d", `Row ${first}: to drop.`);
    await decided(page, { drop: 1, keep: 0, relabel: 0 });
    await isPressed("Drop", first);
    await press(page, "u", `Row ${first}: to keep.`);
    await decided(page, { drop: 0, keep: 1, relabel: 0 });
    await isPressed("Keep", first);
    await page.keyboard.press("r");
    const dialog = page.getByRole("dialog", { name: `Relabel row ${first}` });
    await dialog.getByLabel("New label").selectOption("4");
    await dialog.getByRole("button", { name: "Relabel" }).click();
    await decided(page, { drop: 0, keep: 0, relabel: 1 });
    await isPressed("Relabel", first);
    await press(page, "x", `Row ${first}: undecided again.`);
    await decided(page, { drop: 0, keep: 0, relabel: 0 });
    assert.deepEqual(await pressed(first), []);
    await press(page, "z", "Undone: 1 row as before.");
    await decided(page, { drop: 0, keep: 0, relabel: 1 });
    await isPressed("Relabel", first);
    await page.keyboard.press("j");
    await press(page, "d", `Row ${second}: to drop.`);
    await decided(page, { drop: 1, keep: 0, relabel: 1 });
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: `Row ${second}` }).waitFor();
    await page.getByRole("button", { name: /^Drop/, pressed: true }).waitFor();
    await press(page, "u", `Row ${second}: to keep.`);
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    world.acts = { [first]: "relabel", [second]: "keep" };
  },

  async decide_by_buttons({ page, world }) {
    await open(page, world, "examples");
    const order = expected(world);
    await lists(page, order);
    await page.getByRole("button", { name: `Drop row ${order[2]}` }).click();
    await decided(page, { drop: 1, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: `Drop row ${order[2]}` }).click();
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: `Relabel row ${order[2]}` }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
  },

  async decide_beyond_the_threshold({ page, world }) {
    await open(page, world);
    await exactly(page);
    await slider(page).focus();
    for (let time = 0; time < 3; time += 1) await page.keyboard.press("ArrowLeft");
    const threshold = await thresholdOf(page);
    const wanted = expected(world, (row) => row.self_influence > threshold);
    await until(() => exactly(page), (found) => found === wanted.length, `${wanted.length} lie beyond, the page says`);
    await page.getByRole("button", { name: "Mark all as drop" }).click();
    await decided(page, { drop: wanted.length, keep: 0, relabel: 0 });
    await page.keyboard.press("z");
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: "Mark all as drop" }).click();
    await decided(page, { drop: wanted.length });
    for (const row of wanted) world.acts[row] = "drop";
    const [first] = wanted;
    await open(page, world, `example/${first}`);
    await page.getByRole("button", { name: /^Drop/, pressed: true }).waitFor();
    await page.keyboard.press("r");
    await page.getByLabel("New label").selectOption("4");
    await page.getByRole("dialog").getByRole("button", { name: "Relabel" }).click();
    await decided(page, { drop: wanted.length - 1, keep: 0, relabel: 1 });
    world.acts[first] = "relabel";
  },

  async decide_and_reload({ page, world }) {
    await open(page, world);
    const before = await tallies(page);
    await page.reload();
    await decided(page, before);
    await page.getByRole("contentinfo").getByRole("link", { name: /to drop/ }).click();
    await lists(page, expected(world, (row) => world.acts[row.row] === "drop"));
    await field(page, "Decision").selectOption({ label: "Relabel" });
    await lists(page, expected(world, (row) => world.acts[row.row] === "relabel"));
    await field(page, "Decision").selectOption({ label: "Undecided" });
    await lists(page, expected(world, (row) => !world.acts[row.row]));
  },

  async decide_and_export({ page, world }) {
    await open(page, world);
    const saved = [await save(page, world, "CSV"), await save(page, world, "Parquet")];
    world.kept.exported = { saved, acts: world.acts };
  },

  async decide_and_be_killed({ page, world, window }) {
    await open(page, world);
    const before = await tallies(page);
    await world.server.kill();
    window.awaited = ["ERR_CONNECTION_REFUSED", "403"];
    await open(page, world, "example/3");
    await page.getByText("The server does not answer. Is eigentrace serve still running?").first().waitFor();
    await Server.withModel(world);
    await page.keyboard.press("z");
    await page.getByText(/Reload the page: the server was started anew/).waitFor();
    await page.reload();
    await decided(page, before);
    await press(page, "d", "Row 3: to drop.");
    await decided(page, { drop: before.drop + 1 });
    await press(page, "z", "Undone");
    await decided(page, before);
  },

  async ask_about_an_image({ page, world }) {
    await Server.withModel(world);
    await open(page, world, "ask");
    const { file, label, answer, prediction } = world.asked;
    await page.getByRole("button", { name: "Ask" }).click();
    await page.getByText("Choose an image first.").waitFor();
    await page.getByLabel(/Drop an image here/).setInputFiles(file);
    await page.getByLabel("Label to explain").selectOption(String(label));
    await page.getByRole("button", { name: "Ask" }).click();
    await answered(page, answer);
    assert.match(await page.getByText(/^The model predicts/).innerText(), new RegExp(`^The model predicts ${prediction} `));
    await page.getByRole("link", { name: /^Proponent: row/ }).first().click();
    await page.getByRole("heading", { level: 1, name: `Row ${answer.proponents[0][0]}` }).waitFor();
  },

  async ask_about_no_image({ page, world }) {
    await Server.withModel(world);
    await open(page, world, "ask");
    const input = page.locator("input[type=file]");
    await input.setInputFiles({ name: "words.txt", mimeType: "text/plain", buffer: Buffer.from("words") });
    await page.getByText("That is no PNG, JPEG or WebP image.").first().waitFor();
    const large = Buffer.alloc(4 * 2 ** 20 + 1);
    await input.setInputFiles({ name: "large.png", mimeType: "image/png", buffer: large });
    await page.getByText("The image is larger than 4 MiB: choose a smaller one.").first().waitFor();
  },

  async ask_about_a_broken_image({ page, world, window }) {
    await Server.withModel(world);
    window.awaited = ["400"];
    await open(page, world, "ask");
    await page.locator("input[type=file]").setInputFiles({ name: "a.png", mimeType: "image/png", buffer: Buffer.from("no") });
    await page.getByRole("button", { name: "Ask" }).click();
    await page.getByText(/^The image cannot be read as PNG/).waitFor();
  },

  async colours_switched({ page, world }) {
    await page.emulateMedia({ colorScheme: "light" });
    await open(page, world);
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await ground();
    await page.getByRole("button", { name: "Switch between light and dark" }).click();
    const dark = await until(ground, (found) => found !== light, "the colour of the ground");
    await page.reload();
    await page.getByRole("heading", { level: 1 }).waitFor();
    assert.equal(await ground(), dark);
  },

  async accessible_overview({ page, world }) {
    await open(page, world);
    await accessible(page, () => page.getByRole("img", { name: /^Scatter/ }).waitFor());
  },

  async accessible_examples({ page, world }) {
    await open(page, world, "examples");
    await accessible(page, () => cards(page).first().waitFor());
  },

  async accessible_example({ page, world }) {
    await open(page, world, `example/${world.explained.row}`);
    await accessible(page, () => page.getByRole("region", { name: "Proponents" }).waitFor());
  },

  async accessible_ask({ page, world }) {
    await Server.withModel(world);
    await open(page, world, "ask");
    await accessible(page, () => page.getByRole("button", { name: "Ask" }).waitFor());
  },

  async accessible_dialogs({ page, world }) {
    await open(page, world, `example/${world.explained.row}`);
    await page.getByRole("button", { name: "Keyboard help" }).click();
    await accessible(page, () => page.getByRole("dialog", { name: "Keys" }).waitFor());
    await page.keyboard.press("Escape");
    await page.getByRole("button", { name: /^Relabel/ }).click();
    await accessible(page, () => page.getByRole("dialog", { name: /^Relabel row/ }).waitFor());
  },

  ...reported,

  async quiet_all_the_time({ world }) {
    quiet(world);
  },
};

await tour(scenarios, async (world) => {
  world.kept = {};
  world.server = await Server.start(world);
});
