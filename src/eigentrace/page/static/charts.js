// Charts, drawn by Observable Plot with the colours of the style sheet.

import { h, s } from "./dom.js";
import { count, short } from "./numbers.js";

const { Plot, d3 } = globalThis;
const MARGINS = { marginLeft: 48, marginRight: 14, marginTop: 28, marginBottom: 40 };

/** Draw into an element, and redraw when its width changes. Returns a function that stops this. */
export function drawn(place, draw) {
  let width = 0;
  const watcher = new ResizeObserver(() => {
    if (place.clientWidth === width || !place.clientWidth) return;
    width = place.clientWidth;
    place.replaceChildren(...[draw(width)].flat());
  });
  watcher.observe(place);
  return () => watcher.disconnect();
}

function plot(label, options) {
  const picture = Plot.plot({ ...MARGINS, ...options });
  // Plot's own style element would violate the Content Security Policy; style.css has the same rules.
  for (const style of picture.querySelectorAll("style")) style.remove();
  for (const part of picture.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", label);
  return picture;
}

/** Format a tick label: plain from 0.01 to 10,000, exponential otherwise. */
function tick(value) {
  const size = Math.abs(value);
  if (size === 0 || (size >= 0.01 && size < 1e4)) return String(Number(value.toPrecision(3))).replace("-", "−");
  return value.toExponential(0).replace("e+", "e").replace("-", "−");
}

function logTicks(low, high, most) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / most));
  const powers = d3.range(from, to + 1, every).map((power) => 10 ** power);
  const inside = powers.filter((value) => value >= low && value <= high);
  const between = powers.flatMap((power) => [power, 2 * power, 5 * power]);
  return inside.length > 1 ? inside : between.filter((value) => value >= low && value <= high);
}

function axis(values, most, isLog = false) {
  const [low, high] = d3.extent(values);
  return low > 0 && (isLog || high / low > 20)
    ? { type: "log", ticks: logTicks(low, high, most), tickFormat: tick }
    : { type: "linear", ticks: most, tickFormat: tick };
}

/** Eigenvalues by rank; negative ones have their own colour and shape. */
export function spectrum(values, delta, width) {
  const points = values
    .map((value, index) => ({ rank: index + 1, size: Math.abs(value), isNegative: value < 0 }))
    .filter((point) => point.size > 0);
  if (!points.length) return h("p", { class: "soft" }, "This method has no eigenvalues.");
  const negative = points.filter((point) => point.isNegative);
  const sizes = points.map((point) => point.size).concat(delta > 0 ? [delta] : []);
  const label = `Spectrum: ${points.length} eigenvalues, ${negative.length} of them negative; the largest is ${short(points[0].size)}.`;
  return plot(label, {
    width,
    height: 260,
    x: { label: "rank", ticks: 5 },
    y: { label: "|λ|", grid: true, ...axis(sizes, 6, true) },
    marks: [
      delta > 0 ? Plot.ruleY([delta], { stroke: "var(--soft)", strokeDasharray: "3 3" }) : null,
      delta > 0
        ? Plot.text([{}], {
            x: 1,
            y: delta,
            text: () => "δ",
            textAnchor: "start",
            dx: 4,
            dy: -8,
            fill: "var(--soft)",
            fontSize: 12,
          })
        : null,
      Plot.dot(
        points.filter((point) => !point.isNegative),
        { x: "rank", y: "size", r: 3, fill: "var(--blue)" },
      ),
      Plot.dot(negative, { x: "rank", y: "size", r: 4, fill: "var(--red)", symbol: "diamond" }),
    ],
  });
}

