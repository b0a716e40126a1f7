"""Sorting and filtering of a run's rows, with cached results, fast enough for interactive use."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eigentrace.errors import InputError
from eigentrace.page.columns import Columns

SCORE = "self_influence"
# The share of rows with the highest self-influence that `top` returns.
_TOP = 0.05
_BINS = 60
# A histogram has a logarithmic axis if the maximum is more than this many times the median; it spans at most _DECADES.
_SKEWED = 20.0
_DECADES = 12
# Cache sizes: orders and lists of matching rows take 4 bytes per example each, results of searches 1 byte.
_KEPT_ORDERS = 6
_KEPT_LISTS = 4
_KEPT_SEARCHES = 4

Search = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class Wanted:
    """A query for rows: filters and an order."""

    sort: str = SCORE
    descending: bool = True
    label: int | None = None
    prediction: int | None = None
    disagree: bool = False
    group: str | None = None
    """A column and a value, such as `source:web`; an empty value also matches missing values."""
    low: float = 0.0
    """Lower bound of the quantile in the sort column."""
    high: float = 1.0
    """Upper bound of the quantile in the sort column."""
    above: float | None = None
    below: float | None = None
    within: tuple[str, ...] = ()
    """Numeric columns with inclusive bounds, such as `loss:0.5:2`."""
    search: str = ""
    decision: int | None = None


class Index:
    """Sorts and filters the rows of a run; results are arrays of row numbers."""

    def __init__(self, columns: Columns, search: Search, decided: Callable[[], tuple[np.ndarray, int]]) -> None:
        self.columns, self._search, self._decided = columns, search, decided
        self._orders: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._lists: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._searches: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._lock = RLock()

    def order(self, name: str, descending: bool) -> np.ndarray:  # (N,) int32
        """Return all rows sorted by a column; ties are in row order, missing values last."""
        return self._kept(self._orders, (name, descending), _KEPT_ORDERS, lambda: self._ordered(name, descending))

    def _ordered(self, name: str, descending: bool) -> np.ndarray:
        if name == "row":
            rows = np.arange(self.columns.num_rows, dtype=np.int32)
            return rows[::-1] if descending else rows
        values = self.columns.number(name)
        if values.dtype.kind in "iu":
            values = values.astype(np.float64)
        return _ascending(-values if descending else values)

    def matching(self, wanted: Wanted) -> np.ndarray:  # (n,) int32
        """Return the rows that match a query, in its order."""
        if wanted == Wanted(wanted.sort, wanted.descending):
            return self.order(wanted.sort, wanted.descending)
        version = 0 if wanted.decision is None else self._decided()[1]
        return self._kept(self._lists, (wanted, version), _KEPT_LISTS, lambda: self._matching(wanted))

    def _matching(self, wanted: Wanted) -> np.ndarray:
        order = self.order(wanted.sort, wanted.descending)
        return order[self._mask(wanted)[order]]

    def _mask(self, wanted: Wanted) -> np.ndarray:  # (N,) bool
        mask = np.ones(self.columns.num_rows, dtype=bool)
        for name in ("label", "prediction"):
            number = getattr(wanted, name)
            if number is not None:
                mask &= self.columns.number(name) == number
        if wanted.disagree:
            mask &= self.disagreeing
        if wanted.group is not None:
            mask &= self._in_group(wanted.group)
        if wanted.above is not None:
            mask &= self.columns.number(wanted.sort) > wanted.above
        if wanted.below is not None:
            mask &= self.columns.number(wanted.sort) < wanted.below
        for bounds in wanted.within:
            mask &= self._in_bounds(bounds)
        if wanted.low > 0 or wanted.high < 1:
            mask &= self._between(wanted.sort, wanted.low, wanted.high)
        if wanted.decision is not None:
            mask &= self._decided()[0] == wanted.decision
        return self._found(wanted.search, mask) if wanted.search else mask

    @property
    def disagreeing(self) -> np.ndarray:  # (N,) bool
        """For each row, whether the predicted class differs from the label."""
        labels, predictions = self.columns.or_missing("label"), self.columns.or_missing("prediction")
        if labels is None or predictions is None:
            return np.zeros(self.columns.num_rows, dtype=bool)
        return (labels != predictions) & (labels >= 0) & (predictions >= 0)

    def _in_group(self, group: str) -> np.ndarray:
        name = next((name for name in self.columns.names if group.startswith(f"{name}:")), None)
        if name is None:
            raise InputError(f"group must be a column of this run and a value, such as source:web, got {group!r}.")
        wanted = group[len(name) + 1 :]
        codes, values = self.columns.coded(name)
        matching = [code for code, value in enumerate(values) if _as_text(value) == wanted]
        return np.isin(codes, matching)

    def _in_bounds(self, bounds: str) -> np.ndarray:
        name, _, rest = bounds.rpartition(":")
        name, _, first = name.rpartition(":")
        try:
            low, high = float(first), float(rest)
        except ValueError:
            raise InputError(f"within must be a column and two numbers, such as loss:0.5:2, got {bounds!r}.") from None
        values = self.columns.number(name)
        return (values >= low) & (values <= high)

    def _between(self, name: str, low: float, high: float) -> np.ndarray:
        """Return which rows lie between two quantiles of a column; rows without a value do not."""
        order = self.order(name, False)
        count = self.columns.num_rows
        if name != "row":
            count -= int(np.isnan(self.columns.number(name)).sum())
        mask = np.zeros(self.columns.num_rows, dtype=bool)
        mask[order[int(np.floor(low * count)) : int(np.ceil(high * count))]] = True
        return mask

    def _found(self, words: str, among: np.ndarray) -> np.ndarray:  # (N,) bool
        """Return which of the rows in a mask contain the words in text or id (case-insensitive)."""
        ids = self.columns.ids
        texts = self._kept(self._searches, words, _KEPT_SEARCHES, lambda: np.asarray(self._search(words)))
        if texts.ndim == 0:  # None: there are no texts
            if ids is None:
                raise InputError(
                    f"Cannot search for {words!r}: examples of this run have neither text nor ids. Clear the search."
                )
            texts = np.zeros(len(among), dtype=bool)
        found = among & texts
        if ids is not None:
            rest = np.flatnonzero(among & ~texts)
            # Few ids are selected before matching; if many are left, all are matched, which avoids a copy.
            some = ids if len(rest) > len(among) // 4 else ids.take(pa.array(rest))
            matches = pc.match_substring(some.cast(pa.string()), words, ignore_case=True).fill_null(False).to_numpy()
            found[rest] = matches[rest] if some is ids else matches
        return found

    def beyond(self, rule: dict[str, Any]) -> np.ndarray:  # (n,) int32
        """Return the rows that a decision rule selects, ascending."""
        wanted = Wanted(str(rule.get("by", SCORE)), above=rule.get("above"), below=rule.get("below"))
        if wanted.above is None and wanted.below is None:
            raise InputError("The rule has no threshold. Set above or below.")
        return np.flatnonzero(self._mask(replace(wanted, label=rule.get("label")))).astype(np.int32)

    def place(self, row: int) -> tuple[int | None, float | None]:
        """Return a row's rank by self-influence (1 is the highest) and its quantile; None for both without a value."""
        values = self.columns.number(SCORE)
        own = values[row]
        if np.isnan(own):
            return None, None
        rank = 1 + int((values > own).sum()) + int((values[:row] == own).sum())
        return rank, float((values < own).sum() / max(1, np.isfinite(values).sum()))

    def histogram(self, name: str) -> dict[str, Any]:
        """Count rows in bins of equal width, on a logarithmic axis if values are nonnegative and skewed."""
        values = self.columns.number(name)
        ascending = np.sort(values[np.isfinite(values)].astype(np.float64, copy=False))
        if not len(ascending):
            return {"column": name, "edges": [], "counts": [], "log": False}
        edges, is_log = _edges(ascending)
        places = np.searchsorted(ascending, edges[1:-1], side="left")
        counts = np.diff(np.concatenate([[0], places, [len(ascending)]]))
        return {"column": name, "edges": edges.tolist(), "counts": counts.tolist(), "log": is_log}

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Aggregate scores per value of a column, largest sum of self-influence first."""
        codes, values = self.columns.coded(name)
        count = np.bincount(codes, minlength=len(values))
        sums, means = _means(codes, self.columns.number(SCORE), len(values))
        _, losses = _means(codes, self.columns.number("loss"), len(values))
        top = np.bincount(codes[self.top], minlength=len(values)) / np.maximum(count, 1)
        differ = np.bincount(codes[self.disagreeing], minlength=len(values)) / np.maximum(count, 1)
        return [
            {
                "value": values[at],
                "count": int(count[at]),
                "mean_self_influence": means[at],
                "sum_self_influence": sums[at],
                "mean_loss": losses[at],
                "share_of_top": top[at],
                "disagree": differ[at],
            }
            for at in np.argsort(-sums, kind="stable")
        ]

    @property
    def top(self) -> np.ndarray:  # (n,) int32
        """The 5% of rows with the highest self-influence."""
        return self.order(SCORE, True)[: int(_TOP * self.columns.num_rows + 0.5)]

    def scatter(self, most: int, highest: int) -> np.ndarray:  # (n,) ascending
        """Return the rows to plot: the `highest` by self-influence and a random sample with a fixed seed."""
        first = self.order(SCORE, True)[:highest]
        draw = np.random.default_rng(0).choice(
            self.columns.num_rows, min(most - len(first), self.columns.num_rows), replace=False, shuffle=False
        )
        return np.union1d(first, draw)

    def _kept(
        self, held: OrderedDict[Any, np.ndarray], key: Any, most: int, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return a cached array, or make and cache it, evicting the least recently used."""
        with self._lock:
            if key not in held:
                held[key] = make()
            held.move_to_end(key)
            while len(held) > most:
                held.popitem(last=False)
            return held[key]


