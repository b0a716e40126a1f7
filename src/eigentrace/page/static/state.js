// State shared by the views: the run's overview, the last list of examples, the thresholds.

export const state = {
  overview: null,
  /** The last list of examples: its URL, its scroll position, and the row numbers fetched so far, in order. */
  list: null,
  /** The last threshold of each column. */
  thresholds: {},
};

/** Whether the run has labels. */
export function hasLabels() {
  return state.overview.columns.some((column) => column.name === "label");
}

/** The name of a class, or its number. */
export function labelName(label) {
  if (label === null || label === undefined) return "none";
  return state.overview.classes?.[label] ?? String(label);
}

/** All classes: [label, name] each. */
export function labels() {
  const { classes, columns } = state.overview;
  const values = classes
    ? classes.map((_, label) => label)
    : (columns.find((column) => column.name === "label")?.values ?? []);
  return values.map((label) => [label, labelName(label)]);
}

/** The URL of a view with its settings; unset ones are omitted. */
export function address(view, asked = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** A group's value as text, in the form that the server expects. */
export function groupWord(value) {
  return value === null || value === undefined ? "" : String(value);
}
