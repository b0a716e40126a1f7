// The view of one example: its content, its numbers, and its proponents and opponents.

import { answers } from "./answers.js";
import { described, showContent } from "./content.js";
import { decisionButtons, describedDecision } from "./decide.js";
import { empty, failure, field, h, icon, latest, loading, select } from "./dom.js";
import { count, meaning, number, percent, short, title } from "./numbers.js";
import { source } from "./source.js";
import { address, hasLabels, labelName, state } from "./state.js";

const NORMALIZE = [
  ["none", "None"],
  ["gradient", "Gradient"],
  ["metric", "Metric"],
];

/** Columns that are listed separately among the facts. */
const SHOWN_APART = ["label", "prediction", "confidence", "self_influence", "loss"];

/** Show the example named in the URL, or a form to choose one. */
export function showExample(main, query, part) {
  if (part === undefined || part === "") return chooser(main);
  return new Example(main, query, Number(part));
}

function chooser(main) {
  const input = h("input", { type: "number", min: 0, max: state.overview.rows - 1, required: true, name: "row" });
  const go = (event) => {
    event.preventDefault();
    location.hash = `#/example/${Number(input.value)}`;
  };
  main.replaceChildren(
    h("h1", { tabindex: "-1" }, "One example"),
    empty(
      "Choose an example",
      "Open one from the list of examples, or enter its row number.",
      h(
        "form",
        { class: "row-form", onsubmit: go },
        field(`Row, 0 to ${count(state.overview.rows - 1)}`, input),
        h("button", { class: "primary" }, "Open"),
      ),
      h("a", { class: "button", href: "#/examples" }, "All examples"),
    ),
  );
  return {};
}

class Example {
  constructor(main, query, number) {
    Object.assign(this, { main, number });
    this.box = h("div", {});
    this.place = h("div", { class: "answers-place" });
    this.stop = new AbortController();
    this.explaining = latest();
    this.reading = latest();
    main.replaceChildren(
      h(
        "div",
        { class: "title-row" },
        h("h1", { tabindex: "-1" }, Number.isInteger(number) ? `Row ${count(number)}` : "One example"),
        this.walk(),
      ),
      this.box,
    );
    this.box.replaceChildren(loading("Loading the example"));
    this.ondecided = (event) => this.decided(event.detail);
    document.addEventListener("decided", this.ondecided);
    this.settings = settingsOf(query);
    this.start();
  }

  /** Links to the list that was last open, and to the previous and next rows in it. */
  walk() {
    const rows = state.list?.rows ?? [];
    const at = rows.indexOf(this.number);
    const step = (offset) => (at >= 0 ? rows[at + offset] : undefined);
    [this.before, this.after] = [step(-1), step(1)];
    const link = (row, name, mark) =>
      row === undefined
        ? null
        : h(
            "a",
            { class: "button quiet", href: `#/example/${row}`, title: name },
            mark === "back" && icon("back"),
            name.split(" (")[0],
            mark === "next" && icon("next"),
          );
    return h(
      "nav",
      { class: "walk", "aria-label": "Examples" },
      h("a", { class: "button quiet", href: state.list?.address ?? "#/examples" }, "All examples"),
      link(this.before, "Previous (k)", "back"),
      link(this.after, "Next (j)", "next"),
    );
  }