def _ascending(values: np.ndarray) -> np.ndarray:  # (N,) float -> (N,) int32
    """Sort rows by value, with ties in row order and NaN last.

    float32 values are packed with their row numbers into uint64 keys, whose sort is several times faster than a stable
    sort: the bits of floats have the order of the floats once those of negative ones are inverted.
    """
    if values.dtype != np.float32:
        return np.argsort(values, kind="stable").astype(np.int32)
    values = values + np.float32(0)  # turns -0 into +0
    bits = values.view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys[np.isnan(values)] = np.iinfo(np.uint32).max
    keys = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return keys.astype(np.uint32).astype(np.int32)


def _as_text(value: Any) -> str:
    """Format a value as JavaScript does."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _edges(ascending: np.ndarray) -> tuple[np.ndarray, bool]:
    low, high, middle = ascending[0], ascending[-1], ascending[len(ascending) // 2]
    positive = ascending[np.searchsorted(ascending, 0.0, side="right") :]
    if low >= 0 and middle > 0 and high > _SKEWED * middle:
        least = max(positive[0], high * 10.0**-_DECADES)
        return np.geomspace(least, high, _BINS + 1), True
    if low == high:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, _BINS + 1), False


def _means(codes: np.ndarray, values: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:  # (G,) x 2
    """Return the sum and mean of each group's values, ignoring NaN."""
    present = ~np.isnan(values)
    if not present.all():
        codes, values = codes[present], values[present]
    sums = np.bincount(codes, weights=values, minlength=total)
    counts = np.bincount(codes, minlength=total)
    return sums, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
