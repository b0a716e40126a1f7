// A virtual list: only the visible items are in the document, and rows are fetched a page at a time.

import { h, later } from "./dom.js";

const PAGE = 60;
const LONGEST_WAIT = 10_000;
const SPARE_LINES = 3;
// Browsers limit elements to some tens of millions of pixels; a list is too long to scroll by hand well before that.
const MOST_PIXELS = 6_000_000;
const MOST_PAGES = 120;

/** Items of equal height in one or more columns. */
export class VirtualList {
  /**
   * @param root The list element.
   * @param layout (width) => {columns, height, gap}.
   * @param load (offset, limit, signal) => {total, rows}.
   * @param draw (row) => the item.
   * @param onfail Called with the error when a page cannot be fetched.
   */
  constructor(root, { layout, load, draw, onfail }) {
    Object.assign(this, { root, layout, load, draw, onfail });
    this.items = new Map();
    this.pages = new Map();
    this.total = 0;
    this.focused = 0;
    this.failures = 0;
    this.notBefore = 0;
    this.stop = new AbortController();
    this.fetchSoon = later(60, () => this.fetchVisible());
    this.onscroll = () => {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.place();
      });
    };
    addEventListener("scroll", this.onscroll, { passive: true });
    this.watcher = new ResizeObserver(() => this.arrange());
    this.watcher.observe(root);
    root.addEventListener("focusin", (event) => {
      const item = event.target.closest("li");
      if (item) this.choose(Number(item.dataset.index));
    });
  }

  close() {
    removeEventListener("scroll", this.onscroll);
    cancelAnimationFrame(this.frame ?? 0);
    this.watcher.disconnect();
    this.stop.abort();
    clearTimeout(this.again);
  }

  /** Clear the list and fetch the first page. */
  async reset() {
    this.stop.abort();
    this.stop = new AbortController();
    this.pages.clear();
    this.clear();
    this.focused = 0;
    this.notBefore = 0;
    const first = await this.page(0);
    if (first) this.arrange();
    return first;
  }

  /** The row at an index; null if it has not been fetched. */
  at(index) {
    return this.pages.get(Math.floor(index / PAGE))?.rows?.[index % PAGE] ?? null;
  }

  get shown() {
    return Math.min(this.total, Math.floor(MOST_PIXELS / (this.step ?? 100)) * (this.columns ?? 1));
  }

  clear() {
    for (const item of this.items.values()) item.remove();
    this.items.clear();
  }

  /** Compute the layout for the current width. */
  arrange() {
    const width = this.root.clientWidth;
    if (!width) return;
    const { columns, height, gap } = this.layout(width);
    const isSame = columns === this.columns && height === this.height && width === this.width;
    Object.assign(this, {
      columns,
      height,
      gap,
      width,
      step: height + gap,
      itemWidth: (width - gap * (columns - 1)) / columns,
    });
    this.root.style.height = `${Math.max(0, Math.ceil(this.shown / columns) * this.step - gap)}px`;
    if (!isSame) this.clear();
    this.place();
  }

  visible() {
    const top = -this.root.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / this.step) - SPARE_LINES);
    const last = Math.ceil((top + innerHeight) / this.step) + SPARE_LINES;
    return [first * this.columns, Math.min(this.shown, Math.max(0, last) * this.columns)];
  }

  /** Insert the visible items into the document, and remove the others. */
  place() {
    if (!this.columns) return;
    const [from, to] = this.visible();
    for (const [index, item] of this.items) {
      if ((index < from || index >= to) && !item.contains(document.activeElement)) {
        item.remove();
        this.items.delete(index);
      }
    }
    let isMissing = false;
    for (let index = from; index < to; index += 1) {
      const row = this.at(index);
      isMissing ||= !row;
      const there = this.items.get(index);
      if (there && (!row || !there.classList.contains("waiting"))) continue;
      there?.remove();
      this.insert(index, row ? this.draw(row) : h("li", { class: "card waiting", "aria-hidden": "true" }));
    }
    if (isMissing) this.fetchSoon();
  }

  insert(index, item) {
    const line = Math.floor(index / this.columns);
    const column = index % this.columns;
    item.dataset.index = index;
    item.setAttribute("aria-posinset", index + 1);
    item.setAttribute("aria-setsize", this.total);
    item.style.transform = `translate(${column * (this.itemWidth + this.gap)}px, ${line * this.step}px)`;
    item.style.width = `${this.itemWidth}px`;
    item.style.height = `${this.height}px`;
    item.querySelector(".card-link")?.setAttribute("tabindex", index === this.focused ? "0" : "-1");
    let before = null;
    for (const child of this.root.children)
      if (Number(child.dataset.index) > index) {
        before = child;
        break;
      }
    this.root.insertBefore(item, before);
    this.items.set(index, item);
  }

  async fetchVisible() {
    const { signal } = this.stop;
    if (signal.aborted) return;
    const early = this.notBefore - performance.now();
    if (early > 0) {
      clearTimeout(this.again);
      this.again = setTimeout(() => this.place(), early);
      return;
    }
    const [from, to] = this.visible();
    const first = Math.floor(from / PAGE);
    const last = Math.floor(Math.max(from, to - 1) / PAGE);
    for (let page = first; page <= last; page += 1) await this.page(page);
    if (!signal.aborted) this.place();
  }

  async page(number) {
    const known = this.pages.get(number);
    if (known) return known.waiting ?? known;
    const stop = this.stop;
    const waiting = this.load(number * PAGE, PAGE, stop.signal)
      .then((found) => {
        if (stop.signal.aborted) return null;
        this.failures = 0;
        this.total = found.total;
        this.pages.set(number, found);
        this.forget(number);
        return found;
      })
      .catch((error) => {
        if (error.name === "AbortError" || stop.signal.aborted) return null;
        this.pages.delete(number);
        // Retry with exponential backoff while the server is down.
        this.failures += 1;
        this.notBefore = performance.now() + Math.min(LONGEST_WAIT, 250 * 2 ** this.failures);
        this.onfail(error);
        return null;
      });
    this.pages.set(number, { waiting });
    return waiting;
  }

  forget(near) {
    if (this.pages.size <= MOST_PAGES) return;
    const far = [...this.pages.keys()].sort((a, b) => Math.abs(b - near) - Math.abs(a - near));
    for (const number of far.slice(0, this.pages.size - MOST_PAGES)) this.pages.delete(number);
  }

  choose(index) {
    this.items.get(this.focused)?.querySelector(".card-link")?.setAttribute("tabindex", "-1");
    this.focused = index;
    this.items.get(index)?.querySelector(".card-link")?.setAttribute("tabindex", "0");
  }

  /** Scroll an item into view and focus it. */
  async focusAt(index) {
    if (!this.total) return;
    const wanted = Math.max(0, Math.min(this.shown - 1, index));
    await this.page(Math.floor(wanted / PAGE));
    const top = this.root.getBoundingClientRect().top + Math.floor(wanted / this.columns) * this.step;
    const header = document.querySelector(".top").getBoundingClientRect().bottom;
    const bar = document.getElementById("bar").getBoundingClientRect().top;
    if (top < header + 12) scrollBy(0, top - header - 12);
    else if (top + this.height > bar - 12) scrollBy(0, top + this.height - bar + 12);
    this.place();
    this.choose(wanted);
    this.items.get(wanted)?.querySelector(".card-link")?.focus({ preventScroll: true });
  }

  /** Fetch the visible page again and return it, null on failure; other pages are fetched when they become visible. */
  async refresh() {
    const hadFocus = this.root.contains(document.activeElement);
    this.stop.abort();
    this.stop = new AbortController();
    this.pages.clear();
    const [from] = this.visible();
    const found = await this.page(Math.floor(from / PAGE));
    if (!found) return null;
    this.clear();
    this.arrange();
    if (hadFocus) await this.focusAt(this.focused);
    return found;
  }
}
