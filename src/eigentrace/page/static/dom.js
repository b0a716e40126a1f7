// Helpers that create elements without HTML markup, so that data is always inserted as text.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. Attributes that are functions become event listeners; null and false are omitted. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else if (name === "style") for (const [key, given] of Object.entries(value)) element.style.setProperty(key, given);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Create one of the icons defined in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** Create an SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Create a drop-down list. Each choice: [value, text]. */
export function select(name, choices, chosen, onchange) {
  const options = choices.map(([value, text]) =>
    h("option", { value, selected: String(value) === String(chosen ?? "") }, String(text)),
  );
  return h("select", { name, onchange: (event) => onchange(event.target.value) }, options);
}

/** Create a control with its label. */
export function field(label, control, kind = "") {
  return h("label", { class: `field ${kind}`.trim() }, h("span", { class: "field-name" }, label), control);
}

/** A placeholder while data is loading. */
export function loading(words = "Loading") {
  return h(
    "div",
    { class: "state loading", role: "status" },
    h("span", { class: "spinner", "aria-hidden": "true" }),
    words,
  );
}

/** A placeholder for an empty view. */
export function empty(title, words, ...more) {
  return h("div", { class: "state" }, h("h2", {}, title), h("p", {}, words), ...more);
}

/** An error message, with a button to retry if `again` is given. */
export function failure(error, again = null) {
  if (error.isAbsence) return empty("Not in this report", error.message);
  return h(
    "div",
    { class: "state error", role: "alert" },
    h("h2", {}, "Something went wrong"),
    h("p", {}, error.message),
    again && h("button", { type: "button", onclick: again }, "Try again"),
  );
}

/** Debounce a function; the returned function has a method `cancel`. */
export function later(milliseconds, call) {
  let timer = 0;
  const soon = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
  soon.cancel = () => clearTimeout(timer);
  return soon;
}

/** For responses that may arrive out of order: each call returns a function that tells whether it was the latest. */
export function latest() {
  let last = 0;
  return () => {
    last += 1;
    const mine = last;
    return () => mine === last;
  };
}
