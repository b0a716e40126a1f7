// Elements, built without markup: whatever comes from data is text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Attributes whose value is a function listen; null and false are left out. */
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

/** One of the icons that index.html holds. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** An element of a picture. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** A list of choices: [value, words] each. */
export function select(name, choices, chosen, onchange) {
  const options = choices.map(([value, words]) =>
    h("option", { value, selected: String(value) === String(chosen ?? "") }, String(words)),
  );
  return h("select", { name, onchange: (event) => onchange(event.target.value) }, options);
}

/** A control under its name. */
export function field(words, control, kind = "") {
  return h("label", { class: `field ${kind}`.trim() }, h("span", { class: "field-name" }, words), control);
}

/** What is shown while an answer is on its way. */
export function loading(words = "Loading") {
  return h(
    "div",
    { class: "state loading", role: "status" },
    h("span", { class: "spinner", "aria-hidden": "true" }),
    words,
  );
}

/** What is shown when there is nothing to show. */
export function empty(title, words, ...more) {
  return h("div", { class: "state" }, h("h2", {}, title), h("p", {}, words), ...more);
}

/** What is shown when an answer did not come. */
export function failure(error, again = null) {
  if (error.isAbsence) return empty("Not in this report", error.message);
  return h(
    "div",
    { class: "state error", role: "alert" },
    h("h2", {}, "That did not work"),
    h("p", {}, error.message),
    again && h("button", { type: "button", onclick: again }, "Try again"),
  );
}

/** Call a function once its caller has been quiet for a while; `cancel` on what this returns calls it off. */
export function later(milliseconds, call) {
  let timer = 0;
  const soon = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
  soon.cancel = () => clearTimeout(timer);
  return soon;
}

/** For answers that may come in another order than they were asked for: each call returns whether it is the latest. */
export function latest() {
  let last = 0;
  return () => {
    last += 1;
    const mine = last;
    return () => mine === last;
  };
}
