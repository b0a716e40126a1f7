// Helpers that start servers and Chromium, run scenarios, and record errors and forbidden requests of the page.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
// Timeouts for hangs only: a wait takes milliseconds and a scenario seconds, on a busy machine ten times that.
const PATIENCE = 90_000;
const SCENARIO = 300_000;
const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const EVERY = [1280, 400].flatMap((width) => ["light", "dark"].map((colours) => ({ width, colours })));

/** Each width and each theme once. */
export const SOME = EVERY.filter(({ width, colours }) => (width === 1280) === (colours === "light"));

/** `eigentrace serve` in a separate process. */
export class Server {
  /** Start a server; by default on a free port. */
  static async start({ python, run }, options = [], port = 0) {
    const command = ["-c", "from eigentrace.cli import main; main()", "serve", run, "--json", "--port", String(port)];
    const child = spawn(python, [...command, ...options], { stdio: ["ignore", "pipe", "inherit"] });
    const lines = createInterface({ input: child.stdout });
    const first = await Promise.race([once(lines, "line"), once(child, "exit")]);
    assert.equal(typeof first[0], "string", `the server exited with ${first[0]} during startup`);
    const { url } = JSON.parse(first[0]);
    await (await fetch(new URL("api/overview", url))).text(); // the first request reads the run, which takes long
    return new Server(child, url);
  }

  constructor(child, url) {
    Object.assign(this, { child, url, port: Number(new URL(url).port) });
  }

  /** Replace a server without the model by one with it, on the same port. */
  static async withModel(world, page) {
    if (world.hasModel) return;
    await page?.goto("about:blank");
    await world.server.kill();
    world.server = await Server.start(world, ["--model"], world.server.port);
    world.hasModel = true;
  }

  /** Kill the server with SIGKILL, so that it cannot clean up. */
  async kill() {
    const ended = once(this.child, "exit");
    if (this.child.exitCode === null && this.child.kill("SIGKILL")) await ended;
  }
}

/** Run all scenarios in order, and write the results after each. */
export async function tour(scenarios) {
  const world = { ...JSON.parse(readFileSync(process.argv[2], "utf8")), troubles: [], kept: {} };
  const results = {};
  const browser = await chromium.launch({ executablePath: world.chromium, args: FLAGS });
  try {
    world.server = await Server.start(world);
    const context = await browser.newContext();
    context.setDefaultTimeout(PATIENCE);
    await watch(context, world);
    for (const [name, act] of Object.entries(scenarios)) {
      const began = Date.now();
      results[name] = await attempt(context, world, name, act);
      results[name].milliseconds = Date.now() - began;
      writeFileSync(join(world.out, "results.json"), JSON.stringify({ ...results, ...world.kept }));
    }
  } finally {
    await world.server?.kill();
    await browser.close();
  }
}

/** Run one scenario on the page of the previous one: users do not reload between views either. */
async function attempt(context, world, name, act) {
  Object.assign(world, { name, awaited: [], file: null });
  const page = context.pages()[0] ?? (await context.newPage());
  try {
    await page.setViewportSize({ width: 1280, height: 800 });
    await page.emulateMedia({ colorScheme: "light", reducedMotion: "reduce" });
    await within(SCENARIO, act({ page, world }));
    return { ok: true, detail: "" };
  } catch (error) {
    await page.screenshot({ path: join(world.out, `${name}.png`) }).catch(() => {});
    await page.close();
    return { ok: false, detail: String(error.stack ?? error) };
  }
}

/** Wait for a promise with a timeout, so that one that hangs does not block later scenarios. */
async function within(milliseconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not done after ${milliseconds / 1000} seconds`)), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Record errors, policy violations, dialogs and requests to other hosts, except the errors in `world.awaited`. */
async function watch(context, world) {
  const note = (words) => {
    if (!world.awaited.some((part) => words.includes(part))) world.troubles.push(`${world.name}: ${words}`);
  };
  // Interception stays on. Otherwise each scenario that delays a response would switch it on and off, and requests sent
  // at that moment would not be seen here.
  await context.route("**/*", (route) => route.fallback());
  await context.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) =>
      console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`),
    );
  });
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) note(`${message.text()} (${message.location().url})`);
  });
  context.on("weberror", (error) => note(String(error.error())));
  context.on("dialog", (dialog) => {
    note(`a dialog opened: ${dialog.message()}`);
    dialog.dismiss();
  });
  context.on("request", (request) => {
    const url = new URL(request.url());
    const isOwn = world.file
      ? request.url().startsWith(pathToFileURL(world.file).href)
      : url.origin === new URL(world.server.url).origin;
    if (!isOwn && !["data:", "blob:"].includes(url.protocol)) note(`asked for ${request.url()}`);
  });
  context.on("requestfailed", (request) => {
    const why = request.failure()?.errorText;
    if (why !== "net::ERR_ABORTED") note(`${request.url()} failed: ${why}`);
  });
}

