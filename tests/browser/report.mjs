// The page as one file: the same views without a server.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import {
  accessible,
  answered,
  cards,
  decided,
  leading,
  lists,
  open,
  press,
  reads,
  rowsOf,
  save,
  SOME,
  until,
} from "./driving.mjs";

async function view({ page, world }, name = "overview") {
  world.file = world.report;
  await open(page, world, name, pathToFileURL(world.report).href);
}

/** Rows that the report holds, read from the file itself. */
function held(world) {
  const text = /<script type="application\/json" id="embedded">(.*?)<\/script>/s.exec(
    readFileSync(world.report, "utf8"),
  )[1];
  return Object.keys(JSON.parse(text).rows).map(Number);
}

/** The rows in the report, sorted by a column. */
function expected(world, column, sign) {
  const compare = (a, b) => sign * (world.rows[a][column] - world.rows[b][column]) || a - b;
  return held(world).sort(compare);
}

/** Cut an explanation to the number of proponents and opponents that a report contains. */
function shortened({ proponents, opponents }) {
  return { proponents: proponents.slice(0, 6), opponents: opponents.slice(0, 6) };
}

export const reported = {
  async report_overview({ page, world }) {
    await view({ page, world });
    const words = await page.getByText(/^This report contains/).innerText();
    assert.equal(Number(/contains ([\d,]+) of 200/.exec(words)[1]), held(world).length);
    await page.getByRole("img", { name: /^Spectrum/ }).waitFor();
    await page.getByRole("img", { name: /^Scatter/ }).waitFor();
    await page.getByRole("slider", { name: "Threshold on self-influence" }).press("Home");
    await until(
      () => page.getByText(/are above/).innerText(),
      (text) => leading(text) >= 190 && text.includes("in this report"),
      "nearly all examples should be above the threshold, the page shows",
    );
    await page.getByLabel("Group by column").selectOption("scanner");
    const groups = page.getByRole("region", { name: "Table of groups by scanner" });
    await groups.getByRole("row", { name: /^old 67/ }).waitFor();
    await page.getByRole("region", { name: "Table of classes" }).getByRole("link", { name: "7" }).click();
    await page.getByRole("heading", { level: 1, name: "Examples" }).waitFor();
    await until(
      async () => (await rowsOf(page)).map((row) => world.rows[row].label),
      (found) => found.length > 0 && found.every((label) => label === 7),
      "all should be of class 7",
    );
  },

  async report_examples({ page, world }) {
    await view({ page, world }, "examples");
    await lists(page, expected(world, "self_influence", -1));
    const form = page.getByRole("search");
    await form.getByLabel("Sort by").selectOption({ label: "Loss" });
    await lists(page, expected(world, "loss", -1));
    await form.getByRole("button", { name: /^Highest first/ }).click();
    await lists(page, expected(world, "loss", 1));
    await until(
      () =>
        cards(page)
          .getByRole("img")
          .evaluateAll((found) => found.map((one) => [one.src.slice(0, 15), one.naturalWidth])),
      (found) => found.length > 11 && found.every(([start, width]) => start === "data:image/png;" && width === 28),
      "every card should have an image inside the file",
    );
  },

  async report_searched_by_key({ page, world }) {
    await view({ page, world });
    await page.keyboard.press("/");
    await page.keyboard.type("no such thing");
    await page.getByRole("heading", { name: "No matches" }).waitFor();
    assert.equal(await page.getByRole("searchbox", { name: "Search" }).inputValue(), "no such thing");
  },

  async report_searched_by_id({ page, world }) {
    await view({ page, world }, "examples");
    const row = expected(world, "self_influence", -1)[0];
    await page.getByRole("searchbox", { name: "Search" }).fill(world.rows[row].id.toUpperCase());
    await lists(page, [row]);
  },

  async report_example({ page, world }) {
    const { row } = world.explained;
    const none = shortened(world.explained.none);
    await view({ page, world }, "examples");
    await cards(page)
      .getByRole("link", { name: new RegExp(`^row ${row},`) })
      .click();
    await answered(page, none);
    const [to] = none.opponents[0];
    await page.getByRole("link", { name: new RegExp(`^Opponent: row ${to},`) }).click();
    await page.getByRole("heading", { level: 1, name: `Row ${to}` }).waitFor();
    await page.goBack();
    await answered(page, none);
  },

  async report_without_the_row({ page, world }) {
    const known = new Set(held(world));
    const absent = world.rows.find(({ row }) => !known.has(row)).row;
    await view({ page, world }, `example/${absent}`);
    await page.getByRole("heading", { name: "Not in this report" }).waitFor();
    await page.getByText(`Row ${absent} is not among the ${known.size} examples of this report.`).waitFor();
  },

  async report_decides({ page, world }) {
    await view({ page, world }, "examples");
    const order = expected(world, "self_influence", -1);
    await lists(page, order);
    await decided(page, { drop: 0, keep: 0, relabel: 0 });
    await page.keyboard.press("j");
    await press(page, "d", `Row ${order[0]}: marked to drop.`);
    await page.keyboard.press("j");
    await press(page, "u", `Row ${order[1]}: marked to keep.`);
    await decided(page, { drop: 1, keep: 1, relabel: 0 });
    const lines = readFileSync(await save(page, world, "CSV"), "utf8")
      .trim()
      .split("\n");
    const said = (row, word) => `${row},${world.rows[row].id},${word},`;
    assert.deepEqual(lines.slice(1).toSorted(), [said(order[0], "drop"), said(order[1], "keep")].toSorted());
    await press(page, "z", "Undone");
    await decided(page, { drop: 1, keep: 0, relabel: 0 });
  },

  async report_cannot_explain_new_examples({ page, world }) {
    await view({ page, world }, "ask");
    await page.getByRole("heading", { name: "The model is not loaded" }).waitFor();
    await page.getByText(/Open the run with eigentrace serve/).waitFor();
    await reads(() => page.getByRole("button", { name: "Explain" }).count(), 0, "the number of buttons to explain");
  },

  async report_accessible_overview({ page, world }) {
    await view({ page, world });
    await accessible(page, () => page.getByRole("img", { name: /^Scatter/ }).waitFor(), SOME);
  },

  async report_accessible_examples({ page, world }) {
    await view({ page, world }, "examples");
    await accessible(page, () => cards(page).first().waitFor(), SOME);
  },

  async report_accessible_example({ page, world }) {
    await view({ page, world }, `example/${world.explained.row}`);
    await accessible(page, () => page.getByRole("region", { name: "Proponents" }).waitFor(), SOME);
  },
};
