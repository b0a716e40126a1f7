// A histogram with a threshold, moved by pointer or keys, and actions on the examples above it.

import { drawn, histogram } from "./charts.js";
import { decide } from "./decide.js";
import { h, later, latest } from "./dom.js";
import { count, percent, short, title, words } from "./numbers.js";
import { source } from "./source.js";
import { address, state } from "./state.js";

/** Create the chart and its controls. Returns {element, stop}. */
function threshold(held) {
  const place = h("div", { class: "chart threshold-chart" });
  const message = h("p", { class: "threshold-words", "aria-live": "polite" });
  const grip = h(
    "div",
    {
      class: "grip",
      role: "slider",
      tabindex: "0",
      "aria-orientation": "horizontal",
      "aria-label": `Threshold on ${words(held.column)}`,
    },
    h("span", { class: "grip-value", "aria-hidden": "true" }),
  );
  const show = h("a", { class: "button" }, "Show examples");
  const drop = h(
    "button",
    {
      type: "button",
      class: "warn",
      onclick: () => decide({ rule: { by: held.column, above: value }, decision: "drop" }),
    },
    "Drop all",
  );
  const total = held.counts.reduce((sum, number) => sum + number, 0);
  let value = state.thresholds[held.column] ?? startingPoint(held, total);
  let chart = null;

  const exactly = later(200, async (asked) => {
    const found = await source.examples({ sort: held.column, above: asked, limit: 1 }).catch(() => null);
    if (found && asked === value)
      showCount(source.isLive ? found.total : estimate(held, value), source.isLive, found.total);
  });
  const showCount = (above, isExact, held = null) => {
    message.replaceChildren(
      h("b", {}, `${isExact ? "" : "about "}${count(above)}`),
      ` of ${count(total)} examples (${percent(above / Math.max(1, total))}) are above `,
      h("b", { title: value }, short(value)),
      source.isLive || held === null ? "." : `; ${count(held)} of them are in this report.`,
    );
    grip.setAttribute("aria-valuetext", `${short(value)}, ${count(above)} examples above`);
    drop.disabled = isExact && above === 0;
  };
  const move = (x) => {
    value = Number(chart.value(x).toPrecision(6));
    settle();
  };
  const settle = () => {
    const x = chart.at(value);
    chart.cut(x);
    grip.style.left = `${x}px`;
    grip.classList.toggle("flip", x > (chart.left + chart.right) / 2);
    grip.firstChild.textContent = short(value);
    grip.setAttribute("aria-valuenow", String(Math.round((100 * (x - chart.left)) / (chart.right - chart.left))));
    state.thresholds[held.column] = value;
    show.href = address("examples", { sort: held.column, above: value });
    showCount(estimate(held, value), false);
    exactly(value);
  };
  // aria-valuenow is the position on the axis in percent: the value itself may need an exponent, which ARIA lacks.
  grip.setAttribute("aria-valuemin", "0");
  grip.setAttribute("aria-valuemax", "100");
  listen(grip, place, () => chart, move);
  const stop = drawn(place, (width) => {
    chart = histogram(held, words(held.column), width);
    settle();
    return [chart.picture, grip];
  });
  const actions = h("div", { class: "actions" }, show, drop);
  return { element: h("div", {}, place, h("div", { class: "threshold-row" }, message, actions)), stop };
}

function listen(grip, place, chart, move) {
  const xOf = (event) => event.clientX - place.getBoundingClientRect().left;
  place.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart()) return;
    event.preventDefault();
    grip.focus({ preventScroll: true });
    place.setPointerCapture(event.pointerId);
    move(xOf(event));
  });
  place.addEventListener("pointermove", (event) => {
    if (place.hasPointerCapture(event.pointerId)) move(xOf(event));
  });
  grip.addEventListener("keydown", (event) => {
    const { left, right } = chart();
    const span = right - left;
    const steps = {
      ArrowLeft: -0.01,
      ArrowDown: -0.01,
      ArrowRight: 0.01,
      ArrowUp: 0.01,
      PageDown: -0.1,
      PageUp: 0.1,
      Home: -1,
      End: 1,
    };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    move(Number.parseFloat(grip.style.left) + steps[event.key] * span);
  });
}

/** The initial threshold: the bin edge above which about 5% of the examples lie. */
function startingPoint({ edges, counts }, total) {
  let above = 0;
  for (let index = counts.length - 1; index >= 0; index -= 1) {
    above += counts[index];
    if (above >= 0.05 * total) return Number(edges[index].toPrecision(6));
  }
  return edges[0];
}

/** Estimate from the bins how many examples lie above a value. */
function estimate({ edges, counts, log }, value) {
  const isLog = log && edges[0] > 0;
  const place = (x) => (isLog ? Math.log(x) : x);
  return Math.round(
    counts.reduce((sum, number, index) => {
      const [low, high] = [place(edges[index]), place(edges[index + 1])];
      return sum + number * Math.max(0, Math.min(1, (high - place(value)) / (high - low || 1)));
    }, 0),
  );
}

/** The card with the histogram and a drop-down list of columns. */
export function thresholdCard(stops) {
  const columns = state.overview.columns.filter((column) => column.kind === "number").map((column) => column.name);
  const holder = h("div", {});
  const fill = (held) => {
    if (!held.counts.length) {
      holder.replaceChildren(h("p", { class: "soft" }, "No example has a value in this column."));
      return;
    }
    const made = threshold(held);
    stops.push(made.stop);
    holder.replaceChildren(made.element);
  };
  const asking = latest();
  const choose = async (name) => {
    const isLatest = asking();
    const found = await source.histogram(name).catch((error) => ({ error }));
    if (!isLatest()) return;
    if (found.error) holder.replaceChildren(h("p", { class: "soft" }, found.error.message));
    else fill(found);
  };
  fill(state.overview.histogram);
  const choice = h(
    "select",
    { "aria-label": "Column of the histogram", onchange: (event) => choose(event.target.value) },
    columns.map((name) =>
      h("option", { value: name, selected: name === state.overview.histogram.column }, title(name)),
    ),
  );
  return h(
    "section",
    { class: "panel wide", "aria-labelledby": "threshold-title" },
    h(
      "header",
      { class: "panel-head" },
      h(
        "div",
        {},
        h("h2", { id: "threshold-title" }, "Distribution"),
        h("p", { class: "soft" }, "High self-influence: outliers, wrong labels, memorised examples. Drag the line."),
      ),
      choice,
    ),
    holder,
  );
}
