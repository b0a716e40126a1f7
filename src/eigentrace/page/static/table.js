// A sortable table.

import { h, icon } from "./dom.js";

/** Create a table. Each column: {name, value(line), cell(line)}; cells of the first column are row headers. */
export function table(caption, lines, columns) {
  const body = h("tbody");
  const heads = columns.map((column) =>
    h(
      "th",
      { scope: "col" },
      h(
        "button",
        { type: "button", class: "sort", onclick: () => sort(column) },
        column.name,
        h("span", { class: "sort-mark" }),
      ),
    ),
  );
  let sorted = null;
  let sign = 1;
  const compare = (a, b) =>
    a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : a < b ? -1 : 1;
  const fill = (ordered) =>
    body.replaceChildren(
      ...ordered.map((one) =>
        h(
          "tr",
          {},
          columns.map((column, index) =>
            index ? h("td", {}, column.cell(one)) : h("th", { scope: "row" }, column.cell(one)),
          ),
        ),
      ),
    );
  const sort = (column) => {
    sign = sorted === column ? -sign : columns.indexOf(column) ? -1 : 1;
    sorted = column;
    heads.forEach((head, index) => {
      const isChosen = columns[index] === column;
      if (isChosen) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
      head.querySelector(".sort-mark").replaceChildren(...(isChosen ? [icon(sign > 0 ? "up" : "down")] : []));
    });
    fill([...lines].sort((a, b) => sign * compare(column.value(a), column.value(b))));
  };
  fill(lines);
  return h(
    "div",
    { class: "table-box", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, heads)), body),
  );
}
