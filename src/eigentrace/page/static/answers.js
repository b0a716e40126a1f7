// Proponents and opponents of an example, side by side, with scores and bars.

import { labelsOf } from "./cards.js";
import { described, showContent } from "./content.js";
import { describedDecision } from "./decide.js";
import { h } from "./dom.js";
import { count, number } from "./numbers.js";

const HOW = {
  exact: "Exact scores.",
  "stored tail": "Scores from stored features, tail included.",
  "kept directions only": "Scores from stored features of the kept directions only, without the tail.",
};
const UNIT = {
  nats: "In nats: the predicted increase of this example's loss if the training example is removed.",
  cosine: "Between −1 and 1: they measure similarity, not strength.",
};

function howOf({ how, shortlist }) {
  if (how !== "rescored") return HOW[how] ?? how;
  return `Exact scores of ${count(shortlist)} candidates; an example that is not a candidate may score higher.`;
}

/** Both sides of an explanation; `exactly`, if given, requests exact scores. */
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
        ? h("button", { type: "button", onclick: exactly, title: "Uses the model; slower" }, "Compute exact scores")
        : null,
    ),
    h(
      "div",
      { class: "sides" },
      side(
        "proponents",
        "Proponents",
        "removing one would raise this example's loss",
        found.proponents,
        most,
        found.unit,
      ),
      side(
        "opponents",
        "Opponents",
        "removing one would lower this example's loss",
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