  async start() {
    const last = state.overview.rows - 1;
    if (!Number.isInteger(this.number) || this.number < 0 || this.number > last) {
      this.box.replaceChildren(
        empty(
          "There is no such row",
          `Row numbers of this run are 0 to ${count(last)}.`,
          h("a", { class: "button", href: "#/example" }, "Choose another"),
        ),
      );
      return;
    }
    try {
      this.row = await source.example(this.number, this.stop.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.box.replaceChildren(failure(error));
      return;
    }
    this.draw();
    this.explain();
  }

  draw() {
    const { row } = this;
    this.controls = h("div", { class: "controls" });
    this.drawControls();
    this.box.replaceChildren(
      h(
        "div",
        { class: "example-grid" },
        h(
          "section",
          { class: "panel subject", "aria-label": described(row), "data-row": row.row, "data-decision": row.decision },
          showContent(row, "large"),
          decisionButtons(row, 0, true),
          row.decision && h("p", { class: `badge ${row.decision}` }, describedDecision(row)),
          facts(row),
        ),
        h(
          "div",
          { class: "why" },
          h("div", { class: "why-head" }, h("h2", {}, "Explanation"), this.controls),
          this.place,
        ),
      ),
    );
  }

  drawControls() {
    if (!source.isLive) return; // a report contains only scores with the default settings
    const { settings } = this;
    const set = (changes) => {
      const next = { ...settings, ...changes };
      const asked = {
        normalize: next.normalize === "none" ? null : next.normalize,
        same_label: next.same_label === "1" ? "1" : null,
        exclude: next.exclude === "self" ? null : next.exclude,
        k: next.k === "8" ? null : next.k,
      };
      history.replaceState(null, "", address(`example/${this.number}`, asked));
      this.settings = next;
      this.drawControls();
      this.explain();
    };
    const held = this.controls.contains(document.activeElement) ? document.activeElement : null;
    const radios = NORMALIZE.map(([value, name]) =>
      h(
        "label",
        { class: "segment" },
        h("input", {
          type: "radio",
          name: "normalize",
          value,
          checked: settings.normalize === value,
          onchange: () => set({ normalize: value }),
        }),
        h("span", {}, name),
      ),
    );
    this.controls.replaceChildren(
      h("fieldset", { class: "segments" }, h("legend", {}, "Normalise by"), ...radios),
      hasLabels()
        ? h(
            "label",
            { class: "check" },
            h("input", {
              type: "checkbox",
              name: "same_label",
              checked: settings.same_label === "1",
              onchange: (event) => set({ same_label: event.target.checked ? "1" : "0" }),
            }),
            h("span", {}, "Same label only"),
          )
        : "",
      field(
        "Exclude",
        select(
          "exclude",
          [
            ["self", "Itself"],
            ["duplicates", "Duplicates too"],
            ["none", "Nothing"],
          ],
          settings.exclude,
          (exclude) => set({ exclude }),
        ),
      ),
      field(
        "Per side",
        select(
          "k",
          ["4", "8", "16", "32"].map((k) => [k, k]),
          settings.k,
          (k) => set({ k }),
        ),
      ),
    );
    if (held)
      [...this.controls.querySelectorAll(`[name="${held.name}"]`)]
        .find((one) => one.type !== "radio" || one.checked)
        ?.focus();
  }

  async explain(isExact = false) {
    const isLatest = this.explaining();
    if (isExact) this.place.replaceChildren(loading("Computing exact scores"));
    else if (!this.place.childElementCount) this.place.replaceChildren(loading("Computing scores"));
    this.place.setAttribute("aria-busy", "true");
    const exactly = state.overview.live && source.isLive ? () => this.explain(true) : null;
    const asked = { ...this.settings, exact: isExact ? "1" : null };
    try {
      const found = await source.explain(this.number, asked, this.stop.signal);
      if (isLatest()) this.place.replaceChildren(answers(found, exactly));
    } catch (error) {
      if (error.name !== "AbortError" && isLatest()) this.place.replaceChildren(failure(error));
    }
    if (isLatest()) this.place.removeAttribute("aria-busy");
  }

  async decided({ rows }) {
    if (rows && !rows.includes(this.number)) return;
    const isLatest = this.reading();
    const found = await source.example(this.number, this.stop.signal).catch(() => null);
    if (!found || !isLatest()) return;
    const held = this.box.contains(document.activeElement) ? document.activeElement.dataset.word : null;
    this.row = found;
    this.draw();
    if (held) this.box.querySelector(`[data-word="${held}"]`)?.focus();
  }

  current() {
    return this.row ?? null;
  }

  key(event) {
    const to = { j: this.after, ArrowRight: this.after, k: this.before, ArrowLeft: this.before }[event.key];
    if (
      to === undefined ||
      (event.key.startsWith("Arrow") && document.activeElement?.matches("a, button, [tabindex='0']"))
    )
      return false;
    location.hash = `#/example/${to}`;
    return true;
  }

  leave() {
    document.removeEventListener("decided", this.ondecided);
    this.stop.abort();
  }
}

function settingsOf(query) {
  const normalize = query.get("normalize");
  return {
    normalize: NORMALIZE.some(([value]) => value === normalize) ? normalize : "none",
    same_label: query.get("same_label") === "1" ? "1" : "0",
    exclude: query.get("exclude") ?? "self",
    k: query.get("k") ?? "8",
  };
}

/** The labels, scores and columns of a row, as a description list. */
function facts(row) {
  const { unit, num_train: size } = state.overview;
  const nats = unit === "nats" && row.self_influence !== null && size ? row.self_influence / size : null;
  const rank = row.rank ? `${count(row.rank)} of ${count(state.overview.rows)}` : null;
  const all = [
    ["Id", row.id],
    hasLabels() ? ["Given label", labelName(row.label), "label"] : null,
    hasLabels() && row.prediction !== null
      ? [
          "Prediction",
          h(
            "span",
            { class: row.prediction !== row.label ? "differs" : null },
            labelName(row.prediction),
            row.confidence === null ? "" : h("span", { class: "soft" }, ` (${percent(row.confidence)} confidence)`),
          ),
          "prediction",
        ]
      : null,
    [
      "Self-influence",
      h(
        "span",
        {},
        number(row.self_influence),
        nats === null ? "" : h("span", { class: "soft", title: nats }, ` (${short(nats)} nats)`),
      ),
      "self_influence",
    ],
    rank ? ["Rank", h("span", { title: `quantile ${row.quantile}` }, rank)] : null,
    ["Loss", number(row.loss, "nats"), "loss"],
    ...state.overview.columns
      .filter((column) => column.scored && !SHOWN_APART.includes(column.name))
      .map(({ name, kind }) => {
        if (row[name] === null || row[name] === undefined) return null;
        return [title(name), kind === "label" ? labelName(row[name]) : number(row[name]), name];
      }),
    ...Object.entries(row.columns ?? {}).map(([name, value]) => [
      title(name),
      typeof value === "number" ? number(value) : String(value ?? "–"),
    ]),
  ];
  return h(
    "dl",
    { class: "row-facts" },
    all
      .filter((fact) => fact && fact[1] !== null && fact[1] !== undefined)
      .map(([name, value, column]) => h("div", {}, h("dt", { title: column && meaning(column) }, name), h("dd", {}, value))),
  );
}
