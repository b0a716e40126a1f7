// Decisions to keep, drop or relabel examples; each is saved at once and can be undone.

import { h, icon } from "./dom.js";
import { count, plural } from "./numbers.js";
import { source } from "./source.js";
import { address, hasLabels, labelName, labels, state } from "./state.js";

const WORDS = { drop: "Drop", keep: "Keep", relabel: "Relabel" };
const KEYS = { drop: "d", keep: "u", relabel: "r" };

/** Show a message for a few seconds, and announce it to screen readers. */
function notify(text, isError = false) {
  const toast = h("p", { class: isError ? "toast error" : "toast" }, text);
  const place = document.getElementById("status");
  place.replaceChildren(toast);
  clearTimeout(place.timer);
  place.timer = setTimeout(() => toast.remove(), isError ? 8000 : 3500);
}

let pending = Promise.resolve();

/** Send decisions to the server in order, each after the previous one is on disk. */
function inOrder(act) {
  pending = pending.then(act).catch((error) => notify(error.message, true));
  return pending;
}

/** Decide on rows, or on all rows that a rule selects, and dispatch a "decided" event. */
export function decide(asked) {
  return inOrder(async () => {
    const { changed, counts } = await source.decide(asked);
    settle(counts);
    const outcome = {
      drop: "marked to drop",
      keep: "marked to keep",
      relabel: `marked to relabel as ${labelName(asked.new_label)}`,
      clear: "decision cleared",
    }[asked.decision];
    notify(
      asked.rows?.length === 1 ? `Row ${asked.rows[0]}: ${outcome}.` : `${plural(changed, "example")}: ${outcome}.`,
    );
    mark(asked);
    document.dispatchEvent(new CustomEvent("decided", { detail: asked }));
  });
}

/** Undo the last decision. */
export function undo() {
  return inOrder(async () => {
    const { changed, counts } = await source.undo();
    settle(counts);
    notify(changed ? `Undone: last decision on ${plural(changed, "example")}.` : "There is nothing to undo.");
    document.dispatchEvent(new CustomEvent("decided", { detail: {} }));
  });
}

/** Decide on one row; repeating drop or keep clears the decision. */
export async function decideOn(row, decision) {
  if (decision === "relabel" && !hasLabels()) return;
  if (row.decision === decision && decision !== "relabel") return decide({ rows: [row.row], decision: "clear" });
  if (decision !== "relabel") return decide({ rows: [row.row], decision });
  const label = await chooseLabel(row);
  if (label !== null) await decide({ rows: [row.row], decision, new_label: label });
}

/** The decision on a row as text. */
export function describedDecision(row) {
  if (!row.decision) return "";
  return row.decision === "relabel"
    ? `to relabel as ${labelName(row.new_label ?? row.prediction)}`
    : `to ${row.decision}`;
}

/** Buttons for the decisions on a row; that of the current decision is pressed. */
export function decisionButtons(row, tabindex = 0, isLarge = false) {
  const choices = Object.keys(WORDS).filter((word) => word !== "relabel" || hasLabels());
  const buttons = choices.map((word) =>
    h(
      "button",
      {
        type: "button",
        tabindex,
        class: `decision ${word}`,
        "data-word": word,
        "aria-pressed": String(row.decision === word),
        "aria-label": isLarge ? null : `${WORDS[word]} row ${row.row}`,
        title: `${WORDS[word]} (${KEYS[word]})`,
        onclick: (event) => {
          event.preventDefault();
          decideOn(row, word);
        },
      },
      icon(word),
      isLarge && h("span", {}, WORDS[word]),
      isLarge && h("kbd", {}, KEYS[word]),
    ),
  );
  return h(
    "div",
    {
      class: `decisions ${isLarge ? "large" : ""}`,
      role: "group",
      "aria-label": `Decide on row ${row.row}`,
      "data-decides": row.row,
    },
    buttons,
  );
}

function mark({ rows, decision, new_label: label }) {
  for (const row of rows ?? []) {
    for (const group of document.querySelectorAll(`[data-decides="${row}"]`)) {
      for (const button of group.children)
        button.setAttribute("aria-pressed", String(button.dataset.word === decision));
    }
    for (const card of document.querySelectorAll(`[data-row="${row}"]`)) {
      card.dataset.decision = decision === "clear" ? "" : decision;
      if (label !== undefined) card.dataset.newLabel = label ?? "";
    }
  }
}

function settle(counts) {
  state.overview.decisions = counts;
  drawBar();
}

/** Draw the bar at the bottom: counts of decisions, undo and export. */
export function drawBar() {
  const bar = document.getElementById("bar");
  const counts = state.overview.decisions;
  const chosen = Object.keys(WORDS).filter((word) => word !== "relabel" || hasLabels());
  const total = chosen.reduce((sum, word) => sum + (counts[word] ?? 0), 0);
  const isOpen = bar.querySelector("details")?.open ?? false;
  const links = chosen.map((word) =>
    h(
      "a",
      { class: `tally ${word}`, href: address("examples", { decision: word }) },
      icon(word),
      h("b", {}, count(counts[word] ?? 0)),
      h("span", {}, ` to ${word}`),
    ),
  );
  const saves = source
    .exports()
    .map(({ name, href, act }) =>
      href
        ? h("a", { class: "menu-item", href, download: "" }, name)
        : h("button", { type: "button", class: "menu-item", onclick: act }, name),
    );
  const note = source.isLive ? "Saved in the run." : "Not saved: export before you close the page.";
  bar.replaceChildren(
    h("div", { class: "tallies" }, links),
    h("p", { class: "bar-note" }, total ? note : "No decisions yet."),
    h(
      "button",
      { type: "button", class: "quiet", onclick: undo, title: "Undo (z)" },
      icon("undo"),
      h("span", {}, "Undo"),
    ),
    h(
      "details",
      { class: "menu", open: isOpen },
      h("summary", { class: "button" }, icon("save"), h("span", {}, "Export")),
      h("div", { class: "menu-list" }, saves),
    ),
  );
}

/** Submit the selected class on Enter; browsers would open the list instead. */
function submitOnEnter(event) {
  if (event.key !== "Enter") return;
  event.preventDefault();
  event.target.form.requestSubmit(event.target.form.querySelector(".primary"));
}

/** Let the user choose the new class of a row; null if the dialog is cancelled. */
function chooseLabel(row) {
  return new Promise((resolve) => {
    const suggested = row.new_label ?? (row.prediction !== row.label ? row.prediction : null) ?? row.label;
    const choice = h(
      "select",
      { name: "label", autofocus: true, onkeydown: submitOnEnter },
      labels().map(([label, name]) =>
        h(
          "option",
          { value: label, selected: label === suggested },
          name === String(label) ? name : `${label} · ${name}`,
        ),
      ),
    );
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, `Relabel row ${row.row}`),
      h(
        "p",
        { class: "soft" },
        `Current label: ${labelName(row.label)}${row.prediction === null ? "" : `; prediction: ${labelName(row.prediction)}`}.`,
      ),
      h("label", { class: "field" }, h("span", { class: "field-name" }, "New label"), choice),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: () => dialog.close("") }, "Cancel"),
        h("button", { class: "primary", value: "yes" }, "Relabel"),
      ),
    );
    const dialog = h("dialog", { class: "dialog", "aria-label": `Relabel row ${row.row}` }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? Number(choice.value) : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
