// Entry point: routing by URL hash, keyboard shortcuts, light and dark theme.

import { showAsk } from "./ask.js";
import { decide, decideOn, drawBar, undo } from "./decide.js";
import { failure, h, loading } from "./dom.js";
import { showExample } from "./example.js";
import { showExamples } from "./examples.js";
import { showOverview } from "./overview.js";
import { source } from "./source.js";
import { state } from "./state.js";

const VIEWS = { overview: showOverview, examples: showExamples, example: showExample, ask: showAsk };
const NAMES = { overview: "Overview", examples: "Examples", example: "One example", ask: "New example" };
const KEYS = [
  ["j  k  or arrows", "next, previous"],
  ["Enter", "open the example"],
  ["d", "drop"],
  ["u", "keep"],
  ["r", "relabel"],
  ["x", "clear the decision"],
  ["z", "undo"],
  ["/", "search"],
  ["1 – 4", "switch between the four views"],
  ["?", "show this help"],
];
const main = document.getElementById("main");
let view = { name: null };

function parsed() {
  const [, path = "", query = ""] = /^#\/?([^?]*)\??(.*)$/.exec(location.hash) ?? [];
  const [name, part] = path.split("/");
  return { name: name in VIEWS ? name : "overview", part, query: new URLSearchParams(query) };
}

function route() {
  if (location.hash === "#main") return;
  const { name, part, query } = parsed();
  if (view.name === name && view.shown?.update) {
    view.shown.update(query);
    return;
  }
  view.shown?.leave?.();
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name === "example" && part ? `Row ${part}` : NAMES[name]} · ${state.overview.run} · eigentrace`;
  const isFirst = view.name === null;
  scrollTo(0, 0);
  view = { name, shown: VIEWS[name](main, query, part) };
  if (!isFirst && !main.contains(document.activeElement)) main.querySelector("h1")?.focus({ preventScroll: true });
}

function help() {
  const rows = KEYS.map(([keys, words]) =>
    h(
      "div",
      {},
      h(
        "dt",
        {},
        keys.split("  ").map((key) => h("kbd", {}, key)),
      ),
      h("dd", {}, words),
    ),
  );
  const dialog = h(
    "dialog",
    { class: "dialog", "aria-labelledby": "help-title" },
    h("h2", { id: "help-title" }, "Keyboard shortcuts"),
    h("dl", { class: "keys" }, rows),
    h("form", { method: "dialog", class: "actions" }, h("button", { class: "primary" }, "Close")),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Focus the search box synchronously, so that keys pressed right after "/" go there and do not act as shortcuts. */
function search() {
  if (!state.overview) return;
  if (view.name !== "examples") {
    history.pushState(null, "", "#/examples");
    route();
  }
  view.shown.search();
}

function act(key) {
  const row = view.shown?.current?.();
  const decision = { d: "drop", u: "keep", r: "relabel" }[key];
  if (!row) return false;
  if (key === "x") decide({ rows: [row.row], decision: "clear" });
  else if (decision) decideOn(row, decision);
  else return false;
  return true;
}

function onkey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input:not([type=checkbox]):not([type=radio]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const plain = {
    "?": help,
    "/": search,
    z: undo,
    1: () => {
      location.hash = "#/overview";
    },
    2: () => {
      location.hash = "#/examples";
    },
    3: () => {
      location.hash = "#/example";
    },
    4: () => {
      location.hash = "#/ask";
    },
  }[event.key];
  if (plain) plain();
  else if (!act(event.key) && !view.shown?.key?.(event)) return;
  event.preventDefault();
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
  try {
    localStorage.setItem("eigentrace-theme", isDark ? "light" : "dark");
  } catch {
    /* Storage may be unavailable for file: URLs. */
  }
}

function remembered() {
  try {
    return localStorage.getItem("eigentrace-theme");
  } catch {
    return null;
  }
}

async function start() {
  main.replaceChildren(loading("Opening the run"));
  try {
    state.overview = await source.overview();
  } catch (error) {
    main.replaceChildren(failure(error, start));
    return;
  }
  document.getElementById("run-name").textContent = state.overview.run;
  drawBar();
  route();
}

history.scrollRestoration = "manual";
setTheme(remembered());
addEventListener("hashchange", () => {
  if (state.overview) route();
});
addEventListener("keydown", onkey);
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", help);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});
start();