/** A histogram; the part above the threshold is a second layer, which the caller clips with `cut`. */
export function histogram({ column, edges, counts, log }, name, width) {
  const bars = counts.map((number, index) => ({ number, x1: edges[index], x2: edges[index + 1] }));
  const isLog = log && edges[0] > 0;
  const inset = width > 500 ? 0.75 : 0.25;
  const marks = ["below", "above"].map((part) =>
    Plot.rectY(bars, {
      x1: "x1",
      x2: "x2",
      y: "number",
      fill: part === "below" ? "var(--bar)" : "var(--blue)",
      insetLeft: inset,
      insetRight: inset,
      className: part,
    }),
  );
  const picture = plot(`Histogram of ${name} over ${count(d3.sum(counts))} examples.`, {
    width,
    height: 240,
    className: `plot-${column.replace(/\W/g, "")}`,
    x: {
      label: name,
      domain: [edges[0], edges.at(-1)],
      type: isLog ? "log" : "linear",
      ticks: isLog ? logTicks(edges[0], edges.at(-1), width > 500 ? 9 : 5) : 6,
      tickFormat: tick,
    },
    y: {
      label: "examples",
      grid: true,
      ticks: 4,
      tickFormat: (value) => (Number.isInteger(value) ? count(value) : ""),
    },
    marks: [...marks, Plot.ruleY([0], { stroke: "var(--axis)" })],
  });
  const clip = s("rect", { x: 0, y: 0, width, height: 240 });
  picture.append(s("clipPath", { id: "above" }, clip));
  picture.querySelector("g.above").setAttribute("clip-path", "url(#above)");
  const scale = picture.scale("x");
  const [left, right] = scale.range;
  return {
    picture,
    left,
    right,
    at: (value) => scale.apply(Math.max(edges[0], Math.min(edges.at(-1), value))),
    value: (x) => scale.invert(Math.max(left, Math.min(right, x))),
    cut: (x) => {
      clip.setAttribute("x", x);
      clip.setAttribute("width", Math.max(0, width - x));
    },
  };
}

/** Self-influence against loss. `onbrush` receives the selected ranges, `onopen` the row of a clicked point. */
export function scatter(points, { width, onbrush, onopen }) {
  const positive = (index) => d3.min(points, (point) => (point[index] > 0 ? point[index] : undefined)) ?? 1e-9;
  const least = { own: positive(1), loss: positive(2) };
  const isAllowed = (point) => Number.isFinite(point[1]) && Number.isFinite(point[2]);
  const data = points
    .filter(isAllowed)
    .map(([row, own, loss, label, differs]) => ({
      row,
      own: Math.max(own, least.own),
      loss: Math.max(loss, least.loss),
      label,
      differs,
    }));
  const height = Math.min(420, Math.max(300, width * 0.56));
  const picture = plot(
    `Scatter plot of self-influence against loss for ${count(data.length)} examples; the prediction differs from the label for ${count(data.filter((one) => one.differs).length)}.`,
    {
      width,
      height,
      x: {
        label: "loss",
        ...axis(
          data.map((one) => one.loss),
          width > 500 ? 8 : 5,
        ),
        nice: false,
      },
      y: {
        label: "self-influence",
        grid: true,
        ...axis(
          data.map((one) => one.own),
          6,
        ),
      },
      marks: [
        Plot.dot(
          data.filter((one) => !one.differs),
          { x: "loss", y: "own", r: 2.25, fill: "var(--dot)", fillOpacity: 0.55 },
        ),
        Plot.dot(
          data.filter((one) => one.differs),
          { x: "loss", y: "own", r: 2.75, fill: "var(--amber)", fillOpacity: 0.85, symbol: "diamond" },
        ),
      ],
    },
  );
  const [x, y] = [picture.scale("x"), picture.scale("y")];
  const [left, right] = x.range;
  const [bottom, top] = y.range;
  const brush = d3
    .brush()
    .extent([
      [left - 6, top - 6],
      [right + 6, bottom + 6],
    ])
    .on("end", (event) => {
      if (!event.sourceEvent) return;
      if (!event.selection) {
        const [px, py] = d3.pointer(event.sourceEvent, picture);
        const near = d3.least(data, (one) => Math.hypot(x.apply(one.loss) - px, y.apply(one.own) - py));
        const isHit = near && Math.hypot(x.apply(near.loss) - px, y.apply(near.own) - py) < 8;
        onbrush(null);
        if (isHit) onopen(near.row);
        return;
      }
      const [[x0, y0], [x1, y1]] = event.selection;
      onbrush({
        loss: [x0 <= left ? -Infinity : x.invert(x0), x1 >= right ? Infinity : x.invert(x1)],
        self_influence: [y1 >= bottom ? -Infinity : y.invert(y1), y0 <= top ? Infinity : y.invert(y0)],
      });
    });
  const layer = d3.select(picture).append("g").attr("class", "brush").call(brush);
  picture.clearBrush = () => layer.call(brush.move, null);
  return picture;
}
