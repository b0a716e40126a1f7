// Responses that arrive late or out of order, and keys pressed before earlier actions have finished.

import assert from "node:assert/strict";
import {
  answered,
  decided,
  delayed,
  expected,
  field,
  lists,
  normalise,
  open,
  press,
  reads,
  settled,
  slider,
  tallies,
  until,
} from "./driving.mjs";

export const late = {
  async late_groups({ page, world }) {
    const first = await delayed(page, "/api/groups/");
    await open(page, world);
    await first.asked;
    const choice = page.getByLabel("Group by column");
    assert.notEqual(await choice.inputValue(), "scanner");
    await choice.selectOption("scanner");
    const box = page.getByRole("region", { name: "Table of groups by scanner" });
    await box.getByRole("row", { name: /^new 133/ }).waitFor();
    await first.release();
    assert.equal(await box.count(), 1, "the late response for an earlier choice replaced the table");
  },

  async a_response_that_breaks_off({ page, world }) {
    const cut = async (route) => {
      const response = await route.fetch();
      const body = await response.body();
      await route.fulfill({ response, body: body.subarray(0, body.length / 2) });
    };
    const isCut = (url) => url.pathname.startsWith("/api/groups/") || url.pathname.startsWith("/api/histogram");
    await page.route(isCut, cut);
    await open(page, world);
    await page.getByLabel("Column of the histogram").selectOption({ label: "Loss" });
    const words = page.getByText("The server's response broke off. Check that eigentrace serve is still running.");
    await reads(() => words.count(), 2, "views whose response broke off");
    await page.unroute(isCut, cut);
    await page.reload();
    await page.getByRole("region", { name: /^Table of groups/ }).waitFor();
    await slider(page).waitFor();
  },

  async late_histogram({ page, world }) {
    await open(page, world);
    const choice = page.getByLabel("Column of the histogram");
    const first = await delayed(page, "/api/histogram");
    await choice.selectOption({ label: "Loss" });
    await first.asked;
    await choice.selectOption({ label: "Gradient norm" });
    const grip = page.getByRole("slider", { name: "Threshold on gradient norm" });
    await grip.waitFor();
    await first.release();
    assert.equal(await grip.count(), 1, "the late response for an earlier choice replaced the histogram");
  },

  async late_list({ page, world }) {
    await open(page, world, "examples");
    await lists(page, expected(world));
    const first = await delayed(page, "/api/examples?");
    await field(page, "Class").selectOption({ label: "3" });
    await first.asked;
    await field(page, "Class").selectOption({ label: "5" });
    const wanted = expected(world, (row) => row.label === 5);
    await lists(page, wanted);
    await first.release();
    await lists(page, wanted);
  },

  async a_list_without_a_server({ page, world }) {
    await open(page, world, "examples");
    const wanted = expected(world);
    await lists(page, wanted);
    world.awaited = ["ERR_FAILED", "Failed to load resource"];
    const asked = [];
    await page.route("**/api/examples?*", (route) => {
      asked.push(Date.now());
      return route.abort("failed");
    });
    await page.evaluate(() => scrollTo(0, document.body.scrollHeight));
    await until(
      () => asked.length,
      (number) => number >= 5,
      "the page should keep retrying while the server is down; number of requests",
    );
    // Waits double, starting at half a second; with a constant wait, five requests would take two seconds.
    assert.ok(asked[4] - asked[0] > 2500, `five requests within ${asked[4] - asked[0]} ms: no exponential backoff`);
    await page.unroute("**/api/examples?*");
    await page.getByRole("link", { name: new RegExp(`^row ${wanted.at(-1)},`) }).waitFor();
  },

  async late_scores({ page, world }) {
    const { row, none } = world.explained;
    await open(page, world, `example/${row}`);
    await answered(page, none);
    const plain = await delayed(page, "/api/explain/");
    await normalise(page, "Gradient");
    await plain.asked;
    await page.getByRole("button", { name: "Compute exact scores" }).click();
    const exact = page.getByText(/^Exact scores\./);
    await exact.waitFor();
    await plain.release();
    assert.equal(await exact.count(), 1, "late scores replaced exact scores that were requested after them");
  },

  async late_decisions({ page, world }) {
    const row = expected(world).at(-1);
    await open(page, world, `example/${row}`);
    const buttons = page.getByRole("group", { name: `Decide on row ${row}`, exact: true });
    await buttons.waitFor();
    const before = await tallies(page);
    const posts = [];
    page.on("request", (request) => {
      if (request.method() === "POST") posts.push(request.postDataJSON().decision ?? "undo");
    });
    const first = await delayed(page, "/api/decisions");
    await page.keyboard.press("d");
    await first.asked;
    await page.keyboard.press("u");
    await page.keyboard.press("z");
    await settled(page);
    assert.deepEqual(posts, ["drop"], "a decision was sent before the previous one had finished");
    await first.release();
    await decided(page, { ...before, drop: before.drop + 1 });
    await buttons.getByRole("button", { name: /^Drop/, pressed: true }).waitFor();
    assert.deepEqual(posts, ["drop", "keep", "undo"]);
    await press(page, "z", "Undone: last decision on 1 example.");
    await decided(page, before);
  },

  async late_row({ page, world }) {
    const row = expected(world).at(-2);
    await open(page, world, `example/${row}`);
    const buttons = page.getByRole("group", { name: `Decide on row ${row}`, exact: true });
    await buttons.waitFor();
    const before = await tallies(page);
    const first = await delayed(page, `/api/examples/${row}`);
    await press(page, "d", `Row ${row}: marked to drop.`);
    await first.asked;
    await press(page, "u", `Row ${row}: marked to keep.`);
    const subject = page.getByRole("region", { name: new RegExp(`^row ${row},`) });
    await subject.getByText("to keep", { exact: true }).waitFor();
    await first.release();
    const dropped = await subject.getByText("to drop", { exact: true }).count();
    assert.equal(dropped, 0, "a late response restored the previous decision");
    await press(page, "z", "Undone");
    await press(page, "z", "Undone");
    await decided(page, before);
  },

  async keys_right_after_the_slash({ page, world }) {
    const slash = () =>
      page.evaluate(() => {
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true, cancelable: true }));
        return document.activeElement.name ?? document.activeElement.localName;
      });
    await open(page, world, "examples");
    assert.equal(await slash(), "search", "the search box should be focused synchronously");
    await open(page, world);
    assert.equal(await slash(), "search", "the search box should be focused synchronously");
    await page.goBack();
    await reads(() => page.getByRole("heading", { level: 1 }).innerText(), "Overview", "the previous view");
    await page.keyboard.press("/");
    await page.keyboard.type("digit-01");
    await lists(
      page,
      expected(world, (row) => row.id.includes("digit-01")),
    );
  },

  async typing_while_the_list_is_redrawn({ page, world }) {
    await open(page, world, "examples");
    await lists(page, expected(world));
    await page.evaluate(() => {
      const type = (letter) => () => document.execCommand("insertText", false, letter);
      navigation.addEventListener("currententrychange", type("1"), { once: true }); // before the page's handlers
      addEventListener("hashchange", type("9"), { once: true }); // and after them
    });
    await field(page, "Search").focus();
    await page.keyboard.insertText("digit-0");
    await lists(page, [19]);
    assert.equal(await field(page, "Search").inputValue(), "digit-019");
    await page.goBack();
    await reads(() => field(page, "Search").inputValue(), "digit-0", "the search of the previous URL");
    await lists(
      page,
      expected(world, (row) => row.id.includes("digit-0")),
    );
  },

  async leaving_with_a_pending_search({ page, world }) {
    await open(page, world, "examples");
    await lists(page, expected(world));
    await page.evaluate(async () => {
      const box = document.querySelector("[name=search]");
      box.value = "digit-01";
      box.dispatchEvent(new InputEvent("input", { bubbles: true }));
      location.hash = "#/overview";
      await new Promise((resolve) => setTimeout(resolve, 500));
    });
    assert.match(page.url(), /#\/overview$/, "a pending search returned to a view that the user had left");
    await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  },
};
