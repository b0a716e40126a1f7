// Data source of a report: the rows embedded in the file; decisions last until the page is closed.

const KEPT = ["drop", "keep", "relabel"];

/** Data of the run that the report does not contain. */
class Absence extends Error {
  isAbsence = true;
}

/** The interface of `Server` in source.js, on an embedded JSON object. */
export class Embedded {
  isLive = false;

  constructor(held) {
    this.held = held;
    this.rows = Object.values(held.rows);
    this.acts = [];
  }

  async overview() {
    return { ...this.held.overview, live: false, decisions: this.counts() };
  }

  async histogram(column) {
    const found = this.held.histograms[column];
    if (!found) throw new Absence(`This report has no histogram of ${column}. Open the run with eigentrace serve.`);
    return found;
  }

  async groups(column) {
    const groups = this.held.groups[column];
    if (!groups) throw new Absence(`This report has no groups by ${column}. Open the run with eigentrace serve.`);
    return { groups };
  }

  async examples(asked) {
    const column = asked.sort ?? "self_influence";
    const sign = asked.order === "asc" ? 1 : -1;
    const found = this.rows.filter((row) => this.matches(row, asked, column));
    found.sort((a, b) => sign * (value(a, column) - value(b, column)) || a.row - b.row);
    const offset = Number(asked.offset ?? 0);
    return { total: found.length, offset, rows: found.slice(offset, offset + Number(asked.limit ?? 60)) };
  }

  matches(row, asked, column) {
    const has = (name) => asked[name] !== undefined && asked[name] !== null && asked[name] !== "";
    if (has("label") && row.label !== Number(asked.label)) return false;
    if (has("prediction") && row.prediction !== Number(asked.prediction)) return false;
    if (has("disagree") && String(asked.disagree) === "1" && row.label === row.prediction) return false;
    if (has("decision") && (row.decision ?? "none") !== asked.decision) return false;
    if (has("above") && !(value(row, column) > Number(asked.above))) return false;
    if (has("below") && !(value(row, column) < Number(asked.below))) return false;
    if (has("group") && !inGroup(row, asked.group)) return false;
    if (has("search") && !textOf(row).includes(asked.search.toLowerCase())) return false;
    if ((has("low") || has("high")) && !this.within(row, column, asked)) return false;
    return [asked.within ?? []].flat().every((range) => inRange(row, range));
  }

  within(row, column, asked) {
    const ordered = this.rows.map((one) => value(one, column)).sort((a, b) => a - b);
    const at = (share) => ordered[Math.round(share * (ordered.length - 1))];
    return value(row, column) >= at(Number(asked.low || 0)) && value(row, column) <= at(Number(asked.high || 1));
  }

  async example(row) {
    const found = this.held.rows[row];
    if (!found)
      throw new Absence(
        `Row ${row} is not among the ${this.rows.length} examples of this report. Open the run with eigentrace serve.`,
      );
    return found;
  }

  async explain(row) {
    const found = this.held.explain[row];
    if (!found)
      throw new Absence(
        `Row ${row} is not explained: this report explains the examples of highest self-influence only. Open the run with eigentrace serve.`,
      );
    const full = (side) => found[side].map(([of, score]) => ({ ...this.held.rows[of], score }));
    return { ...found, query: this.held.rows[row], proponents: full("proponents"), opponents: full("opponents") };
  }

  async ask() {
    throw new Absence("Explaining a new example needs the model. Open the run with eigentrace serve RUN --model.");
  }

  async decide({ rows, rule, decision, new_label: label = null }) {
    const chosen = rows
      ? rows.map((row) => this.held.rows[row]).filter(Boolean)
      : this.rows.filter((row) => value(row, rule.by) > rule.above && (rule.label ?? row.label) === row.label);
    this.acts.push(chosen.map((row) => [row, row.decision, row.new_label]));
    for (const row of chosen) {
      row.decision = decision === "clear" ? null : decision;
      row.new_label = decision === "relabel" ? label : null;
    }
    return { changed: chosen.length, counts: this.counts() };
  }

  async undo() {
    const last = this.acts.pop() ?? [];
    for (const [row, decision, label] of last) Object.assign(row, { decision, new_label: label });
    return { changed: last.length, counts: this.counts() };
  }

  counts() {
    return Object.fromEntries(KEPT.map((word) => [word, this.rows.filter((row) => row.decision === word).length]));
  }

  exports() {
    return [{ name: "CSV", act: () => save(this.rows.filter((row) => row.decision)) }];
  }
}

function value(row, column) {
  const found = column in row ? row[column] : row.columns?.[column];
  return typeof found === "number" ? found : Number.NEGATIVE_INFINITY;
}

function inGroup(row, group) {
  const at = group.indexOf(":");
  return String(row.columns?.[group.slice(0, at)] ?? "") === group.slice(at + 1);
}

function inRange(row, range) {
  const [, column, low, high] = range.match(/^(.*):([^:]*):([^:]*)$/);
  return value(row, column) >= bound(low) && value(row, column) <= bound(high);
}

function bound(text) {
  return { inf: Infinity, "-inf": -Infinity }[text] ?? Number(text);
}

function textOf({ id, content }) {
  return `${id ?? ""}\n${content.text ?? ""} ${content.target ?? ""} ${(content.tokens ?? []).map(([word]) => word).join("")}`.toLowerCase();
}

function save(rows) {
  // Spreadsheets would evaluate cells that begin like a formula, so these are prefixed with a quote.
  const cell = (given) => {
    const text = String(given ?? "").replace(/^(?=[=+\-@\t\r])/, "'");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = rows.map((row) => [row.row, cell(row.id), row.decision, row.new_label ?? ""].join(","));
  const blob = new Blob([["row,id,decision,new_label", ...lines, ""].join("\n")], { type: "text/csv" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = "decisions.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