/** Open a view afresh and wait until it is displayed. */
export async function open(page, world, view = "overview", home = world.server.url) {
  const other = view.startsWith("ask") ? "example" : "ask";
  for (const place of [other, view]) {
    await page.goto(`${home}#/${place}`);
    await page.locator(`[data-view="${/^\w+/.exec(place)[0]}"][aria-current=page]`).waitFor();
  }
  await page.getByRole("heading", { level: 1 }).waitFor();
}

/** Poll a value until it is right; fail with the last value after a timeout. */
export async function until(read, isRight, words) {
  const end = Date.now() + PATIENCE;
  for (;;) {
    const found = await read();
    if (isRight(found)) return found;
    if (Date.now() > end) assert.fail(`${words}: ${JSON.stringify(found)}`);
    await new Promise((resolve) => setTimeout(resolve, 80));
  }
}

/** Poll a value until it equals `wanted`. */
export function reads(read, wanted, words) {
  return until(read, (found) => found === wanted, `${words} should become ${JSON.stringify(wanted)}, and is`);
}

/** The first number of a text such as "1,234 of 2,000 examples". */
export function leading(text) {
  return Number(/^(?:about )?([\d,]+)/.exec(text.trim())?.[1].replaceAll(",", "") ?? NaN);
}

/** The number of examples that the list displays. */
export async function listed(page) {
  return leading(await page.getByRole("main").getByRole("status").filter({ hasText: "of" }).first().innerText());
}

/** The cards of the list that are in the document, in order. */
export function cards(page) {
  return page.getByRole("list", { name: "Examples" }).getByRole("listitem");
}

/** Row numbers of the cards in the document. */
export function rowsOf(page) {
  return cards(page)
    .getByRole("link")
    .evaluateAll((links) => links.map((link) => Number(/^row (\d+)/.exec(link.ariaLabel)[1])));
}

/** Row numbers of the run that match a filter, sorted by a column, with ties by row number. */
export function expected(world, isIn = () => true, column = "self_influence", sign = -1) {
  return world.rows
    .filter(isIn)
    .sort((a, b) => sign * (a[column] - b[column]) || a.row - b.row)
    .map(({ row }) => row);
}

/** Delay the next response whose URL starts with `path`; the server handles the request at once. */
export async function delayed(page, path) {
  const [asked, freed, done] = [0, 1, 2].map(() => {
    const one = {};
    one.promise = new Promise((resolve) => Object.assign(one, { resolve }));
    return one;
  });
  const matches = (url) => `${url.pathname}${url.search}`.startsWith(path);
  const hold = async (route) => {
    const response = await route.fetch();
    asked.resolve();
    await freed.promise;
    await route.fulfill({ response }).catch(() => {}); // the page may have aborted the request
    done.resolve();
  };
  await page.route(matches, hold, { times: 1 });
  const release = async () => {
    freed.resolve();
    await done.promise;
    await settled(page);
  };
  return { asked: asked.promise, release };
}

/** Wait until the page has handled earlier responses: a request sent now is answered after them. */
export async function settled(page) {
  for (let time = 0; time < 3; time += 1)
    await page.evaluate(async () => {
      await (await fetch("api/decisions")).text();
      await new Promise((resolve) => setTimeout(resolve));
    });
}

/** A control of the list's filters. */
export function field(page, name) {
  return page.getByRole("search").getByRole(name === "Search" ? "searchbox" : "combobox", { name, exact: true });
}

/** Wait until the list has as many rows as `rows`, and those in the document are its first ones. */
export async function lists(page, rows) {
  const read = async () => ({ total: await listed(page).catch(() => null), first: await rowsOf(page) });
  const isRight = ({ total, first }) =>
    total === rows.length &&
    first.length >= Math.min(5, rows.length) &&
    first.every((row, index) => row === rows[index]);
  await until(read, isRight, `the list should be ${rows.length} rows, ${rows.slice(0, 8)} first, and is`);
}

