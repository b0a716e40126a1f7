"""Sums of the learning rates of all steps, group by group, and how they are kept in a checkpoint of the Trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eigentrace.errors import MismatchError
from eigentrace.settings import counted, short

CALLBACK = "EigentraceTraining"
"""The callback's class, by which the Trainer names its state in `trainer_state.json`."""
TRAINER_STATE = "trainer_state.json"
_FORMAT = 1
_GIVE = "Give the sums: eigentrace.Training(lr_sum={name: ...})."


@dataclass
class GroupSum:
    """The learning rates of one group of parameters, summed."""

    parameters: int
    """How many parameter tensors the group has, by which it is recognised."""
    lr_sum: float = 0.0
    effective: float = 0.0
    """The same with each rate times (1 − dampening) / (1 − momentum) of its step, which a schedule may change."""


@dataclass
class RateSums:
    """The sums of all groups of an optimizer."""

    steps: int = 0
    groups: list[GroupSum] = field(default_factory=list)

    def add(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add the rates of a step that was taken; a new group starts with this step."""
        self.steps += 1
        self.groups += [GroupSum(len(group["params"])) for group in groups[len(self.groups) :]]
        for held, group in zip(self.groups, groups, strict=False):
            rate = float(group["lr"])
            held.lr_sum += rate
            held.effective += rate * _effect(group)

    def for_groups(self, groups: Sequence[Mapping[str, Any]], what: str, remedy: str = _GIVE) -> list[float]:
        """Return a sum for each group, to be multiplied by the (1 − dampening) / (1 − momentum) that it has now."""
        self.check_groups(groups, what, remedy)
        if len(groups) > len(self.groups):
            raise MismatchError(
                f"{what} has {counted(len(groups), 'group')}, and steps of {len(self.groups)} were recorded: a "
                f"group that is new has taken none. {remedy}"
            )
        pairs = zip(self.groups, groups, strict=True)
        return [held.effective / _effect(group) if _effect(group) else 0.0 for held, group in pairs]

    def check_groups(self, groups: Sequence[Mapping[str, Any]], what: str, remedy: str = _GIVE) -> None:
        """Raise MismatchError unless the groups are those that were recorded; there may be more of them."""
        recorded, found = [one.parameters for one in self.groups], [len(group["params"]) for group in groups]
        if found[: len(recorded)] != recorded:
            raise MismatchError(
                f"The record has groups of {short(recorded)} parameters, and {what} of {short(found)}. It belongs to "
                "another optimizer, or groups were removed or changed in the meantime: only new ones may be "
                f"added. {remedy}"
            )

    def check_steps(self, states: Mapping[Any, Any], what: str, remedy: str) -> None:
        """Raise MismatchError if an optimizer counts more steps than were recorded."""
        taken = max((float(state.get("step", 0)) for state in states.values()), default=0.0)
        if taken > self.steps:
            raise MismatchError(f"{what} has taken {taken:,.0f} steps, of which {self.steps:,} were recorded. {remedy}")

    def as_json(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        return {"format": _FORMAT, "steps": self.steps, "groups": [asdict(group) for group in self.groups]}

    @classmethod
    def from_json(cls, found: Any, where: str, remedy: str) -> "RateSums":
        """Check what `as_json` returned; a MismatchError says where it was found and what to do."""
        try:
            if found["format"] != _FORMAT:
                raise ValueError(f"its format is {short(repr(found['format']))}, expected {_FORMAT}")
            groups = [
                GroupSum(_whole(one["parameters"]), _amount(one["lr_sum"]), _amount(one["effective"]))
                for one in found["groups"]
            ]
            return cls(_whole(found["steps"]), groups)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            problem = f"no entry {error}" if type(error) is KeyError else short(error, 160)
            raise MismatchError(
                f"{where} is no record of learning rates, or a damaged one ({problem}). {remedy}"
            ) from None


def recorded_in(state: Mapping[str, Any]) -> tuple[Any, bool] | None:
    """Return what the callback left in the state of a Trainer, and whether it is of an earlier step; None if nothing.

    A training that is resumed without the callback keeps what was recorded until then.
    """
    found = (state.get("stateful_callbacks") or {}).get(CALLBACK)
    if isinstance(found, list):  # of several callbacks, which record the same
        found = found[-1] if found else None
    recorded = None if found is None else found["attributes"]["recorded"]
    if recorded is None:
        return None
    return recorded["sums"], recorded["global_step"] != state["global_step"]


def _effect(group: Mapping[str, Any]) -> float:
    """Return how much momentum multiplies the steps of a group."""
    momentum = float(group.get("momentum") or 0.0) if "dampening" in group else 0.0
    return (1 - float(group["dampening"])) / (1 - momentum) if 0 < momentum < 1 else 1.0


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number of at least 0, got {short(repr(value))}")
    return value


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= float(value) < math.inf:
        raise ValueError(f"expected a finite number of at least 0, got {short(repr(value))}")
    return float(value)
