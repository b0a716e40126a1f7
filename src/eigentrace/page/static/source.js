// The data source of all views: the server, or the data embedded in a report, behind the same interface.

import { Embedded } from "./embedded.js";

/** Data from the server of the page. */
class Server {
  isLive = true;

  overview() {
    return get("api/overview");
  }
  histogram(column) {
    return get("api/histogram", { column });
  }
  groups(column) {
    return get(`api/groups/${encodeURIComponent(column)}`);
  }
  examples(asked, signal) {
    return get("api/examples", asked, signal);
  }
  example(row, signal) {
    return get(`api/examples/${row}`, {}, signal);
  }
  explain(row, asked, signal) {
    return get(`api/explain/${row}`, asked, signal);
  }
  ask(asked) {
    return post("api/ask", asked);
  }
  decide(asked) {
    return post("api/decisions", asked);
  }
  undo() {
    return post("api/undo", {});
  }

  /** The export formats: each has a name, and a URL or an action. */
  exports() {
    return [
      ["Parquet", "parquet"],
      ["CSV", "csv"],
      ["Row numbers to keep", "rows"],
    ].map(([name, format]) => ({ name, href: `api/export?format=${format}` }));
  }
}

async function get(path, asked = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const words = query.toString();
  return answer(fetch(words ? `${path}?${words}` : path, { signal, headers: { Accept: "application/json" } }));
}

async function post(path, body) {
  const token = document.querySelector('meta[name="token"]')?.content ?? "";
  const headers = { "Content-Type": "application/json", "X-Token": token };
  return answer(fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answer(asking) {
  const reply = await unlessAborted(asking, "The server does not respond. Check that eigentrace serve is still running.");
  if (reply.ok)
    return unlessAborted(reply.json(), "The server's response broke off. Check that eigentrace serve is still running.");
  const body = await reply.json().catch(() => ({}));
  throw new Error(body.error ?? `The server responded with ${reply.status} ${reply.statusText}.`);
}

/** The result of a request, or an error with these words; a request that the page aborted stays an AbortError. */
async function unlessAborted(asking, words) {
  try {
    return await asking;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(words);
  }
}

function made() {
  const held = document.getElementById("embedded");
  return held ? new Embedded(JSON.parse(held.textContent)) : new Server();
}

export const source = made();
