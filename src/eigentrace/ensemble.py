"""Several fits as one: checkpoints of a training, or trainings from several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigentrace import artifact
from eigentrace.checkpoints import Checkpoint, Source, find_checkpoints
from eigentrace.compute import Compute
from eigentrace.data import Data, as_data
from eigentrace.distill import Spectrum
from eigentrace.errors import InputError, MismatchError, UnsupportedError
from eigentrace.files import appearing
from eigentrace.fitted import Fitted
from eigentrace.progress import track
from eigentrace.projected import ProjectedFit
from eigentrace.projected import load as load_one
from eigentrace.task import Task
from eigentrace.version import __version__

_KIND = "ensemble"


@dataclass(frozen=True)
class Ensemble(Fitted):
    """The mean of several fits' scores: fits at checkpoints of one training, of several seeds, or of several models.

    Members may have different tasks, over the same examples in the same order. Averaging takes away what is chance in
    one training: it is the surest way to better scores, at the price of one pass per member.
    """

    members: Sequence[Fitted]
    states: tuple[Checkpoint, ...] | None = None
    """Where the members were fitted, if `Ensemble.fit` did it: saved with them, so that one task reads all back."""

    def __post_init__(self) -> None:
        members = tuple(self.members) if isinstance(self.members, Sequence) else ()
        if not members or not all(isinstance(member, Fitted) for member in members):
            raise InputError(f"Ensemble takes a list of at least one fit, got {self.members!r}.")
        sizes = sorted({member.num_train for member in members})
        if len(sizes) > 1:
            raise InputError(
                f"The members of an ensemble must agree on the number of training examples, got {sizes}. Fit them on "
                "the same data, or give each the same num_train."
            )
        object.__setattr__(self, "members", members)

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
            method: The settings, such as `eigentrace.Arnoldi()`.
            task: The model and its loss.
            data: Training examples, as for `Method.fit`.
            checkpoints: State dicts, files, Hugging Face or Lightning folders.
            num_train: N, the size of the training set, if `data` is only part of it.
        """
        if not isinstance(task, Task):
            raise InputError(f"Ensemble.fit takes a method, then a Task, got {type(task).__name__}.")
        if getattr(method, "checkpoints", None) is not None:
            raise InputError(f"{type(method).__name__} has checkpoints of its own: leave them out, or fit it alone.")
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
        """N, on which all members agree."""
        return self.members[0].num_train

    @property
    def has_curvature(self) -> bool:  # type: ignore[override]
        """Tell whether all members have curvature, so that the mean of their scores has a unit."""
        return all(member.has_curvature for member in self.members)

    @property
    def method(self) -> dict[str, Any]:
        """The settings of the members, for the record."""
        return {"name": "Ensemble", "members": [getattr(member, "method", {}) for member in self.members]}

    @property
    def positive_metric(self) -> bool:
        """Tell whether every member's self-influence is positive by construction."""
        return all(member.positive_metric for member in self.members)

    @property
    def spectrum(self) -> Spectrum:
        """Refuse: every member has its own."""
        raise UnsupportedError("An ensemble has no spectrum of its own: look at those of its members.")

    @property
    def weights(self) -> Tensor:  # (K,)
        """One weight per column of `features`: the members' own, divided by their number."""
        blocks = [block for member in self.members for block in _blocks(member)]
        return torch.cat([block.weights for block in blocks]) / len(self.members)

    def distill(self, keep: int | None = None, tail: Any = "same", positive_only: bool | None = None) -> "Ensemble":
        """Return another cut of every member; nothing is computed again."""
        return replace(self, members=tuple(m.distill(keep, tail, positive_only) for m in self.members))

    def features(self, data: Any, *, queries: bool = False, compute: Compute | None = None) -> Tensor:  # (N, K)
        """Project each example's gradients on the rows of all members, side by side."""
        data = as_data(data)
        return torch.cat([m.features(data, queries=queries, compute=compute) for m in self.members], dim=1)

    def save(self, path: str | Path) -> None:
        """Write all members to a new directory, to be read back by `eigentrace.load`."""
        manifest = {
            "kind": _KIND,
            "format": 1,
            "versions": {"eigentrace": __version__, "torch": torch.__version__},
            "members": len(self.members),
            "states": self.states is not None,
        }
        files = {}
        for number, (state, member) in enumerate(zip(self.states or (), self.members, strict=self.states is not None)):
            files[f"state-{number}.safetensors"] = member.task.canonical(state.load())
        with appearing(Path(path)) as partial:
            artifact.write(partial, manifest, files)
            for number, member in enumerate(self.members):
                member.save(partial / f"member-{number}")

    def _self(self, data: Data, *, queries: bool, unit_gradients: bool, compute: Compute) -> Tensor:
        return _mean(
            [m._self(data, queries=queries, unit_gradients=unit_gradients, compute=compute) for m in self.members]
        )

    def _cross(self, train: Data, queries: Data, *, unit_gradients: bool, compute: Compute) -> Tensor:
        return _mean([m._cross(train, queries, unit_gradients=unit_gradients, compute=compute) for m in self.members])


def load(path: str | Path, task: Task | Sequence[Task]) -> Fitted:
    """Read a saved fit, or an ensemble of them, back for the task it was made with.

    Args:
        path: What `save` wrote.
        task: The same model and selection. For an ensemble of fits made one by one, their tasks in order.
    """
    path = Path(path)
    if not (path / "member-0").is_dir():
        return load_one(path, task)  # type: ignore[arg-type]
    manifest = artifact.read_manifest(path, _KIND)
    try:
        count, has_states = int(manifest["members"]), bool(manifest["states"])
    except (KeyError, TypeError, ValueError) as error:
        raise MismatchError(f"{path} is incomplete or was edited ({error!r}). Save the ensemble again.") from None
    if has_states:
        if not isinstance(task, Task):
            raise InputError("This ensemble holds checkpoints of one model: give the one Task it was made with.")
        states = [Checkpoint(artifact.read_tensors(path / f"state-{n}.safetensors")) for n in range(count)]
        tasks = [task.at(state.load()) for state in states]
    else:
        tasks = [task] * count if isinstance(task, Task) else list(task)
    if len(tasks) != count:
        raise InputError(f"The ensemble at {path} has {count} members, got {len(tasks)} tasks: give one for each.")
    members = [load(path / f"member-{number}", member) for number, member in enumerate(tasks)]
    return Ensemble(tuple(members), tuple(states) if has_states else None)


def _blocks(member: Fitted) -> Any:
    if not isinstance(member, ProjectedFit):
        raise UnsupportedError(f"{type(member).__name__} keeps no rows, so its features have no weights.")
    return member.blocks


def _mean(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores).mean(dim=0)
