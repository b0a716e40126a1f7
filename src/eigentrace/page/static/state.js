// What the views share: the overview of the run, and the list somebody came from.

export const state = {
  overview: null,
  /** The last list of examples: its query, where it was scrolled to, and its rows in order as far as they are known. */
  list: null,
  /** Where the threshold of each column was left. */
  thresholds: {},
};

/** Tell whether the run knows classes. */
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

/** The address of a view with its settings, without those that are unset. */
export function address(view, asked = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  const words = query.toString();
  return `#/${view}${words ? `?${words}` : ""}`;
}

/** The word by which the server knows a value of a group. */
export function groupWord(value) {
  return value === null || value === undefined ? "" : String(value);
}
