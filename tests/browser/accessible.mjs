// Accessibility of every view, in both widths and both themes.

import { accessible, cards, open, Server, SOME } from "./driving.mjs";

export const accessibility = {
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

  async accessible_new_example({ page, world }) {
    await Server.withModel(world, page);
    await open(page, world, "ask");
    await accessible(page, () => page.getByRole("button", { name: "Explain" }).waitFor());
  },

  async accessible_dialogs({ page, world }) {
    await open(page, world, `example/${world.explained.row}`);
    await page.getByRole("button", { name: "Keyboard shortcuts" }).click();
    await accessible(page, () => page.getByRole("dialog", { name: "Keyboard shortcuts" }).waitFor(), SOME);
    await page.keyboard.press("Escape");
    await page.getByRole("button", { name: /^Relabel/ }).click();
    await accessible(page, () => page.getByRole("dialog", { name: /^Relabel row/ }).waitFor(), SOME);
  },
};
