"""Rankings of examples by one score each, and parsing of amounts such as "5%" or 300 rows."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eigentrace.errors import EigentraceWarning, InputError
from eigentrace.settings import check_counts, counted, short

if TYPE_CHECKING:
    from eigentrace.store.user_columns import Names

Amount = str | float | int


By = str | np.ndarray | Sequence[float]


class Table(Protocol):
    """A run, or any object with columns of N values."""

    @property
    def num_rows(self) -> int:
        """N, the number of examples."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""

    @property
    def ids(self) -> Any:
        """One id per example, or None."""

    def column(self, name: str) -> np.ndarray:  # (N,)
        """Return a column in row order."""


@dataclass(frozen=True)
class Ranking:
    """One number per example, with methods that return the highest ones and quantiles."""

    values: np.ndarray  # (N,)
    names: "Names | None" = None

    def __repr__(self) -> str:
        known = self.values[~np.isnan(self.values)]
        extent = f", values from {known.min():.4g} to {known.max():.4g}" if len(known) else ""
        return f"<Ranking: {counted(len(self.values), 'example')}{extent}>"

    @cached_property
    def ids(self) -> np.ndarray | None:  # (N,)
        """The id of each example, or None if the data has no ids."""
        return None if self.names is None else self.names.whole()

    @property
    def rows(self) -> np.ndarray:  # (N,)
        """The row of each value, counted from 0."""
        return np.arange(len(self.values))

    def top(self, n: int = 20) -> "Top":
        """Return the n highest values, the highest first; ties are in row order."""
        check_counts(1, n=n)
        n = min(n, len(self.values))
        order = np.where(np.isnan(self.values), -np.inf, self.values)
        # n is usually small: partition first, and sort only values that can be among the highest n.
        bound = np.partition(order, len(order) - n)[len(order) - n]
        candidates = np.flatnonzero(order >= bound)
        rows = candidates[np.argsort(-order[candidates], kind="stable")][:n]
        return Top(rows, self.values[rows], None if self.names is None else self.names.of(rows))

    def quantile(self, q: Any) -> Any:
        """Return the q-th quantile of the values (q from 0 to 1), without NaN."""
        return np.nanquantile(self.values, q)


@dataclass(frozen=True)
class Top:
    """The highest values of a ranking, with their rows and ids."""

    rows: np.ndarray  # (n,)
    scores: np.ndarray  # (n,)
    ids: np.ndarray | None  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        extent = f", scores from {self.scores[0]:.4g} to {self.scores[-1]:.4g}" if len(self) else ""
        return f"<Top: {counted(len(self), 'example')}{extent}>"

    def __str__(self) -> str:
        names = self.rows if self.ids is None else self.ids
        return "\n".join(f"{score:12.5g}  {name}" for score, name in zip(self.scores, names, strict=True))


@dataclass(frozen=True)
class Amounts:
    """An amount of data: a share of the rows, or a number of rows."""

    name: str
    written: str
    share: Fraction | None
    count: int = 0

    def __str__(self) -> str:
        return self.written

    @property
    def drops(self) -> bool:
        """Return whether the amount is of rows to drop rather than rows to keep."""
        return self.name != "keep"

    @staticmethod
    def of(name: str, value: Any) -> "Amounts":
        """Parse "5%", 0.05, 300 or their strings."""
        text = str(value).strip()
        number = text.removesuffix("%").strip()
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise _wrong(name, value)
        if text == number and (isinstance(value, Integral) or (isinstance(value, str) and number.isdecimal())):
            if int(number) < 0:
                raise _wrong(name, value)
            return Amounts(name, counted(int(number), "row"), None, int(number))
        try:
            # 0.145 is taken as the exact decimal, not as the nearest binary number.
            share = Fraction(number) / (100 if text != number else 1)
        except ValueError:
            raise _wrong(name, value) from None
        if not 0 <= share <= 1:
            raise _wrong(name, value)
        return Amounts(name, f"{float(share * 100):.12g}%", share)

    def counts(self, sizes: np.ndarray) -> np.ndarray:  # (c,) -> (c,)
        """Return the number of rows in each group of the given sizes; shares are rounded half up."""
        if self.share is None:
            if self.count > sizes.sum():
                raise InputError(f"{self.name} must be at most the number of rows, {sizes.sum():,}, got {self.count}.")
            return np.array([self.count])
        return np.array([math.floor(self.share * int(size) + Fraction(1, 2)) for size in sizes], dtype=np.int64)


def _wrong(name: str, value: Any) -> InputError:
    return InputError(
        f'{name} must be a share such as "5%" or 0.05 (at most 100%), or a whole number of rows, got {value!r}.'
    )


def scores_of(run: Table, by: By) -> tuple[str, np.ndarray]:  # (N,) float64
    """Return the name and the values of a score, which is a column of the run or an array of numbers."""
    if isinstance(by, str):
        if by not in run.columns:
            raise InputError(f"The run has no column {by!r}. Its columns are {', '.join(run.columns)}.")
        name, values = by, as_numbers(run.column(by), by)
    else:
        name, values = "score", as_numbers(by, "by")
    if values.shape != (run.num_rows,):
        raise InputError(f"Expected one score for each of {run.num_rows:,} rows, got shape {values.shape}.")
    return name, values


def as_numbers(values: Any, name: str) -> np.ndarray:
    """Return a sequence, array or tensor of numbers as float64, None as NaN; raise InputError for anything else."""
    if hasattr(values, "detach"):  # a tensor, on any device and of any type
        values = values.detach().cpu().double().numpy()
    values = np.asarray(values)
    objects = enumerate(values.flat) if values.dtype == object else ()
    wrong = next(
        ((place, value) for place, value in objects if value is not None and not isinstance(value, Real)), None
    )
    if wrong is not None or values.dtype.kind not in "biufO":
        example = "" if wrong is None else f", such as {short(repr(wrong[1]))} at position {wrong[0]}"
        raise InputError(
            f"{name} must contain only numbers, got dtype {values.dtype}{example}. Convert them to numbers."
        )
    return values.astype(np.float64, copy=False)


def whole_numbers(run: Table, name: str) -> np.ndarray | None:  # (N,) int64
    """Return a column of class numbers, with -1 for missing ones; None if the run has no such column."""
    if name not in run.columns:
        return None
    values = np.asarray(run.column(name))
    if values.dtype.kind in "iu":
        return values.astype(np.int64, copy=False)
    return np.nan_to_num(as_numbers(values, name), nan=-1.0).astype(np.int64)


def ranks_of(scores: np.ndarray, *, lowest: bool = False) -> np.ndarray:  # (N,) -> (N,) int64
    """Return ranks from 1, the highest score first (or the lowest), ties in row order; 0 for NaN."""
    order = np.argsort(scores if lowest else -scores, kind="stable")  # NaN last
    ranks = np.empty(len(scores), dtype=np.int64)
    ranks[order] = np.arange(1, len(scores) + 1)
    ranks[np.isnan(scores)] = 0
    return ranks


def tell_unscored(scores: np.ndarray, name: str, outcome: str) -> None:
    """Warn if scores are NaN; `outcome` describes how their rows are treated."""
    count = int(np.isnan(scores).sum())
    if count:
        warnings.warn(
            f"{count:,} of {len(scores):,} rows have no {name} (NaN): {outcome}.", EigentraceWarning, stacklevel=3
        )
