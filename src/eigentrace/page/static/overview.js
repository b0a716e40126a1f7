// The overview: facts about the run, histogram, spectrum, scatter plot, classes and groups.

import { drawn, scatter, spectrum } from "./charts.js";
import { field, h, later, latest } from "./dom.js";
import { count, number, percent, plural, short } from "./numbers.js";
import { source } from "./source.js";
import { address, groupWord, hasLabels, labelName, state } from "./state.js";
import { table } from "./table.js";
import { thresholdCard } from "./threshold.js";

/** Show the overview. */
export function showOverview(main) {
  const run = state.overview;
  const stops = [];
  main.replaceChildren(
    h("h1", { tabindex: "-1" }, "Overview"),
    run.missing
      ? h(
          "p",
          { class: "banner" },
          `${count(run.missing)} of ${count(run.rows)} examples are not scored yet. Resume scoring to complete the run.`,
        )
      : "",
    run.note ? h("p", { class: "banner" }, run.note) : "",
    source.isLive
      ? ""
      : h(
          "p",
          { class: "soft lede" },
          source.rows.length < run.rows
            ? `This report contains ${count(source.rows.length)} of ${count(run.rows)} examples.`
            : `This report contains all ${count(run.rows)} examples.`,
        ),
    facts(run),
    h(
      "div",
      { class: "panels" },
      thresholdCard(stops),
      spectrumCard(run, stops),
      scatterCard(run, stops),
      classCard(run),
      groupCard(run),
    ),
    details(run),
  );
  return { leave: () => stops.forEach((stop) => stop()) };
}

function facts(run) {
  const { coverage, features, method, delta, reliability, calibration } = run.model;
  const [, part, ofWhat] = /^(\S+%) of ([^(]*)/.exec(coverage ?? "") ?? [null, coverage || "–", "the parameters"];
  const all = [
    [count(run.rows), "training examples"],
    [part, `of ${ofWhat.trim()}`, coverage],
    [count(features), "features per example"],
    [method, "method"],
    delta === null || delta === undefined ? null : [short(delta), "δ, eigenvalue of the tail", delta],
    reliability === null || reliability === undefined
      ? null
      : [short(reliability), "reliability: rank agreement of two fits", reliability],
    calibration === null || calibration === undefined
      ? null
      : [`× ${short(calibration)}`, "nats of a converged model, to those shown", calibration],
  ];
  return h(
    "dl",
    { class: "facts" },
    all
      .filter(Boolean)
      .map(([value, name, full]) =>
        h("div", { class: "fact" }, h("dt", {}, name), h("dd", { title: full }, String(value))),
      ),
  );
}

function details(run) {
  const { precision, created, versions } = run.model;
  const parts = [
    ["Precision", precision],
    [
      "Created",
      String(created ?? "")
        .replace("T", " ")
        .replace("+00:00", " UTC"),
    ],
    ...Object.entries(versions ?? {}),
  ].filter(([, value]) => value);
  return h(
    "dl",
    { class: "small-facts" },
    parts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))),
  );
}

function panel(id, name, words, kind, ...parts) {
  return h(
    "section",
    { class: `panel ${kind}`, "aria-labelledby": id },
    h(
      "header",
      { class: "panel-head" },
      h("div", {}, h("h2", { id }, name), words && h("p", { class: "soft" }, words)),
    ),
    ...parts,
  );
}

function spectrumCard(run, stops) {
  const place = h("div", { class: "chart" });
  stops.push(drawn(place, (width) => spectrum(run.spectrum, run.model.delta, width)));
  const negative = run.spectrum.filter((value) => value < 0).length;
  const legend = run.spectrum.length
    ? h(
        "p",
        { class: "legend" },
        h("span", { class: "key dot blue" }),
        `${count(run.spectrum.length - negative)} positive`,
        h("span", { class: "key diamond red" }),
        `${count(negative)} negative`,
      )
    : "";
  return panel("spectrum-title", "Spectrum", "Eigenvalues of the kept directions.", "narrow", place, legend);
}

function scatterCard(run, stops) {
  const place = h("div", { class: "chart" });
  const message = h("p", { class: "soft", "aria-live": "polite" });
  const show = h("a", { class: "button", hidden: true }, "Show examples");
  const clear = h(
    "button",
    {
      type: "button",
      class: "quiet",
      hidden: true,
      onclick: () => {
        place.firstChild?.clearBrush?.();
        choose(null);
      },
    },
    "Clear",
  );
  const sampled =
    run.scatter.length < run.rows ? `A sample of ${count(run.scatter.length)} examples, the highest included. ` : "";
  const hint = `${sampled}Drag to select a range; click a point to open the example.`;
  let last = null;
  const inputs = ranges((chosen) => {
    place.firstChild?.clearBrush?.();
    choose(chosen, false);
  });
  const exactly = later(150, async (within) => {
    const found = await source.examples({ within, limit: 1 }).catch((error) => ({ error }));
    if (within === last)
      message.textContent = found.error ? found.error.message : `${plural(found.total, "example")} in this range.`;
  });
  const choose = (chosen, fills = true) => {
    last = chosen ? Object.entries(chosen).map(([name, [low, high]]) => `${name}:${bound(low)}:${bound(high)}`) : null;
    show.hidden = clear.hidden = !last;
    if (fills) inputs.fill(chosen);
    if (!last) {
      message.textContent = hint;
      return;
    }
    show.href = address("examples", { sort: "self_influence", within: last });
    message.textContent = "Counting …";
    exactly(last);
  };
  choose(null);
  stops.push(
    drawn(place, (width) => {
      choose(null);
      return scatter(run.scatter, {
        width,
        onbrush: choose,
        onopen: (row) => {
          location.hash = `#/example/${row}`;
        },
      });
    }),
  );
  const legend = hasLabels()
    ? h(
        "p",
        { class: "legend" },
        h("span", { class: "key dot mute" }),
        "prediction matches label",
        h("span", { class: "key diamond amber" }),
        "prediction differs",
      )
    : "";
  const isAlone = !run.by_class?.length && !run.group_columns?.length;
  return panel(
    "scatter-title",
    "Loss and self-influence",
    "",
    isAlone ? "full" : "half",
    place,
    legend,
    h("div", { class: "threshold-row" }, message, h("div", { class: "actions" }, clear, show)),
    inputs.element,
  );
}

