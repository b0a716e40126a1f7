"""Claims of the paper, and what stored numbers say about each: seen, not seen, or cannot be told.

An order of two scores is decided by paired differences over several trainings (one-sided t-test at 95%). With one
training, the gap must exceed twice the standard deviation of the difference, from the numbers' own spread (over draws
or folds), or from a stated one where they have none.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, inf, sqrt
from statistics import mean, stdev
from typing import Any, Literal

from harness.record import Record

Records = Mapping[str, Record]
Outcome = Literal["seen", "not seen", "cannot be told"]
SEEN: Outcome = "seen"
NOT_SEEN: Outcome = "not seen"
UNDECIDED: Outcome = "cannot be told"
Place = tuple[str | int, ...]
"""Keys that lead to a number in the records of one machine."""

_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)
"""One-sided 95% quantiles of Student's t for 1, 2, … degrees of freedom; the last one also stands for more."""

_LISTED = 3
"""Pairs that evidence lists one by one."""

RULE = (
    "An order is decided by a one-sided t-test at 95% over paired trainings. With one training, the gap must exceed "
    'twice the standard deviation of the difference ("needed"), from the spread over draws or folds, or else from the '
    "spread that the paper or our repeats have for such a number. A claim about several pairs is seen if every pair "
    "is, and not seen if any pair is reversed."
)


class MissingNumberError(KeyError):
    """A number that a claim needs is not in the records."""


@dataclass(frozen=True)
class Finding:
    """What the numbers say about a claim."""

    outcome: Outcome
    evidence: str
    brief: str = ""
    """The evidence in a few words; empty: all of it."""


@dataclass(frozen=True)
class Sample:
    """The numbers of one score: one for each training."""

    values: Mapping[str, float]
    """By training."""
    places: Mapping[str, Place]
    """Where they stand in the records, by training."""
    deviation: float | None = None
    """Standard deviation of a single number within one training, over draws or folds."""
    spread: Place | None = None
    """Where the deviation stands."""

    @property
    def mean(self) -> float:
        """The mean over trainings."""
        return mean(self.values.values())

    def only(self, trainings: Container[str]) -> "Sample":
        """Return the numbers of some trainings."""
        values = {name: value for name, value in self.values.items() if name in trainings}
        places = {name: place for name, place in self.places.items() if name in trainings}
        return replace(self, values=values, places=places)

    def __str__(self) -> str:
        values = list(self.values.values())
        deviation = stdev(values) if len(values) > 1 else self.deviation
        text = f"{self.mean:.3g}" if abs(self.mean) < 10 else f"{self.mean:.1f}"
        return text if deviation is None else f"{text} ± {deviation:.2g}"


@dataclass(frozen=True)
class Pair:
    """Two scores, of which the paper has the first ahead."""

    label: str
    first: Sample
    second: Sample
    stated: float | None = None
    """Standard deviation of one number that has no spread of its own; None: unknown."""
    hindrance: str = ""
    """Why the two cannot be compared, if they cannot."""

    @property
    def trainings(self) -> list[str]:
        """Trainings of both scores."""
        return [name for name in self.first.values if name in self.second.values]

    @property
    def gap(self) -> float:
        """By how much the first is ahead."""
        if len(self.trainings) < 2:
            return self.first.mean - self.second.mean
        return mean(self._differences)

    @property
    def needed(self) -> float:
        """The smallest gap that counts."""
        if len(self.trainings) >= 2:
            count = len(self.trainings)
            return _T95[min(count - 1, len(_T95)) - 1] * stdev(self._differences) / sqrt(count)
        return 2 * hypot(*(_or(sample.deviation, self.stated) for sample in (self.first, self.second)))

    @property
    def outcome(self) -> Outcome:
        """Whether the first is ahead, or the second, or the gap is too small."""
        if self.hindrance or abs(self.gap) <= self.needed:
            return UNDECIDED
        return SEEN if self.gap > 0 else NOT_SEEN

    @property
    def evidence(self) -> str:
        """Both numbers, the gap and the gap that is needed."""
        needed = "no spread known" if self.needed == inf else f"needed {self.needed:.3g}"
        return f"{self.numbers} ({self.hindrance or f'gap {self.gap:.3g}, {needed}'})"

    @property
    def numbers(self) -> str:
        """Both numbers."""
        return f"{self.label}{self.first} against {self.second}"

    @property
    def _differences(self) -> list[float]:
        return [self.first.values[name] - self.second.values[name] for name in self.trainings]


def paired(label: str, samples: Iterable[Sample], stated: float | None = None, hindrance: str = "") -> Pair:
    """Return the pair of two samples, the first ahead in the paper, on the trainings that both have."""
    first, second = samples
    shared = first.values.keys() & second.values.keys()
    if shared:
        first, second = first.only(shared), second.only(shared)
    return Pair(label, first, second, stated, hindrance)