/** The slider of the histogram's threshold. */
export function slider(page) {
  return page.getByRole("slider", { name: "Threshold on self-influence" });
}

/** The number of examples above the threshold, once it is exact. */
export async function exactly(page) {
  const text = await until(
    () => page.getByText(/are above/).innerText(),
    (words) => !words.startsWith("about"),
    "the count should become exact, and is",
  );
  return leading(text);
}

/** The value of the threshold, read from the link to the examples above it. */
export async function thresholdOf(page) {
  const link = page.getByRole("region", { name: "Distribution" }).getByRole("link", { name: "Show examples" });
  return Number(new URLSearchParams((await link.getAttribute("href")).split("?")[1]).get("above"));
}

/** One side of an explanation: [row, score] each, with all digits of the score. */
export function sideOf(page, name) {
  return page
    .getByRole("region", { name })
    .getByRole("listitem")
    .evaluateAll((items) =>
      items.map((item) => [
        Number(/row (\d+)/.exec(item.querySelector("a").ariaLabel)[1]),
        Number.parseFloat(item.querySelector(".answer-score [title]").title),
      ]),
    );
}

/** Wait until both sides of an explanation equal those computed in Python. */
export async function answered(page, wanted) {
  for (const [name, side] of [
    ["Proponents", wanted.proponents],
    ["Opponents", wanted.opponents],
  ]) {
    const isRight = (found) =>
      found.length === side.length &&
      found.every(([row, score], at) => row === side[at][0] && Math.abs(score - side[at][1]) <= 2e-3 * Math.abs(score));
    await until(() => sideOf(page, name), isRight, `${name} should be ${JSON.stringify(side)}, and are`);
  }
}

/** Choose how scores are normalised. */
export async function normalise(page, name) {
  const choices = page.getByRole("group", { name: "Normalise by" });
  await choices.getByText(name, { exact: true }).click();
  await choices.getByRole("radio", { name, checked: true }).waitFor();
}

/** The counts in the bar at the bottom: {drop, keep, relabel}. */
export async function tallies(page) {
  const words = await page
    .getByRole("contentinfo")
    .getByRole("link", { name: /^[\d,]+ to \w+$/ })
    .allInnerTexts();
  return Object.fromEntries(words.map((text) => [/to (\w+)/.exec(text)[1], leading(text)]));
}

/** Wait until the bar at the bottom shows these counts. */
export function decided(page, wanted) {
  const isRight = (found) => Object.entries(wanted).every(([word, number]) => found[word] === number);
  return until(() => tallies(page), isRight, `the bar should show ${JSON.stringify(wanted)}, and shows`);
}

/** Press a key and wait until its message is displayed. */
export async function press(page, key, words) {
  await page.keyboard.press(key);
  const status = page.locator("#status");
  await until(
    () => status.innerText(),
    (text) => text.includes(words),
    `after ${key} the page should show "${words}", and shows`,
  );
}

/** Export decisions by the menu at the bottom, and return the path of the file. */
export async function save(page, world, name) {
  const bar = page.getByRole("contentinfo");
  const item = bar.getByText(name, { exact: true });
  if (!(await item.isVisible())) await bar.getByText("Export", { exact: true }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), item.click()]);
  const path = join(world.out, `${world.name}-${download.suggestedFilename()}`);
  await download.saveAs(path);
  return path;
}

/** Check a view with axe-core in both widths and themes; it must not scroll horizontally either. */
export async function accessible(page, go, widths = EVERY) {
  const found = [];
  for (const { width, colours } of widths) {
    await page.setViewportSize({ width, height: 800 });
    await page.emulateMedia({ colorScheme: colours, reducedMotion: "reduce" });
    await go();
    if (await page.evaluate(() => !globalThis.axe)) await page.evaluate(AXE);
    const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
    const bad = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
    for (const { id, help, nodes } of bad)
      found.push(
        `${width} ${colours}: ${id} (${help}): ${nodes
          .slice(0, 3)
          .map((node) => node.html.slice(0, 160))
          .join(" | ")}`,
      );
    const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    if (over > 0) found.push(`${width} ${colours}: the page is ${over} pixels too wide`);
  }
  assert.deepEqual(found, []);
}

/** Check that no scenario so far has caused errors. */
export function quiet(world) {
  assert.deepEqual(world.troubles, []);
}
