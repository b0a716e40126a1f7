// The overview of a run of images.

import assert from "node:assert/strict";
import { exactly, expected, leading, listed, lists, open, reads, slider, thresholdOf, until } from "./driving.mjs";

export const overview = {
  async overview_facts({ page, world }) {
    await open(page, world);
    await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
    const facts = await page
      .getByRole("term")
      .evaluateAll((terms) =>
        Object.fromEntries(terms.map((term) => [term.textContent, term.nextElementSibling.textContent])),
      );
    assert.equal(facts["training examples"], "200");
    assert.equal(facts["features per example"], String(world.features));
    assert.equal(facts.method, "Arnoldi");
    assert.match(Object.keys(facts).join(), /δ/);
    assert.match(await page.title(), /^Overview · \S+ · eigentrace$/);
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
    assert.ok(wanted > before, `${wanted} examples above the threshold after the drag, ${before} before`);
    await until(
      () => exactly(page),
      (found) => found === wanted,
      `${wanted} examples are above ${threshold}, the page shows`,
    );
    await page.getByRole("region", { name: "Distribution" }).getByRole("link", { name: "Show examples" }).click();
    await lists(
      page,
      expected(world, (row) => row.self_influence > threshold),
    );
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
    await until(
      () => exactly(page),
      (found) => found === wanted,
      `${wanted} examples are above ${threshold}, the page shows`,
    );
    assert.match(await slider(page).getAttribute("aria-valuetext"), new RegExp(`${wanted} examples above`));
    await page.keyboard.press("End");
    await reads(place, 100, "the position of the slider");
    const last = await until(
      () => exactly(page),
      (found) => found <= 1,
      "at most one example is above the maximum, the page shows",
    );
    assert.equal(await page.getByRole("button", { name: "Drop all" }).isDisabled(), last === 0);
    await page.keyboard.press("Home");
    await until(
      () => exactly(page),
      (found) => found >= 190,
      "nearly all examples are above the minimum, the page shows",
    );
  },

  async overview_histogram_of_another_column({ page, world }) {
    await open(page, world);
    await page.getByLabel("Column of the histogram").selectOption({ label: "Loss" });
    await page.getByRole("slider", { name: "Threshold on loss" }).waitFor();
    await page.getByRole("img", { name: "Histogram of loss over 200 examples." }).waitFor();
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
      () =>
        region
          .getByText(/in this range/)
          .innerText()
          .catch(() => ""),
      (words) => words !== "",
      "no range was selected",
    );
    await region.getByRole("link", { name: "Show examples" }).click();
    await page.getByRole("heading", { level: 1, name: "Examples" }).waitFor();
    const ranges = new URLSearchParams(new URL(page.url()).hash.split("?")[1])
      .getAll("within")
      .map((one) => one.split(":"));
    const number = (word) => ({ inf: Infinity, "-inf": -Infinity })[word] ?? Number(word);
    const inside = (row) => ranges.every(([name, low, high]) => row[name] >= number(low) && row[name] <= number(high));
    const wanted = expected(world, inside);
    assert.equal(ranges.length, 2);
    assert.equal(leading(text), wanted.length);
    assert.ok(wanted.length > 0 && wanted.length < 200);
    await lists(page, wanted);
    assert.equal(await page.getByRole("button", { name: /^Remove filter/ }).count(), 2);
    await page.getByRole("button", { name: /^Remove filter: loss/ }).click();
    await until(
      () => listed(page),
      (found) => found >= wanted.length,
      "the list without the range of losses, the page shows",
    );
  },

  async overview_brush_by_numbers({ page, world }) {
    await open(page, world);
    const region = page.getByRole("region", { name: "Loss and self-influence" });
    await region.getByText("Enter a range").click();
    await region.getByLabel("Loss from").fill("1");
    await region.getByLabel("Loss from").press("Tab");
    const wanted = world.rows.filter((row) => row.loss >= 1).length;
    await region.getByText(`${wanted} examples in this range.`).waitFor();
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
    assert.equal(
      (await numbers()).reduce((sum, text) => sum + Number(text), 0),
      200,
    );
    await box.getByRole("button", { name: "Examples" }).click();
    const sorted = (await numbers()).map(Number);
    assert.deepEqual(
      sorted,
      sorted.toSorted((a, b) => b - a),
    );
    assert.equal(await box.getByRole("columnheader", { name: "Examples" }).getAttribute("aria-sort"), "descending");
    await box.getByRole("link", { name: "7" }).click();
    await lists(
      page,
      expected(world, (row) => row.label === 7),
    );
  },

  async overview_groups({ page, world }) {
    await open(page, world);
    await page.getByLabel("Group by column").selectOption("scanner");
    const box = page.getByRole("region", { name: "Table of groups by scanner" });
    await box.getByRole("row", { name: /^new 133/ }).waitFor();
    await box.getByRole("row", { name: /^old 67/ }).waitFor();
    await box.getByRole("link", { name: "old" }).click();
    await lists(
      page,
      expected(world, (row) => row.scanner === "old"),
    );
  },

  async theme_switched({ page, world }) {
    await page.emulateMedia({ colorScheme: "light" });
    await open(page, world);
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await background();
    await page.getByRole("button", { name: "Switch between light and dark" }).click();
    const dark = await until(background, (found) => found !== light, "the background should change, and is");
    await page.reload();
    await page.getByRole("heading", { level: 1 }).waitFor();
    assert.equal(await background(), dark);
    await page.getByRole("button", { name: "Switch between light and dark" }).click();
    await reads(background, light, "the background");
    await page.evaluate(() => localStorage.clear());
    await page.reload();
  },
};
