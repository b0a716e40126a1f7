// The list of examples, with sorting, filters and infinite scrolling.

import { card } from "./cards.js";
import { empty, failure, field, h, icon, later, loading, select } from "./dom.js";
import { count, plural, short, title, words } from "./numbers.js";
import { source } from "./source.js";
import { address, groupWord, hasLabels, labelName, labels, state } from "./state.js";
import { VirtualList } from "./virtual.js";

const DEFAULTS = { sort: "self_influence", order: "desc" };
const SHARES = [
  ["", "All"],
  ["0.99-1", "Highest 1%"],
  ["0.95-1", "Highest 5%"],
  ["0.9-1", "Highest 10%"],
  ["0.75-1", "Highest quarter"],
  ["0.25-0.75", "Middle half"],
  ["0-0.25", "Lowest quarter"],
  ["0-0.05", "Lowest 5%"],
];

/** Show the list for the query of the URL. */
export function showExamples(main, query) {
  return new Examples(main, query);
}

class Examples {
  constructor(main, query) {
    this.main = main;
    this.root = h("ol", { class: "cards", "aria-label": "Examples" });
    this.countLine = h("p", { class: "list-count", role: "status" });
    this.chips = h("div", { class: "chips" });
    this.state = h("div", { class: "list-state" });
    this.searching = later(250, () => {
      this.searched = this.searchBox.value;
      this.change({ search: this.searched });
    });
    this.searched = "";
    this.searchBox = h("input", {
      type: "search",
      name: "search",
      placeholder: this.kind === "image" || this.kind === "none" ? "Id" : "Text or id",
      autocomplete: "off",
      oninput: this.searching,
    });
    this.searchField = field("Search", this.searchBox, "grow");
    this.form = h(
      "form",
      {
        class: "filters",
        role: "search",
        "aria-label": "Sort and filter",
        onsubmit: (event) => event.preventDefault(),
      },
      this.searchField,
    );
    this.filters = h(
      "details",
      { class: "filter-box", open: !matchMedia("(max-width: 640px)").matches },
      h("summary", { class: "button" }, "Sort and filter"),
      this.form,
    );
    this.side = 0;
    this.list = new VirtualList(this.root, {
      layout: (width) => this.layout(width),
      load: (offset, limit, signal) => source.examples({ ...this.asked, offset, limit }, signal),
      draw: (row) => card(row, this.kind, this.asked.sort),
      onfail: (error) => this.fail(error),
    });
    main.replaceChildren(
      h("h1", { tabindex: "-1" }, "Examples"),
      this.filters,
      h("div", { class: "list-head" }, this.countLine, this.chips),
      this.state,
      this.root,
    );
    this.ondecided = (event) => this.decided(event.detail);
    document.addEventListener("decided", this.ondecided);
    this.root.addEventListener("load", (event) => this.measured(event.target), true);
    this.update(query, true);
  }

  get kind() {
    return state.overview.kind;
  }

  /** Apply a changed URL. */
  async update(query, isFirst = false) {
    this.asked = askedBy(query);
    this.fillSearch();
    this.drawForm();
    this.drawChips();
    this.state.replaceChildren(loading("Loading examples"));
    const known = state.list;
    const found = await this.list.reset();
    if (!found) return;
    this.drawCount(found);
    if (isFirst && known?.address === this.address()) {
      scrollTo(0, known.scroll);
      if (known.index) this.list.focusAt(known.index);
    }
  }

  drawCount(found) {
    const isCut = this.list.shown < found.total;
    this.countLine.replaceChildren(
      h("b", {}, count(found.total)),
      ` of ${plural(state.overview.rows, "example")}`,
      source.isLive ? "" : ` (${count(source.rows.length)} are in this report)`,
      isCut ? `; the first ${count(this.list.shown)} are listed` : "",
    );
    this.state.replaceChildren(
      ...(found.total
        ? []
        : [
            empty(
              "No matches",
              "No example matches these filters.",
              h("a", { class: "button", href: "#/examples" }, "Clear the filters"),
            ),
          ]),
    );
  }

