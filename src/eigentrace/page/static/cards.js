// An example in a list, as a tile (images) or a line (everything else).

import { describedDecision, decisionButtons } from "./decide.js";
import { h } from "./dom.js";
import { described, showContent } from "./content.js";
import { number, words } from "./numbers.js";
import { hasLabels, labelName, state } from "./state.js";

/** The label, and the prediction if it differs. */
export function labelsOf(row) {
  if (!hasLabels() || row.label === null || row.label === undefined) return null;
  const hasPrediction = row.prediction !== null && row.prediction !== undefined;
  const differs = hasPrediction && row.prediction !== row.label;
  return h(
    "span",
    { class: "labels" },
    h("span", { class: "given", title: "given label" }, labelName(row.label)),
    differs &&
      h(
        "span",
        { class: "predicted", title: "prediction" },
        h("span", { "aria-label": "predicted" }, "→ "),
        labelName(row.prediction),
      ),
  );
}

/** A tile or a line, depending on the kind of the examples. */
export function card(row, kind, column) {
  const link = h("a", { class: "card-link", href: `#/example/${row.row}`, "aria-label": spoken(row) });
  const value = h(
    "span",
    { class: "card-value" },
    h("span", { class: "card-column" }, words(column)),
    number(valueOf(row, column)),
  );
  const name = h("span", { class: "card-row" }, row.id ?? `#${row.row}`);
  const facts = (...parts) => h("div", { class: "card-facts" }, ...parts);
  const parts =
    {
      image: () => [showContent(row), facts(labelsOf(row) ?? name, number(valueOf(row, column)))],
      none: () => [facts(name, labelsOf(row), value), numbersOf(row, column)],
    }[kind] ?? (() => [facts(name, labelsOf(row), value), showContent(row)]);
  return h(
    "li",
    { class: `card ${kind === "image" ? "tile" : "line"} ${kind}`, "data-row": row.row, "data-decision": row.decision },
    link,
    ...parts(),
    decisionButtons(row, -1),
  );
}

/** The other numbers and columns of an example, displayed if its content cannot be. */
function numbersOf(row, column) {
  const own = state.overview.columns
    .filter(({ name, kind, scored }) => scored && kind === "number" && name !== column)
    .map(({ name }) => [name, row[name]]);
  const all = [...own, ...Object.entries(row.columns ?? {})].filter(
    ([, value]) => value !== null && value !== undefined,
  );
  return h(
    "div",
    { class: "content numbers" },
    all.map(([name, value]) =>
      h(
        "span",
        {},
        h("span", { class: "card-column" }, `${words(name)} `),
        typeof value === "number" ? number(value) : String(value),
      ),
    ),
  );
}

function spoken(row) {
  const decided = describedDecision(row);
  return decided ? `${described(row)}, ${decided}` : described(row);
}

/** A row's value of a scored or user column. */
function valueOf(row, column) {
  return column in row ? row[column] : (row.columns?.[column] ?? null);
}
