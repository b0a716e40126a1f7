// The view that explains a new example: a text, a pair of texts or an image that is not in the training data.

import { answers } from "./answers.js";
import { showContent } from "./content.js";
import { empty, failure, field, h, latest, loading, select } from "./dom.js";
import { count, number, percent } from "./numbers.js";
import { source } from "./source.js";
import { hasLabels, labelName, labels, state } from "./state.js";

const MOST_BYTES = 4 * 2 ** 20;

/** Show the form, or the reason why it is unavailable. */
export function showAsk(main) {
  const heading = h("h1", { tabindex: "-1" }, "Explain a new example");
  if (!state.overview.live) {
    const words = source.isLive
      ? "Explaining new examples needs the model. Start the page with it: eigentrace serve RUN --model."
      : "A report does not contain the model. Open the run with eigentrace serve RUN --model.";
    main.replaceChildren(
      heading,
      empty(
        "The model is not loaded",
        words,
        h("a", { class: "button", href: "#/examples" }, "Choose a training example instead"),
      ),
    );
    return {};
  }
  const kind = state.overview.kind;
  const result = h("div", { class: "ask-result", "aria-live": "polite" });
  const inputs = { image: imageInput, pair: pairInput }[kind] ?? textInput;
  const given = inputs();
  const label = hasLabels()
    ? h(
        "select",
        { name: "label" },
        labels().map(([value, name]) => h("option", { value }, name)),
      )
    : null;
  const normalize = select(
    "normalize",
    [
      ["none", "None"],
      ["gradient", "Gradient"],
      ["metric", "Metric"],
    ],
    "none",
    () => {},
  );
  const send = h("button", { class: "primary" }, "Explain");
  const ask = async (isExact) => {
    const problem = given.problem();
    if (problem) {
      result.replaceChildren(failure(new Error(problem)));
      return;
    }
    send.disabled = true;
    result.replaceChildren(loading(isExact ? "Computing exact scores" : "Computing scores"));
    try {
      const found = await source.ask({
        ...given.read(),
        ...(label ? { label: Number(label.value) } : {}),
        k: 8,
        normalize: normalize.value,
        exact: isExact,
      });
      result.replaceChildren(
        verdict(found.query),
        answers(found, () => ask(true)),
      );
    } catch (error) {
      result.replaceChildren(failure(error));
    }
    send.disabled = false;
  };
  const submit = (event) => {
    event.preventDefault();
    ask(false);
  };
  const form = h(
    "form",
    { class: "panel ask", onsubmit: submit },
    given.element,
    h("div", { class: "field-row" }, label && field("Label", label), field("Normalise by", normalize), send),
  );
  main.replaceChildren(
    heading,
    h(
      "p",
      { class: "soft lede" },
      `Find which of the ${count(state.overview.rows)} training examples have the most influence on its loss.`,
    ),
    h("div", { class: "ask-grid" }, form, result),
  );
  return {};
}

/** The prediction and loss of the new example. */
function verdict(query) {
  const parts = [];
  if (hasLabels() && query.prediction !== null && query.prediction !== undefined) {
    parts.push(
      "The model predicts ",
      h("b", {}, labelName(query.prediction)),
      query.confidence === null || query.confidence === undefined ? "" : ` (${percent(query.confidence)} confidence)`,
    );
  }
  if (query.loss !== null && query.loss !== undefined) {
    parts.push(
      parts.length ? "; " : "",
      hasLabels() ? `the loss for ${labelName(query.label)} is ` : "Its loss is ",
      number(query.loss, "nats"),
      " nats",
    );
  }
  const shown = query.content && query.content.kind !== "none" ? showContent(query) : "";
  return h("div", { class: "verdict" }, shown, parts.length ? h("p", {}, parts, ".") : "");
}

function textInput() {
  const area = h("textarea", { name: "text", rows: 6, required: true, maxlength: 200000, dir: "auto" });
  return {
    element: field("Text", area),
    read: () => ({ text: area.value }),
    problem: () => (area.value.trim() ? "" : "Enter a text first."),
  };
}

function pairInput() {
  const [text, target] = ["text", "target"].map((name) =>
    h("textarea", { name, rows: 4, required: true, maxlength: 200000, dir: "auto" }),
  );
  return {
    element: h("div", { class: "ask-pair" }, field("Source", text), field("Target", target)),
    read: () => ({ text: text.value, target: target.value }),
    problem: () => (text.value.trim() && target.value.trim() ? "" : "Enter both a source and a target."),
  };
}

function imageInput() {
  const input = h("input", {
    type: "file",
    class: "hidden",
    name: "image",
    id: "image",
    accept: "image/png,image/jpeg,image/webp",
    onchange: () => take(input.files[0]),
  });
  const preview = h("div", { class: "drop-preview" });
  const words = h("p", {}, h("b", {}, "Drop an image here"), ", or choose one.");
  const zone = h(
    "label",
    { class: "drop-zone", for: "image" },
    preview,
    words,
    h("p", { class: "soft" }, "PNG, JPEG or WebP, up to 4 MiB."),
  );
  let held = null;
  let problem = "Choose an image first.";
  const taking = latest();
  const take = async (file) => {
    const isLatest = taking();
    held = null;
    if (!file) return;
    problem =
      file.size > MOST_BYTES
        ? "The image is larger than 4 MiB: choose a smaller one."
        : /^image\/(png|jpeg|webp)$/.test(file.type)
          ? ""
          : `${file.name} is not a PNG, JPEG or WebP image: choose one.`;
    if (problem) {
      preview.replaceChildren();
      words.replaceChildren(problem);
      return;
    }
    const address = await readAs(file);
    if (!isLatest()) return;
    held = address.slice(address.indexOf(",") + 1);
    preview.replaceChildren(showContent({ content: { kind: "image", src: address } }, "small"));
    words.replaceChildren(file.name);
  };
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    take(event.dataTransfer.files[0]);
  });
  return {
    element: h("div", { class: "drop-holder" }, input, zone),
    read: () => ({ image: held }),
    problem: () => problem,
  };
}

function readAs(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} could not be read.`)));
    reader.readAsDataURL(file);
  });
}