  fail(error) {
    this.countLine.textContent = "";
    this.state.replaceChildren(failure(error, () => this.update(addressed())));
  }

  address() {
    return address("examples", this.asked);
  }

  /** Change the query in the URL, which may already be newer than the list on screen. */
  change(changes) {
    const asked = { ...askedBy(addressed()), ...changes };
    for (const [name, value] of Object.entries(DEFAULTS)) if (asked[name] === value) delete asked[name];
    location.hash = address("examples", asked);
  }

  layout(width) {
    if (this.kind === "image") {
      const side = this.side > 48 ? 168 : 116;
      const columns = Math.max(2, Math.floor((width + 12) / (side + 20 + 12)));
      return { columns, gap: 12, height: this.side > 48 ? 260 : 196 };
    }
    const isNarrow = width < 640;
    if (this.kind === "none") return { columns: 1, gap: 8, height: isNarrow ? 124 : 62 };
    return {
      columns: 1,
      gap: 10,
      height: isNarrow ? (this.kind === "pair" ? 232 : 188) : this.kind === "pair" ? 118 : 100,
    };
  }

  /** Choose the size of tiles by the size of the first image. */
  measured(picture) {
    const side = Math.max(picture.naturalWidth ?? 0, picture.naturalHeight ?? 0);
    if (!side || this.side) return;
    this.side = side;
    this.root.classList.toggle("photos", side > 48);
    this.list.arrange();
  }

  /** Copy the search of the URL to the box, unless it came from there: the user may have typed more since. */
  fillSearch() {
    const { search = "" } = this.asked;
    if (search === this.searched) return;
    this.searching.cancel();
    this.searchBox.value = this.searched = search;
  }

  /** Draw all controls except the search box, which stays in the document so that no input is lost. */
  drawForm() {
    const holder =
      document.activeElement?.name && this.form.contains(document.activeElement) ? document.activeElement.name : null;
    const { asked } = this;
    const run = state.overview;
    const set = (name) => (value) => this.change({ [name]: value });
    const numbers = run.columns
      .filter((column) => column.kind === "number")
      .map((column) => [column.name, title(column.name)])
      .concat([["row", "Row"]]);
    const order = h(
      "button",
      {
        type: "button",
        name: "order",
        class: "icon-button order",
        "aria-label":
          asked.order === "asc" ? "Lowest first: switch to highest first" : "Highest first: switch to lowest first",
        title: asked.order === "asc" ? "Lowest first" : "Highest first",
        onclick: () => this.change({ order: asked.order === "asc" ? "desc" : "asc" }),
      },
      icon(asked.order === "asc" ? "up" : "down"),
    );
    const parts = [
      h(
        "div",
        { class: "field-with" },
        field(
          "Sort by",
          select("sort", numbers, asked.sort, (value) => this.change({ sort: value, above: null, below: null })),
        ),
        order,
      ),
    ];
    if (hasLabels()) {
      parts.push(field("Class", select("label", [["", "All"], ...labels()], asked.label, set("label"))));
      parts.push(
        field("Prediction", select("prediction", [["", "All"], ...labels()], asked.prediction, set("prediction"))),
      );
    }
    const range = asked.low || asked.high ? `${asked.low ?? 0}-${asked.high ?? 1}` : "";
    const shares = SHARES.some(([value]) => value === range) ? SHARES : [...SHARES, [range, range]];
    parts.push(
      field(
        "Quantile",
        select("share", shares, range, (value) => {
          const [low, high] = value ? value.split("-") : [null, null];
          this.change({ low, high });
        }),
      ),
    );
    const groups = run.columns.filter((column) => run.group_columns.includes(column.name) && column.values);
    if (groups.length)
      parts.push(
        field(
          "Group",
          select(
            "group",
            [
              ["", "All"],
              ...groups.flatMap((column) =>
                column.values.map((value) => [
                  `${column.name}:${groupWord(value)}`,
                  `${column.name}: ${value ?? "none"}`,
                ]),
              ),
            ],
            asked.group,
            set("group"),
          ),
        ),
      );
    parts.push(
      field(
        "Decision",
        select(
          "decision",
          [
            ["", "All"],
            ["none", "Undecided"],
            ["drop", "Drop"],
            ["keep", "Keep"],
            ...(hasLabels() ? [["relabel", "Relabel"]] : []),
          ],
          asked.decision,
          set("decision"),
        ),
      ),
    );
    const differs = h(
      "label",
      { class: "check" },
      h("input", {
        type: "checkbox",
        name: "disagree",
        checked: asked.disagree === "1",
        onchange: (event) => this.change({ disagree: event.target.checked ? "1" : null }),
      }),
      h("span", {}, "Prediction differs"),
    );
    for (const old of [...this.form.children]) if (old !== this.searchField) old.remove();
    this.searchField.before(...parts);
    if (hasLabels()) this.searchField.after(differs);
    if (holder) this.form.querySelector(`[name="${holder}"]`)?.focus();
  }

