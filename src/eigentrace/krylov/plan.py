"""Compute memory and disk space of a Krylov iteration before it begins, and choose a basis that fits."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eigentrace.disk.room import check_room
from eigentrace.errors import EigentraceWarning, MemoryLimitError
from eigentrace.krylov.resume import size_on_disk
from eigentrace.krylov.vectors import Basis
from eigentrace.numeric.memory import as_text, bytes_of, free_memory

# Vectors in the working type that a product and the orthogonalisation need besides the basis: measured were 6 for
# Gauss-Newton and 8 for the Hessian.
_WORKING = 8
# Share of the free memory that "auto" fills: activations need the rest, and other programs.
_FILLED = 0.9
# A restart leaves room for this many new vectors, and for at least this share of the kept ones: with less, most of the
# work would be restarts.
_LEAST_NEW, _LEAST_SHARE = 3, 0.2


@dataclass(frozen=True)
class IterationPlan:
    """The size and storage settings of a planned iteration."""

    size: int
    """P, the length of a vector."""
    dtype: torch.dtype
    """The type in which vectors are multiplied."""
    device: torch.device
    steps: int
    keep: int
    """K, the number of eigenvectors made from the basis."""
    basis: Basis
    can_restart: bool = True
    """Whether vectors may be fewer than steps: not if the matrix changes between steps."""

    @property
    def num_vectors(self) -> int:
        """The number of stored vectors, with the one to be multiplied next."""
        steps = min(self.steps, self.size)
        return min(self.basis.max_vectors or steps, steps) + 1

    @property
    def home(self) -> torch.device:
        """Where the vectors are stored."""
        return self.basis.home(self.device)

    @property
    def memory(self) -> int:
        """The bytes that the iteration takes where its vectors are stored."""
        return self.num_vectors * self._vector + self._besides

    @property
    def disk(self) -> int:
        """The bytes on disk of a resumable iteration: before the old file is removed, a restart has written a new."""
        restarted = self.basis.carried + 1 if self.num_vectors <= min(self.steps, self.size) else 0
        return (self.num_vectors + restarted) * self._vector

    @property
    def saved(self) -> int:
        """The bytes of the eigenvectors, in memory or in a saved fit."""
        return min(self.keep, self.size) * self._vector

    @property
    def _vector(self) -> int:
        return self.size * self.basis.type_of(self.dtype).itemsize

    @property
    def _besides(self) -> int:
        """Bytes besides the basis: temporary vectors first, in the end eigenvectors, copied to free the basis."""
        working = _WORKING * self.size * self.dtype.itemsize if self.home == self.device else 0
        # A GPU that has no memory for the copy keeps the basis instead.
        return max(working, self.saved if self.home.type == "cpu" else 0)

    def room(self, share: float = _FILLED) -> int:
        """Return the bytes that the iteration may take: as the basis says, or this share of the free memory."""
        limit = share if self.basis.memory is None else self.basis.memory
        return bytes_of(limit, lambda: free_memory(self.home))

    def fits(self, share: float = _FILLED) -> bool:
        """Return whether the iteration fits in memory."""
        return self.memory <= self.room(share)

    def __str__(self) -> str:
        kind = str(self.basis.type_of(self.dtype)).removeprefix("torch.")
        return (
            f"{self.num_vectors:,} vectors of {self.size:,} {kind} numbers and {min(self.keep, self.size):,} "
            f"eigenvectors of them take {as_text(self.memory)}"
        )


def fitted_basis(plan: IterationPlan, *, is_begun: bool = False) -> Basis:
    """Return the basis of a plan without "auto" settings, so that it fits in memory; warn if it is not the default.

    Args:
        plan: The plan.
        is_begun: Whether the iteration is resumed, so that its basis cannot be changed any more.

    Raises:
        MemoryLimitError: No basis that the settings allow fits.
    """
    wanted, *others = _candidates(plan)
    if is_begun or not (others or _may_restart(plan)):
        # Nothing is left to choose, and whoever chose it may fill the memory.
        fitting = wanted if wanted.fits(share=1.0) else None
    else:
        fitting = _largest(plan)
    if fitting is None:
        remedy = "The fit was begun with this basis: free memory, or begin it again" if is_begun else _remedy(plan)
        raise MemoryLimitError(f"The basis of the fit does not fit in memory: {_shortage(wanted)}. {remedy}.")
    if fitting != wanted:
        warnings.warn(
            f"The default basis of the fit does not fit in memory: {_shortage(wanted)}. Using {_told(fitting)}, which "
            f"takes {as_text(fitting.memory)}: {_effect(wanted, fitting)}. Pass this basis to choose it without a "
            "warning, or lower keep or steps, or select fewer parameters (params= of the task).",
            EigentraceWarning,
            stacklevel=4,
        )
    return replace(fitting.basis, memory=None)


def check_disk(plan: IterationPlan, path: Path) -> None:
    """Raise StorageError unless the disk of a new or resumed iteration has room for the rest of it and for its fit."""
    missing = max(0, plan.disk - size_on_disk(path)) + plan.saved
    what = (
        f"the vectors of the iteration ({as_text(plan.disk)}, less what is there) and the eigenvectors of the saved "
        f"fit ({as_text(plan.saved)})"
    )
    check_room(path, missing, what, "Or lower steps or keep, or set Basis(dtype='bf16') or Basis(max_vectors=).")


def _largest(plan: IterationPlan) -> IterationPlan | None:
    """Return the plan with the best basis that fits: as many vectors as steps, else as many as fit; None if too few."""
    whole = next((one for one in _candidates(plan) if one.fits()), None)
    if whole is not None or not _may_restart(plan):
        return whole
    fewer = [one for one in map(_with_restarts, _candidates(plan)) if one is not None]
    return max(fewer, key=lambda one: one.num_vectors, default=None)


def _may_restart(plan: IterationPlan) -> bool:
    return plan.can_restart and plan.basis.max_vectors is None


def _candidates(plan: IterationPlan) -> list[IterationPlan]:
    """Return the plan with the default basis, then with smaller ones, as far as the settings leave them open."""
    basis = plan.basis
    # float64 models are for results with all digits: their basis keeps its type.
    types = ("fp32", "bf16") if plan.dtype == torch.float32 else ("fp32",)
    dtypes = types if basis.dtype == "auto" else (basis.dtype,)
    places = ("device", "host") if plan.device.type == "cuda" else ("device",)
    places = places if basis.place == "auto" else (basis.place,)
    return [
        replace(plan, basis=replace(basis, dtype=dtype, place=place))  # type: ignore[arg-type]
        for place in places
        for dtype in dtypes
    ]


def _with_restarts(plan: IterationPlan) -> IterationPlan | None:
    count = (plan.room() - plan._besides) // plan._vector - 1
    kept = min(plan.keep, plan.size)
    if count < kept + max(_LEAST_NEW, round(_LEAST_SHARE * kept)):
        return None
    basis = replace(plan.basis, max_vectors=count)
    return replace(plan, basis=basis if basis.carried >= kept else replace(basis, restart_keep=kept))


def _shortage(plan: IterationPlan) -> str:
    if plan.basis.memory is not None:
        return f"{plan}, with Basis(memory={plan.basis.memory!r})"
    return f"{plan}, and {as_text(free_memory(plan.home))} are free ({plan.home})"


def _remedy(plan: IterationPlan) -> str:
    """Name settings that fit: another basis if there is one, else fewer eigenpairs or steps."""
    free = replace(plan.basis, dtype="auto", place="auto", max_vectors=None, restart_keep=None)
    for other in _smaller(replace(plan, basis=free)):
        if (found := _largest(other)) is not None:
            fewer = {name: getattr(other, name) for name in ("steps", "keep")}
            changes = [f"{name}={count}" for name, count in fewer.items() if count != getattr(plan, name)]
            # "auto" finds the basis by itself.
            changes += [] if plan.basis == free else [f"basis={_told(found)}"]
            return f"This fits: {', '.join(changes)}. Or select fewer parameters (params= of the task)"
    return "Not even one eigenpair fits: select fewer parameters (params= of the task)"


def _smaller(plan: IterationPlan) -> Iterator[IterationPlan]:
    """Yield the plan, then plans with fewer and fewer eigenpairs, or with fewer steps if it cannot restart."""
    yield plan
    while (plan.keep if plan.can_restart else plan.steps) > 1:
        steps = plan.steps if plan.can_restart else plan.steps * 9 // 10
        plan = replace(plan, steps=steps, keep=plan.keep * 9 // 10 or 1 if plan.can_restart else min(plan.keep, steps))
        yield plan


def _effect(wanted: IterationPlan, fitting: IterationPlan) -> str:
    """Describe the effect of a basis that is not the default one."""
    effects = []
    if fitting.basis.dtype != wanted.basis.dtype:
        effects.append("eigenvalues get errors of about 1e-4")
    if fitting.home != wanted.home:
        effects.append("steps are slower")
    if fitting.num_vectors != wanted.num_vectors:
        effects.append("restarts slow the convergence down")
    return ", ".join(effects)


def _told(plan: IterationPlan) -> str:
    """Write the basis of a plan as Python code, without what does not matter."""
    left_out = ("name", "place") if plan.device.type == "cpu" else ("name",)
    values = {name: value for name, value in plan.basis.record().items() if name not in left_out}
    return f"Basis({', '.join(f'{name}={value!r}' for name, value in values.items() if value is not None)})"
