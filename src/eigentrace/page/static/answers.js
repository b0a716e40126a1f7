// Who is responsible: proponents and opponents side by side, each with its score and a bar.

import { labelsOf } from "./cards.js";
import { described, showContent } from "./content.js";
import { describedDecision } from "./decide.js";
import { h } from "./dom.js";
import { count, number } from "./numbers.js";

const HOW = {
  exact: "Exact scores.",
  "stored tail": "By stored features, which stand for the tail of the curvature as well.",
  "kept directions only": "By the kept directions only: the tail of the curvature is left out.",
};
const UNIT = {
  nats: "Scores in nats: by how much the loss here would rise without that example.",
  cosine: "Scores between −1 and 1: how alike the examples are, not how strong.",
};

function howOf({ how, shortlist }) {
  if (how !== "rescored") return HOW[how] ?? how;
  return `Exact scores of a shortlist of ${count(shortlist)}: an example that is not on it could be stronger.`;
}

/** Both sides of an answer; `exactly`, if given, asks again for exact scores. */
export function answers(found, exactly) {
  const sizes = [...found.proponents, ...found.opponents].map((one) => Math.abs(one.score));
  const most = Math.max(1e-300, ...sizes);
  return h(
    "div",
    { class: "answers" },
    h(
      "div",
      { class: "how-line" },
      h("p", { class: "soft how" }, [howOf(found), UNIT[found.unit]].filter(Boolean).join(" ")),
      exactly && !["exact", "rescored"].includes(found.how)
        ? h("button", { type: "button", onclick: exactly, title: "Asks the model; takes a while" }, "Score exactly")
        : null,
    ),
    h(
      "div",
      { class: "sides" },
      side(
        "proponents",
        "Proponents",
        "speak for it: without them its loss would rise",
        found.proponents,
        most,
        found.unit,
      ),
      side(
        "opponents",
        "Opponents",
        "speak against it: without them its loss would fall",
        found.opponents,
        most,
        found.unit,
      ),
    ),
  );
}

function side(kind, name, meaning, rows, most, unit) {
  const id = `${kind}-title`;
  const list = rows.length
    ? h(
        "ol",
        { class: "answer-list" },
        rows.map((row) => answer(row, most, unit, kind)),
      )
    : h("p", { class: "soft" }, "None.");
  return h(
    "section",
    { class: `side ${kind}`, "aria-labelledby": id },
    h("h2", { id }, name),
    h("p", { class: "soft" }, meaning),
    list,
  );
}

function answer(row, most, unit, kind) {
  const width = `${Math.max(1, (100 * Math.abs(row.score)) / most)}%`;
  const said = `${kind === "proponents" ? "Proponent" : "Opponent"}: ${described(row)}`;
  return h(
    "li",
    { class: "answer", "data-row": row.row, "data-decision": row.decision },
    h("a", { class: "card-link", href: `#/example/${row.row}`, "aria-label": said }),
    row.content?.kind === "none" ? null : showContent(row),
    h(
      "div",
      { class: "answer-facts" },
      h(
        "div",
        { class: "answer-score" },
        number(row.score, unit ?? ""),
        unit && h("span", { class: "soft" }, ` ${unit}`),
      ),
      h("div", { class: "bar-track" }, h("div", { class: "bar-fill", style: { width } })),
      h(
        "div",
        { class: "answer-names" },
        labelsOf(row),
        h("span", { class: "soft" }, row.id ?? `#${row.row}`),
        row.decision && h("span", { class: `badge ${row.decision}` }, describedDecision(row)),
      ),
    ),
  );
}
