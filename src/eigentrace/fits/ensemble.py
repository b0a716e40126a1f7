"""Ensembles of fits: over checkpoints of one training, or trainings with several seeds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError
from eigentrace.fits.file_names import member_folder, state_file
from eigentrace.fits.fitted import Capabilities, Fitted
from eigentrace.fits.weighted_directions import Norm, Term
from eigentrace.progress import track
from eigentrace.projection.engine import Compute
from eigentrace.settings import counted
from eigentrace.task.checkpoints import Checkpoint, Source, find_checkpoints
from eigentrace.task.task import Task
from eigentrace.version import __version__

ENSEMBLE = "ensemble"


@dataclass(frozen=True, repr=False)
class Ensemble(Fitted):
    """A fit whose scores are the mean over several fits, of checkpoints, seeds or models.

    Members may have different tasks, on the same examples in the same order. Averaging removes random variation between
    trainings: it is the most reliable way to improve scores, at the cost of one pass per member.
    """

    members: Sequence[Fitted]
    states: tuple[Checkpoint, ...] | None = None
    """The checkpoints of members fitted by `Ensemble.fit`: saved with them, so that loading needs only one task."""

    def __post_init__(self) -> None:
        members = tuple(self.members) if isinstance(self.members, Sequence) else ()
        if not members or not all(isinstance(member, Fitted) for member in members):
            raise InputError(
                f"Ensemble takes a list of at least one fit, got {self.members!r}. Pass results of `method.fit`."
            )
        sizes = sorted({member.num_train for member in members})
        if len(sizes) > 1:
            raise InputError(
                f"The members of an ensemble must agree on the number of training examples, got {sizes}. Fit them on "
                "the same data, or pass the same num_train to each."
            )
        object.__setattr__(self, "members", members)

    def __repr__(self) -> str:
        return f"<Ensemble of {counted(len(self.members), 'fit')}, the first: {self.members[0]!r}>"

    @staticmethod
    def fit(
        method: Any,
        task: Task,
        data: Any,
        *,
        checkpoints: Source | Sequence[Source],
        num_train: int | None = None,
    ) -> "Ensemble":
        """Fit one method at several checkpoints of the same model.

        Args:
            method: The method, such as `eigentrace.Arnoldi()`.
            task: The model and its loss.
            data: The training examples, as for `Method.fit`.
            checkpoints: State dicts, files, or folders of Hugging Face or Lightning.
            num_train: N, the size of the training set, if `data` is only part of it.
        """
        if not isinstance(task, Task):
            raise InputError(
                f"Ensemble.fit takes a method, then a Task, got {type(task).__name__} as its second argument."
            )
        if getattr(method, "checkpoints", None) is not None:
            raise InputError(
                f"{type(method).__name__} already has checkpoints: remove them from the method, or call its own fit."
            )
        data, states = as_data(data), find_checkpoints(checkpoints)
        found = track(states, "Fitting at checkpoints", len(states))
        members = [method.fit(task.at(state.load()), data, num_train=num_train) for state in found]
        return Ensemble(tuple(members), states)

    @property
    def task(self) -> Task:  # type: ignore[override]
        """The task of the first member."""
        return self.members[0].task

    @property
    def num_train(self) -> int:  # type: ignore[override]
        """The number of training examples N, equal for all members."""
        return self.members[0].num_train

    @property
    def has_curvature(self) -> bool:  # type: ignore[override]
        """Whether all members have curvature, so that the mean of their scores has a unit."""
        return all(member.has_curvature for member in self.members)

    @property
    def method(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings of the members."""
        return {"name": "Ensemble", "members": [member.method for member in self.members]}

    @property
    def can(self) -> Capabilities:
        """The capabilities that all members share, except for those that belong to single ones."""
        of_members = [dataclasses.asdict(member.can) for member in self.members]
        shared = {name: all(can[name] for can in of_members) for name in of_members[0]}
        return Capabilities(**shared | {"spectrum": False, "coordinates": False, "refine": False})

    @property
    def positive_metric(self) -> bool:
        """Whether every member's self-influence is positive by construction."""
        return all(member.positive_metric for member in self.members)

    @property
    def weights(self) -> Tensor:  # (K,)
        """One weight per column of `features`: the weights of the members, divided by their number."""
        self._require("features")
        return torch.cat([term.block.weights * term.share for term in self.terms()])

    def terms(self) -> tuple[Term, ...]:
        """Return the terms of all members, with equal shares; none if any member has none."""
        found = [member.terms() for member in self.members]
        share = 1 / len(found)
        return tuple(replace(t, share=t.share * share) for terms in found for t in terms) if all(found) else ()

    def parts(self) -> dict[str, Fitted]:
        """Return the members by directory name."""
        return {member_folder(number): member for number, member in enumerate(self.members)}

    def unstored(self) -> Self:
        """Return the ensemble of the members that score by whole gradients."""
        return replace(self, members=tuple(member.unstored() for member in self.members))

    def _distilled(self, keep: int | None, tail: Any, positive_only: bool | None, delta: float | None) -> Self:
        return replace(self, members=tuple(m.distill(keep, tail, positive_only, delta=delta) for m in self.members))

    def _features(self, data: Data, *, queries: bool, compute: Compute) -> Tensor:
        return torch.cat([m.features(data, queries=queries, compute=compute) for m in self.members], dim=1)

    def _manifest(self) -> dict[str, Any]:
        return {
            "kind": ENSEMBLE,
            "format": 1,
            "versions": {"eigentrace": __version__, "torch": torch.__version__},
            "members": len(self.members),
            "states": self.states is not None,
        }

    def _files(self) -> dict[str, dict[str, Tensor]]:
        if self.states is None:
            return {}
        pairs = enumerate(zip(self.states, self.members, strict=True))
        return {state_file(number): member.task.canonical(state.load()) for number, (state, member) in pairs}

    def _self(self, data: Data, *, queries: bool, norm: Norm, compute: Compute) -> Tensor:
        return _mean([m._self(data, queries=queries, norm=norm, compute=compute) for m in self.members])

    def _cross(self, train: Data, queries: Data, *, norm: Norm, compute: Compute) -> Tensor:
        return _mean([m._cross(train, queries, norm=norm, compute=compute) for m in self.members])


def _mean(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores).mean(dim=0)