function bound(value) {
  return Number.isFinite(value) ? Number(value.toPrecision(6)) : value > 0 ? "inf" : "-inf";
}

/** Number inputs for the same ranges as the brush. */
function ranges(onchange) {
  const names = { loss: "Loss", self_influence: "Self-influence" };
  const inputs = {};
  const read = () => {
    const chosen = Object.fromEntries(
      Object.entries(inputs).map(([name, [low, high]]) => [
        name,
        [low.value === "" ? -Infinity : Number(low.value), high.value === "" ? Infinity : Number(high.value)],
      ]),
    );
    onchange(
      Object.values(inputs)
        .flat()
        .some((input) => input.value !== "")
        ? chosen
        : null,
    );
  };
  const rows = Object.entries(names).map(([name, words]) => {
    inputs[name] = ["from", "to"].map(() => h("input", { type: "number", step: "any", onchange: read }));
    return [field(`${words} from`, inputs[name][0]), field("to", inputs[name][1])];
  });
  return {
    element: h(
      "details",
      { class: "by-numbers" },
      h("summary", {}, "Enter a range"),
      h("div", { class: "field-row" }, rows),
    ),
    fill(chosen) {
      for (const [name, [low, high]] of Object.entries(inputs)) {
        [low.value, high.value] = (chosen?.[name] ?? [Infinity, Infinity]).map((value) =>
          Number.isFinite(value) ? Number(value.toPrecision(6)) : "",
        );
      }
    },
  };
}

/** A share with a bar, scaled to the largest share of the table. */
function share(value, lines) {
  const most = Math.max(1e-9, ...lines.map((one) => one.share_of_top ?? 0));
  return h(
    "span",
    { class: "share" },
    h("span", { class: "share-bar", style: { "--share": `${(100 * (value ?? 0)) / most}%` } }),
    h("span", { class: "share-words" }, percent(value)),
  );
}

function classCard(run) {
  if (!run.by_class?.length) return "";
  const columns = [
    {
      name: "Class",
      value: (one) => one.label,
      cell: (one) => h("a", { href: address("examples", { label: one.label }) }, labelName(one.label)),
    },
    { name: "Examples", value: (one) => one.count, cell: (one) => count(one.count) },
    {
      name: "Mean self-influence",
      value: (one) => one.mean_self_influence,
      cell: (one) => number(one.mean_self_influence),
    },
    { name: "In top 5%", value: (one) => one.share_of_top, cell: (one) => share(one.share_of_top, run.by_class) },
    {
      name: "Prediction differs",
      value: (one) => one.disagree,
      cell: (one) => (one.disagree > 1 ? count(one.disagree) : percent(one.disagree)),
    },
  ];
  return panel("class-title", "Classes", "", "half", table("Table of classes", run.by_class, columns));
}

function groupCard(run) {
  if (!run.group_columns?.length) return "";
  const holder = h("div", {});
  const asking = latest();
  const choose = async (column) => {
    const isLatest = asking();
    const made = await source.groups(column).then(
      ({ groups }) => groupTable(column, groups),
      (error) => h("p", { class: "soft" }, error.message),
    );
    if (isLatest()) holder.replaceChildren(made);
  };
  const choice = h(
    "select",
    { "aria-label": "Group by column", onchange: (event) => choose(event.target.value) },
    run.group_columns.map((name) => h("option", { value: name }, name)),
  );
  choose(run.group_columns[0]);
  const made = panel("group-title", "Groups", "", run.by_class?.length ? "full" : "half", holder);
  made.querySelector(".panel-head").append(choice);
  return made;
}

function groupTable(column, groups) {
  const columns = [
    {
      name: column,
      value: (one) => String(one.value),
      cell: (one) =>
        h(
          "a",
          { href: address("examples", { group: `${column}:${groupWord(one.value)}` }) },
          String(one.value ?? "none"),
        ),
    },
    { name: "Examples", value: (one) => one.count, cell: (one) => count(one.count) },
    {
      name: "Mean self-influence",
      value: (one) => one.mean_self_influence,
      cell: (one) => number(one.mean_self_influence),
    },
    { name: "In top 5%", value: (one) => one.share_of_top, cell: (one) => share(one.share_of_top, groups) },
    { name: "Mean loss", value: (one) => one.mean_loss, cell: (one) => number(one.mean_loss) },
  ];
  return table(`Table of groups by ${column}`, groups, columns);
}