def _or(deviation: float | None, stated: float | None) -> float:
    known = deviation if deviation is not None else stated
    return inf if known is None else known


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    text: str
    """In a short sentence, with the paper's numbers."""
    judge: Callable[[Records], Finding]
    is_main: bool = False
    """Whether the summary of all experiments has it."""
    pairs: Callable[[Records], Sequence[Pair]] | None = field(default=None, repr=False)
    """The pairs of a claim about an order."""

    def on(self, records: Records) -> Finding:
        """Judge by the records of one machine."""
        try:
            return self.judge(records)
        except MissingNumberError as missing:
            return Finding(UNDECIDED, f"Not measured: {missing.args[0]}.")

    def line(self, records: Records) -> str:
        """Return outcome, claim and evidence in one line of Markdown."""
        found = self.on(records)
        return f"**{found.outcome.capitalize()}.** {self.text} *{found.evidence}*"

    def glance(self, records: Records, anchor: str) -> str:
        """Return outcome, claim with a link, and the decisive evidence in a short line of Markdown."""
        found = self.on(records)
        return f"**{found.outcome.capitalize()}.** [{self.text}](#{anchor}) *{found.brief or found.evidence}*"


def order(text: str, of: str, pairs: Callable[[Records], Sequence[Pair]], *, is_main: bool = False) -> Claim:
    """Return a claim that the first of every pair is ahead of the second.

    Args:
        text: The claim.
        of: What the numbers are, for the evidence.
        pairs: Returns the pairs from the records of one machine.
        is_main: Whether the summary has it.
    """
    return Claim(text, lambda records: in_order(of, pairs(records)), is_main, pairs)


def in_order(of: str, pairs: Sequence[Pair]) -> Finding:
    """Judge whether the first of every pair is ahead of the second."""
    outcomes = [pair.outcome for pair in pairs]
    outcome = NOT_SEEN if NOT_SEEN in outcomes else UNDECIDED if UNDECIDED in outcomes else SEEN
    counts = {max(1, len(pair.trainings)) for pair in pairs}
    trainings = " or ".join(map(str, sorted(counts))) + (" training" if counts == {1} else " trainings")
    groups = {each: [pair for pair in pairs if pair.outcome == each] for each in (NOT_SEEN, UNDECIDED, SEEN)}
    there = {each: found for each, found in groups.items() if found}
    groups_said = [("" if len(there) == 1 else f"{each}: ") + _listed(found) for each, found in there.items()]
    decisive = there[outcome]
    more = f", and {len(decisive) - 1} more" if len(decisive) > 1 else ""
    why = f", {nearest(decisive).hindrance}" if nearest(decisive).hindrance else ""
    brief = f"{of}, {trainings}: {nearest(decisive).numbers}{why}{more}."
    return Finding(outcome, f"{of}, {trainings}: {'. '.join(groups_said)}.", brief)


def nearest(pairs: Sequence[Pair]) -> Pair:
    """Return the pair whose gap is nearest to the one that counts."""
    return min(pairs, key=lambda pair: abs(abs(pair.gap) - pair.needed) / pair.needed if pair.needed else inf)


def _listed(pairs: Sequence[Pair]) -> str:
    """List a few pairs; of many, give the number and the one nearest to its limit."""
    if len(pairs) <= _LISTED:
        return "; ".join(pair.evidence for pair in pairs)
    return f"{len(pairs)} pairs, nearest to the limit {nearest(pairs).evidence}"


def number(records: Records, *place: str | int) -> float:
    """Return a number of the records.

    Raises:
        MissingNumberError: If it is missing or its measurement failed.
    """
    value: Any = records
    for key in place:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise MissingNumberError(", ".join(str(key) for key in place if key != "cells")) from None
    return float(value)


def sample(records: Records, places: Mapping[str, Place], spread: Place | None = None) -> Sample:
    """Return the numbers at some places, by training.

    Args:
        records: The results of one machine.
        places: Place of the number of every training.
        spread: Place of the standard deviation within a training, if there may be one.
    """
    if not places:
        raise MissingNumberError("every training")
    try:
        deviation = None if spread is None else number(records, *spread)
    except MissingNumberError:
        deviation = None
    values = {name: number(records, *place) for name, place in places.items()}
    return Sample(values, places, deviation, spread if deviation is not None else None)


def cell_sample(records: Records, part: str, name: str, key: str, spread: str) -> Sample:
    """Return one number of a cell, with its standard deviation over draws or folds under the key `spread`."""
    return sample(records, {"": (part, "cells", name, key)}, (part, "cells", name, spread))


def seed_sample(records: Records, part: str, row: str, key: str) -> Sample:
    """Return the numbers of a row over seeds, from cells called "ROW, seed S"; one seed has the spread over draws."""
    start = f"{row}, seed "
    cells = records.get(part, {"cells": {}})["cells"]
    seeds = [name.removeprefix(start) for name in cells if name.startswith(start) and key in cells[name]]
    if not seeds:
        raise MissingNumberError(f"{row}, {key}")
    places: dict[str, Place] = {seed: (part, "cells", f"{start}{seed}", key) for seed in seeds}
    spread = (part, "cells", f"{start}{seeds[0]}", f"{key}_sd") if len(seeds) == 1 else None
    return sample(records, places, spread)


def percent(records: Records, place: Place, count: int, scale: float = 100) -> Sample:
    """Return a share of `count` things in percent, with its binomial standard deviation.

    Args:
        records: The results of one machine.
        place: Place of the share.
        count: Number of independent things.
        scale: 100 if the share is stored between 0 and 1, and 1 if in percent.
    """
    value = scale * number(records, *place)
    likely = (value / 100 * count + 1) / (count + 2)  # so that a share of 0 has a spread too
    return Sample({"": value}, {"": place}, 100 * sqrt(likely * (1 - likely) / count))
