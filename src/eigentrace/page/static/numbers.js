// Formatting of numbers: four significant digits on the page, all digits in the tooltip.

import { h } from "./dom.js";
import { state } from "./state.js";

const NOTHING = "–";

/** Format a number with four significant digits. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3)
    return minus(
      value
        .toExponential(3)
        .replace(/\.?0+e/, "e")
        .replace("e+", "e"),
    );
  if (size >= 1e3) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(4))));
}

/** Format an integer with thousands separators. */
export function count(value) {
  return value === null || value === undefined ? NOTHING : minus(value.toLocaleString("en"));
}

/** Format a fraction as a percentage. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NOTHING;
  const value = 100 * share;
  return `${value !== 0 && Math.abs(value) < 10 ? Number(value.toPrecision(2)) : Math.round(value)}%`;
}

/** Show a number with four significant digits, and all of them in the tooltip. */
export function number(value, unit = "") {
  const full = value === null || value === undefined ? null : `${value}${unit && ` ${unit}`}`;
  return h("span", { class: "number", title: full }, short(value));
}

/** The displayed name of a column. */
export function words(name) {
  return state.overview?.columns.find((column) => column.name === name)?.label ?? name.replaceAll("_", " ");
}

/** What a column contains, for a tooltip; null for columns of the user. */
export function meaning(name) {
  return state.overview?.columns.find((column) => column.name === name)?.meaning ?? null;
}

/** The displayed name of a column, capitalised. */
export function title(name) {
  const said = words(name);
  return said.charAt(0).toUpperCase() + said.slice(1);
}

/** A count with its noun, singular or plural. */
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

function minus(text) {
  return text.replaceAll("-", "−");
}