  drawChips() {
    const { asked } = this;
    const chips = [];
    const chip = (text, changes) =>
      chips.push(
        h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-label": `Remove filter: ${text}`,
            onclick: () => this.change(changes),
          },
          text,
          icon("drop"),
        ),
      );
    if (asked.above) chip(`${words(asked.sort)} above ${short(Number(asked.above))}`, { above: null });
    if (asked.below) chip(`${words(asked.sort)} below ${short(Number(asked.below))}`, { below: null });
    for (const range of asked.within ?? [])
      chip(rangeWords(range), { within: asked.within.filter((one) => one !== range) });
    if (asked.label) chip(`class ${labelName(Number(asked.label))}`, { label: null });
    if (asked.group) chip(asked.group.replace(":", ": "), { group: null });
    if (asked.decision) chip(`decision: ${asked.decision}`, { decision: null });
    this.chips.replaceChildren(...chips);
  }

  decided({ rows, decision, new_label: label }) {
    if (!rows || this.asked.decision) {
      this.list.refresh().then((found) => found && this.drawCount(found));
      return;
    }
    for (const number of rows) {
      for (const page of this.list.pages.values()) {
        const row = page.rows?.find((one) => one.row === number);
        if (row) Object.assign(row, { decision: decision === "clear" ? null : decision, new_label: label ?? null });
      }
    }
  }

  /** The row that keyboard shortcuts apply to. */
  current() {
    const item = document.activeElement?.closest?.("li.card");
    return item && this.root.contains(item) ? this.list.at(Number(item.dataset.index)) : null;
  }

  key(event) {
    const across = this.list.columns ?? 1;
    const isInside = Boolean(this.current());
    const steps = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across };
    if (!(event.key in steps)) return false;
    if (event.key.startsWith("Arrow") && !isInside) return false;
    this.list.focusAt(isInside ? this.list.focused + steps[event.key] : this.list.focused);
    return true;
  }

  search() {
    this.filters.open = true;
    this.searchBox.focus();
  }

  leave() {
    const rows = [...this.list.pages.entries()]
      .sort(([a], [b]) => a - b)
      .flatMap(([, page]) => page.rows ?? [])
      .map((row) => row.row);
    state.list = { address: this.address(), scroll: scrollY, index: this.list.focused, rows };
    document.removeEventListener("decided", this.ondecided);
    this.searching.cancel();
    this.list.close();
  }
}

/** The query of the current URL. */
function addressed() {
  return new URLSearchParams(location.hash.replace(/^[^?]*\??/, ""));
}

/** The sort order and filters of a query. */
function askedBy(query) {
  const given = [...query.keys()].map((name) => [name, name === "within" ? query.getAll(name) : query.get(name)]);
  return { ...DEFAULTS, ...Object.fromEntries(given) };
}

function rangeWords(range) {
  const [, column, low, high] = range.match(/^(.*):([^:]*):([^:]*)$/) ?? [null, range, "-inf", "inf"];
  const parts = [
    low === "-inf" ? "" : `from ${short(Number(low))}`,
    high === "inf" ? "" : `to ${short(Number(high))}`,
  ].filter(Boolean);
  return `${words(column)} ${parts.join(" ") || "any"}`;
}
