// The content of an example: an image, a text, a pair of texts, or tokens with their losses.

import { h } from "./dom.js";
import { short } from "./numbers.js";
import { hasLabels, labelName } from "./state.js";

// Images of up to this many pixels a side are enlarged by an integer factor, so that pixels stay square.
const TINY = 48;
// In the view of one example, texts with more characters scroll separately, so that the decision buttons stay visible.
const LONG = 1500;

/** Show an example's content. Size: "small" in lists, "large" in the view of one example. */
export function showContent(row, size = "small") {
  const content = row.content ?? { kind: "none" };
  const shown = { image, text, pair, tokens }[content.kind] ?? nothing;
  const isLong = size === "large" && `${content.text ?? ""}${content.target ?? ""}`.length > LONG;
  const reading = isLong ? { tabindex: 0, role: "group", "aria-label": "The whole text" } : {};
  const box = h("div", { class: `content ${content.kind} ${size}`, ...reading }, shown(content, row, size));
  if (content.more) box.append(h("p", { class: "more" }, "Truncated."));
  return box;
}

/** A text description of an example, for screen readers. */
export function described(row) {
  const parts = [row.row === undefined || row.row === null ? "new example" : `row ${row.row}`];
  if (hasLabels() && row.label !== null && row.label !== undefined) parts.push(`label ${labelName(row.label)}`);
  if (hasLabels() && row.prediction !== null && row.prediction !== undefined)
    parts.push(`predicted ${labelName(row.prediction)}`);
  return parts.join(", ");
}

function image(content, row, size) {
  const fit = () => {
    const side = Math.max(picture.naturalWidth, picture.naturalHeight);
    if (!side || side > TINY) return;
    const scale = size === "large" ? Math.max(1, Math.floor(288 / side)) : 3;
    picture.classList.add("tiny");
    picture.style.width = `${picture.naturalWidth * scale}px`;
  };
  const lost = () => picture.replaceWith(h("p", { class: "no-preview" }, "no preview"));
  const picture = h("img", { alt: described(row), decoding: "async", onload: fit, onerror: lost });
  picture.src = content.src;
  return picture;
}

function text(content) {
  return words(content.text);
}

function words(given) {
  return given?.trim() ? h("p", { class: "words", dir: "auto" }, given) : h("p", { class: "no-preview" }, "empty text");
}

function pair(content) {
  return [
    h(
      "div",
      { class: "half" },
      h("span", { class: "half-name" }, "source"),
      words(content.text),
    ),
    h(
      "div",
      { class: "half" },
      h("span", { class: "half-name" }, "target"),
      words(content.target),
    ),
  ];
}

function tokens(content) {
  const most = Math.max(1e-9, ...content.tokens.map(([, loss]) => loss ?? 0));
  const spans = content.tokens.map(([token, loss]) =>
    loss === null || loss === undefined
      ? token
      : h(
          "span",
          { class: "token", title: `loss ${short(loss)}`, style: { "--heat": `${Math.round((38 * loss) / most)}%` } },
          token,
        ),
  );
  return h("p", { class: "words", dir: "auto" }, spans);
}

function nothing() {
  return h("p", { class: "no-preview" }, "no preview");
}
