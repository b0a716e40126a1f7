// Decisions, which survive reloads and a killed server, and explanations of new images.

import assert from "node:assert/strict";
import {
  answered,
  decided,
  exactly,
  expected,
  field,
  lists,
  open,
  press,
  save,
  Server,
  slider,
  tallies,
  thresholdOf,
  until,
} from "./driving.mjs";

export const deciding = {
  async decide_by_keys({ page, world }) {
    await open(page, world, "examples");
    const [first, second] = expected(world);
    await lists(page, expected(world));
    await decided(page, { drop: 0, keep: 0, relabel: 0 });
    const pressed = (row) =>
      page
        .getByRole("group", { name: `Decide on row ${row}` })
        .getByRole("button", { pressed: true })
        .allInnerTexts();
    const isPressed = (word, row) =>
      page.getByRole("button", { name: `${word} row ${row}`, exact: true, pressed: true }).waitFor();
    await page.keyboard.press("j");
    await press(page, "d", `Row ${first}: marked to drop.`);
    await decided(page, { drop: 1, keep: 0, relabel: 0 });
    await isPressed("Drop", first);
    await press(page, "u", `Row ${first}: marked to keep.`);
    await decided(page, { drop: 0, keep: 1, relabel: 0 });
    await isPressed("Keep", first);
    await page.keyboard.press("r");
    const dialog = page.getByRole("dialog", { name: `Relabel row ${first}` });
    await dialog.getByLabel("New label").selectOption("4");
    await press(page, "Enter", `Row ${first}: marked to relabel as 4.`); // the focus is still in the list
    await press(page, "z", "Undone: last decision on 1 example.");
    await isPressed("Keep", first);
    await page.keyboard.press("r");
    await dialog.getByLabel("New label").selectOption("4");
    await dialog.getByRole("button", { name: "Relabel" }).click();
    await decided(page, { drop: 0, keep: 0, relabel: 1 });
    await isPressed("Relabel", first);
    await press(page, "x", `Row ${first}: decision cleared.`);
    await decided(page, { drop: 0, keep: 0, relabel: 0 });
    assert.deepEqual(await pressed(first), []);
    await press(page, "z", "Undone: last decision on 1 example.");
    await decided(page, { drop: 0, keep: 0, relabel: 1 });
    await isPressed("Relabel", first);
    await page.keyboard.press("j");
    await press(page, "d", `Row ${second}: marked to drop.`);
    await decided(page, { drop: 1, keep: 0, relabel: 1 });
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: `Row ${second}` }).waitFor();
    await page.getByRole("button", { name: /^Drop/, pressed: true }).waitFor();
    await press(page, "u", `Row ${second}: marked to keep.`);
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    world.acts = { [first]: "relabel", [second]: "keep" };
  },

  async decide_by_buttons({ page, world }) {
    await open(page, world, "examples");
    const order = expected(world);
    await lists(page, order);
    await page.getByRole("button", { name: `Drop row ${order[2]}`, exact: true }).click();
    await decided(page, { drop: 1, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: `Drop row ${order[2]}`, exact: true }).click();
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: `Relabel row ${order[2]}`, exact: true }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
  },

  async decide_above_the_threshold({ page, world }) {
    await open(page, world);
    await page.reload();
    await exactly(page);
    await slider(page).focus();
    for (let time = 0; time < 3; time += 1) await page.keyboard.press("ArrowLeft");
    const threshold = await thresholdOf(page);
    const wanted = expected(world, (row) => row.self_influence > threshold);
    await until(
      () => exactly(page),
      (found) => found === wanted.length,
      `${wanted.length} examples are above, the page shows`,
    );
    await page.getByRole("button", { name: "Drop all" }).click();
    await decided(page, { drop: wanted.length, keep: 0, relabel: 0 });
    await page.keyboard.press("z");
    await decided(page, { drop: 0, keep: 1, relabel: 1 });
    await page.getByRole("button", { name: "Drop all" }).click();
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
    await page
      .getByRole("contentinfo")
      .getByRole("link", { name: /to drop/ })
      .click();
    await lists(
      page,
      expected(world, (row) => world.acts[row.row] === "drop"),
    );
    await field(page, "Decision").selectOption({ label: "Relabel" });
    await lists(
      page,
      expected(world, (row) => world.acts[row.row] === "relabel"),
    );
    await field(page, "Decision").selectOption({ label: "Undecided" });
    await lists(
      page,
      expected(world, (row) => !world.acts[row.row]),
    );
  },

  async decide_and_export({ page, world }) {
    await open(page, world);
    const saved = [await save(page, world, "CSV"), await save(page, world, "Parquet")];
    world.kept.exported = { saved, acts: world.acts };
  },

  async decide_and_kill_the_server({ page, world }) {
    await open(page, world);
    const before = await tallies(page);
    // Requests in flight when the server is killed fail in many ways: refused, reset, empty, or broken off.
    world.awaited = ["net::ERR_", "status of 403"];
    await world.server.kill();
    await open(page, world, "example/3");
    await page
      .getByText("The server does not respond. Check that eigentrace serve is still running.")
      .first()
      .waitFor();
    await Server.withModel(world);
    await page.keyboard.press("z");
    await page.getByText(/Reload the page: the server has restarted/).waitFor();
    await page.reload();
    await decided(page, before);
    await page.getByRole("group", { name: "Decide on row 3", exact: true }).waitFor();
    await press(page, "d", "Row 3: marked to drop.");
    await decided(page, { drop: before.drop + 1 });
    await press(page, "z", "Undone");
    await decided(page, before);
  },

  async explain_a_new_image({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    const { file, label, answer, prediction } = world.asked;
    await page.getByRole("button", { name: "Explain" }).click();
    await page.getByText("Choose an image first.").waitFor();
    await page.getByLabel(/Drop an image here/).setInputFiles(file);
    await page.getByRole("combobox", { name: "Label", exact: true }).selectOption(String(label));
    await page.getByRole("button", { name: "Explain" }).click();
    await answered(page, answer);
    assert.match(
      await page.getByText(/^The model predicts/).innerText(),
      new RegExp(`^The model predicts ${prediction} `),
    );
    await page
      .getByRole("link", { name: /^Proponent: row/ })
      .first()
      .click();
    await page.getByRole("heading", { level: 1, name: `Row ${answer.proponents[0][0]}` }).waitFor();
  },

  async explain_a_file_that_is_not_an_image({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    const input = page.locator("input[type=file]");
    await input.setInputFiles({ name: "words.txt", mimeType: "text/plain", buffer: Buffer.from("words") });
    await page.getByText("words.txt is not a PNG, JPEG or WebP image: choose one.").first().waitFor();
    const large = Buffer.alloc(4 * 2 ** 20 + 1);
    await input.setInputFiles({ name: "large.png", mimeType: "image/png", buffer: large });
    await page.getByText("The image is larger than 4 MiB: choose a smaller one.").first().waitFor();
  },

  async explain_a_broken_image({ page, world }) {
    await Server.withModel(world, page);
    world.awaited = ["status of 400"];
    await open(page, world, "ask");
    await page
      .locator("input[type=file]")
      .setInputFiles({ name: "a.png", mimeType: "image/png", buffer: Buffer.from("no") });
    await page.getByRole("button", { name: "Explain" }).click();
    await page.getByText(/^The image cannot be read as PNG/).waitFor();
  },
};
