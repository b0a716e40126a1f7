// A run of pairs of texts without classes; some texts are script injections.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import {
  accessible,
  answered,
  cards,
  decided,
  expected,
  field,
  lists,
  normalise,
  open,
  press,
  quiet,
  save,
  Server,
  SOME,
  tour,
  until,
} from "./driving.mjs";

/** Check that no text of the data was run or parsed as HTML. */
async function inert(page) {
  const done = await page.evaluate(() => ({
    owned: [globalThis.owned, globalThis.__hacked].filter((value) => value !== undefined),
    scripts: document.querySelectorAll("main script, footer script").length,
    injected: document.querySelectorAll("[onerror], [onload], img[src='x'], main b b, main i, main forum").length,
    frames: document.querySelectorAll("iframe, object, embed").length,
    bad: [...document.links].filter((link) => link.href.startsWith("javascript:")).length,
  }));
  assert.deepEqual(done, { owned: [], scripts: 0, injected: 0, frames: 0, bad: 0 });
}

/** The full texts of the open example. */
function textsOf(page, name) {
  return page
    .getByRole("region", { name })
    .getByRole("paragraph")
    .evaluateAll((found) => found.map((one) => one.textContent));
}

const scenarios = {
  async overview({ page, world }) {
    await open(page, world);
    await page.getByRole("img", { name: /^Spectrum/ }).waitFor();
    await page.getByRole("img", { name: "Scatter plot of self-influence against loss for 50 examples" }).waitFor();
    assert.equal(await page.getByRole("region", { name: "Table of classes" }).count(), 0);
    const groups = page.getByRole("region", { name: "Table of groups by source" });
    await groups.getByRole("row", { name: /^web 17/ }).waitFor();
    await groups.getByRole("link", { name: "<b>forum</b>" }).click();
    await lists(
      page,
      expected(world, (row) => row.source === "<b>forum</b>"),
    );
    await inert(page);
  },

  async examples_sorted_both_ways({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Sort by").selectOption({ label: "Loss" });
    await lists(page, expected(world, undefined, "loss"));
    await page.getByRole("button", { name: /^Highest first/ }).click();
    await lists(page, expected(world, undefined, "loss", 1));
    assert.equal(await field(page, "Class").count(), 0);
  },

  async examples_found_by_words({ page, world }) {
    await open(page, world, "examples");
    const has = (words) => (row) => `${row.text}\n${row.target}`.toLowerCase().includes(words.toLowerCase());
    for (const words of ["SCRIPT>", "große", "the", "日本", "</textarea>"]) {
      await field(page, "Search").fill(words);
      const wanted = expected(world, has(words));
      assert.ok(wanted.length > 0, `${words} is in no text`);
      await lists(page, wanted);
    }
    await inert(page);
  },

  async examples_by_group_and_quantile({ page, world }) {
    await open(page, world, "examples");
    await field(page, "Group").selectOption({ label: "source: books" });
    await lists(
      page,
      expected(world, (row) => row.source === "books"),
    );
    await field(page, "Quantile").selectOption({ label: "Lowest quarter" });
    const low = new Set(expected(world).slice(-13));
    await lists(
      page,
      expected(world, (row) => low.has(row.row) && row.source === "books"),
    );
  },

  async long_texts({ page, world }) {
    const { row, id, text } = world.rows.at(-1);
    await open(page, world, `examples?search=${id}`);
    const card = cards(page).filter({ hasText: id });
    await card.getByText("Truncated.").waitFor({ state: "attached" });
    assert.ok(!(await card.textContent()).includes(text));
    await open(page, world, `example/${row}`);
    await until(
      () => textsOf(page, `row ${row}`),
      (found) => found.includes(text),
      "the whole text",
    );
  },

  async hostile_texts_are_only_shown({ page, world }) {
    for (const { row, id, text, target } of world.rows.slice(0, 12)) {
      await open(page, world, `example/${row}`);
      await until(
        () => textsOf(page, `row ${row}`),
        (found) => found.includes(text) && found.includes(target),
        `row ${row} should show ${JSON.stringify([text, target])}, and shows`,
      );
      await page
        .getByRole("region", { name: `row ${row}`, exact: true })
        .getByText(id, { exact: true })
        .waitFor();
      await page.getByRole("region", { name: "Proponents" }).waitFor();
      await inert(page);
    }
  },

  async hostile_texts_in_the_list({ page, world }) {
    await open(page, world, "examples?sort=row&order=asc");
    await cards(page).first().waitFor();
    const texts = await until(
      () => cards(page).allTextContents(),
      (found) => found.length > 5,
      "cards in the document",
    );
    for (const [at, { id, text, target }] of world.rows.slice(0, 5).entries()) {
      assert.ok(texts[at].includes(id), `${texts[at]} lacks ${id}`);
      assert.ok(texts[at].includes(text) && texts[at].includes(target), texts[at]);
    }
    await inert(page);
  },

  async hostile_addresses({ page, world }) {
    world.awaited = ["status of 400"];
    const hostile = encodeURIComponent('"><img src=x onerror=alert(1)>');
    await open(page, world, `examples?group=source:${hostile}&search=${hostile}`);
    await page.getByText(/No matches|Something went wrong/).waitFor();
    await inert(page);
    await open(page, world, `examples?sort=${hostile}`);
    await page.getByRole("heading", { name: "Something went wrong" }).waitFor();
    await inert(page);
    await open(page, world, `example/${hostile}?normalize=${hostile}`);
    await page.getByRole("heading", { name: "There is no such row" }).waitFor();
    await inert(page);
  },

  async example_sides_and_back({ page, world }) {
    const { row, none, gradient } = world.explained;
    await open(page, world, `example/${row}`);
    await answered(page, none);
    await normalise(page, "Gradient");
    await answered(page, gradient);
    const [to] = gradient.opponents[0];
    await page.getByRole("link", { name: `Opponent: row ${to}`, exact: true }).click();
    await page.getByRole("heading", { level: 1, name: `Row ${to}` }).waitFor();
    await page.goBack();
    await answered(page, gradient);
  },

  async decide_by_keys({ page, world }) {
    await open(page, world, "examples?sort=row&order=asc");
    await cards(page).first().waitFor();
    await page.keyboard.press("j");
    await press(page, "d", "Row 0: marked to drop.");
    await page.keyboard.press("ArrowDown");
    await press(page, "u", "Row 1: marked to keep.");
    await page.keyboard.press("r");
    await decided(page, { drop: 1, keep: 1 });
    assert.equal(await page.getByRole("dialog").count(), 0);
    assert.equal(await page.getByRole("button", { name: "Relabel row 1" }).count(), 0);
    await press(page, "x", "Row 1: decision cleared.");
    await press(page, "z", "Undone");
    await decided(page, { drop: 1, keep: 1 });
    await page.reload();
    await decided(page, { drop: 1, keep: 1 });
    await field(page, "Decision").selectOption({ label: "Drop" });
    await until(
      () => cards(page).count(),
      (found) => found === 1,
      "examples to drop",
    );
    const lines = readFileSync(await save(page, world, "CSV"), "utf8").split("\n");
    assert.ok(
      lines.some((line) => line.includes("<i>0</i>") && line.includes("drop")),
      lines.slice(0, 3).join("\n"),
    );
  },

  async explain_without_the_model({ page, world }) {
    await open(page, world, "ask");
    await page.getByRole("heading", { name: "The model is not loaded" }).waitFor();
    assert.equal(await page.getByRole("button", { name: "Explain" }).count(), 0);
  },

  async explain_a_new_pair({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    const { text, target, answer } = world.asked;
    await page.getByLabel("Source").fill(text);
    await page.getByLabel("Target").fill(target);
    await page.getByRole("button", { name: "Explain" }).click();
    await answered(page, answer);
    await page.getByText(/^Its loss is [\d.]+ nats\.$/).waitFor();
  },

  async explain_a_hostile_pair({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    const words = "<img src=x onerror=alert(1)><script>window.owned = 1</script>";
    await page.getByLabel("Source").fill(words);
    await page.getByLabel("Target").fill(words);
    await page.getByRole("button", { name: "Explain" }).click();
    await page.getByRole("region", { name: "Proponents" }).waitFor();
    assert.equal(await page.getByLabel("Source").inputValue(), words);
    await inert(page);
  },

  async accessible_overview({ page, world }) {
    await open(page, world);
    await accessible(page, () => page.getByRole("img", { name: /^Scatter/ }).waitFor(), SOME);
  },

  async accessible_examples({ page, world }) {
    await open(page, world, "examples?sort=row&order=asc");
    await accessible(page, () => cards(page).first().waitFor(), SOME);
  },

  async accessible_example({ page, world }) {
    await open(page, world, "example/0");
    await accessible(page, () => page.getByRole("region", { name: "Proponents" }).waitFor(), SOME);
  },

  async accessible_new_example({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    await accessible(page, () => page.getByRole("button", { name: "Explain" }).waitFor(), SOME);
  },

  async errors_are_detected({ page, world }) {
    await open(page, world);
    const before = world.troubles.length;
    await page.evaluate(() => {
      const script = document.createElement("script");
      script.textContent = "window.owned = true";
      document.body.append(script);
      script.remove();
      setTimeout(() => {
        throw new Error("thrown on purpose");
      });
    });
    const signs = ["policy: script-src", "Content Security Policy", "thrown on purpose"];
    await until(
      () => world.troubles.slice(before).join(),
      (told) => signs.every((sign) => told.includes(sign)),
      "an injected script and an uncaught error should be detected; detected are",
    );
    world.troubles.length = before;
    await inert(page);
  },

  async no_errors_in_any_scenario({ world }) {
    quiet(world);
  },
};

await tour(scenarios);
