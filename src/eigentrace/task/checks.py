"""Check a task before any expensive work, and name the likely cause of a wrong number."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data import NOT_SINGLE, UNBATCHED, Batch, Data
from eigentrace.data.batch import describe_batch, kept_whole, looks_single, select, tensors_of
from eigentrace.errors import (
    DataError,
    DeterminismError,
    EigentraceError,
    MemoryLimitError,
    MismatchError,
    NumericalError,
    PrecisionWarning,
    TaskError,
    UnsupportedError,
)
from eigentrace.task.derivatives import gradient
from eigentrace.task.identity import LossFingerprint, another_loss
from eigentrace.task.task import Task

# Relative differences above which two evaluations of the same thing count as different. Rounding in float64, in
# float32 with the atomics of a GPU, and in bfloat16 stays well below; dropout or a shuffled loader is of order one.
SAME_TOL = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2}


_NOT_ALONE = (
    "so losses are not per example. Look for a division by the batch's size or token count, batch statistics, or other "
    "examples. A list is read as batches: give a list of single examples as Data(examples)."
)


# Examples that the loss is tried on.
_LOOKED_AT = 8


def check_task(task: Task, data: Data) -> LossFingerprint:
    """Check that the loss is per example, finite, repeatable, and that evaluating it leaves the model alone.

    Returns:
        What the first examples are made of, and the losses they gave.
    """
    first, again = data.first(_LOOKED_AT, digests=True), data.first(_LOOKED_AT)
    if not _same_batch(first, again):
        raise DeterminismError(
            "Reading the first batch twice gave different numbers: the dataset augments or shuffles at random. Give "
            "the examples as the model should be asked about them, without random transforms."
        )
    batch = task.place(first.values)
    try:
        losses = _losses_leaving_model_alone(task, batch)
        check_losses(losses, first.rows, task=task, batch=batch)
        _check_repeatable(task, batch, losses)
        _check_independent(task, batch, losses)
        _check_gradient(task, batch, losses)
    except Exception as error:
        name_loader(error, data, first.values)
        raise
    if any(dtype == torch.bfloat16 for dtype in task.layout.dtypes):
        warnings.warn(
            "Some selected parameters are stored in bfloat16, so gradients carry about two digits. Load the model in "
            "float32 and pass precision='bf16' to compute fast with full-precision parameters.",
            PrecisionWarning,
            stacklevel=4,
        )
    return LossFingerprint(describe_batch(first.values), losses.double().cpu(), first.digests)


def note_batch(error: Exception, task: Task, batch: Any) -> None:
    """Add to an error of the caller's own functions what the batch is that they met, and what those of the fit were."""
    is_ours = isinstance(error, EigentraceError) and not isinstance(error, UnsupportedError)
    if is_ours or isinstance(error, torch.OutOfMemoryError):
        return
    fitted = (
        ""
        if task.loss_fingerprint is None
        else f", and the fit was made on batches such as {task.loss_fingerprint.form}"
    )
    error.add_note(
        f"This happened on the batch {describe_batch(batch)}{fitted}. Training examples and queries go through the "
        "same loss: give both in the form it takes."
    )


def name_loader(error: Exception, data: Data, batch: Any) -> None:
    """Name a loader without a batch size where the loss fails: single examples that it gives are read as batches."""
    if not data.is_unbatched or isinstance(error, MemoryLimitError | NumericalError | torch.OutOfMemoryError):
        return
    if looks_single(batch):
        raise DataError(
            f"{UNBATCHED}, and {describe_batch(batch)} looks like a single example: {NOT_SINGLE} If it is a batch, the "
            f"loss fails on it: {error}"
        ) from error
    error.add_note(f"{UNBATCHED}. If {describe_batch(batch)} is a single example, {NOT_SINGLE}")


def check_loss_fingerprint(task: Task, data: Data) -> None:
    """Stop if the task gives an example of the fit it was loaded with another loss than it had then.

    There is no data where a fit is loaded, so the first examples of whatever it is asked about are looked at: usually
    the training data. Where they are others nothing is known, and the next question is looked at again.
    """
    known = task.loss_fingerprint
    if known is None or known.is_checked or known.digests is None:
        return
    # A loader with batches of its own draws from the caller's global random state.
    with torch.random.fork_rng(devices=[]):
        batch = data.first(_LOOKED_AT, digests=True)
    if batch.digests is None or (held := known.held(batch.digests)).isnan().all():
        return
    with task.session():
        here = task.losses(task.params, task.place(batch.values)).double().cpu()
    check_losses(here, batch.rows)
    at = another_loss(held, here)
    if at is not None:
        raise MismatchError(
            f"The task has another loss than the one this fit was made with: that of row {batch.rows[at]} was "
            f"{held[at]:.4g} then and is {here[at]:.4g} by the task. Load the fit with the task it was made with."
        )
    known.is_checked = True


def check_losses(
    losses: Tensor, rows: np.ndarray, what: str = "loss", *, task: Task | None = None, batch: Any = None
) -> None:
    """Check that a loss, or what else is differentiated, gave one finite number for each of these rows.

    With the task and the placed batch, a label that is no class is named. It runs inside the caller's session.
    """
    if len(losses) != len(rows):
        raise TaskError(
            f"The {what} returned {len(losses)} numbers for a batch of {len(rows)} examples. It must return one per "
            "example: sum over tokens or pixels inside an example, never over examples."
        )
    finite = losses.isfinite().cpu().numpy()
    if not finite.all():
        bad = rows[~finite]
        label = None if task is None else _wrong_label(task, batch, int(finite.argmin()))
        raise NumericalError(
            f"The {what} is not finite for {len(bad)} examples of a batch (first: row {bad[0]}). "
            + (
                label
                or "Check the inputs and labels of that row, and that the model was loaded with its trained weights."
            )
        )


def _wrong_label(task: Task, batch: Any, at: int) -> str | None:
    """Say which label an example of the batch has, if it is none of the model's classes."""
    outputs = task.outputs(task.params, batch) if task.has_labels else None
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return None
    label, classes = int(task.labels(batch)[at]), outputs.shape[1]
    if 0 <= label < classes:
        return None
    return (
        f"Its label is {label}, and the model has {classes} classes, numbered 0 to {classes - 1}. Mend the labels, or "
        "leave such rows out."
    )


def _same_batch(a: Batch, b: Batch) -> bool:
    ours, theirs = list(tensors_of(a.values)), list(tensors_of(b.values))
    return len(ours) == len(theirs) and all(_equal(x, y) for x, y in zip(ours, theirs, strict=True))


def precision_of(task: Task) -> str:
    """Name the precision of the selected parameters: "bf16" if any is stored so, else "fp64" or "fp32"."""
    if torch.bfloat16 in task.layout.dtypes:
        return "bf16"
    return "fp64" if task.layout.dtype == torch.float64 else "fp32"


def _losses_leaving_model_alone(task: Task, batch: Any) -> Tensor:
    own = dict(task.model.named_parameters()) | dict(task.model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    values = {name: value.clone() for name, value in task.params.items()}
    try:
        losses = task.losses(values, batch).detach()
    except Exception as error:
        if not isinstance(error, EigentraceError):  # the caller's own, which keeps its type and gets a note
            error.add_note(
                f"The loss failed when eigentrace first called it, in eval mode and under torch.no_grad(), with the "
                f"batch {describe_batch(batch)}. Call it yourself as loss(model, batch) on such a batch. One that "
                "differentiates by itself (a penalty on gradients, forces, a differential equation) must do so inside "
                "torch.enable_grad()."
            )
        raise
    finally:
        changed = [name for name, tensor in own.items() if not _equal(tensor, before[name])]
        for name in changed:
            own[name].detach().copy_(before[name])
    # What was bound anew rather than written to is put back at the end of the session, with all attributes.
    now, expected = dict(task.model.named_buffers()) | values, before | task.params
    changed += [name for name, tensor in now.items() if name in before and not _equal(tensor, expected[name])]
    if changed:
        raise TaskError(
            f"Evaluating the loss changes {changed[0]!r}, even in eval mode. The change was undone. Compute without "
            "writing to parameters or buffers inside forward."
        )
    return losses


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-6))


def _check_repeatable(task: Task, batch: Any, losses: Tensor) -> None:
    gap = _relative(losses, task.losses(task.params, batch))
    if gap > SAME_TOL[precision_of(task)]:
        raise DeterminismError(
            f"Evaluating the loss of one batch twice differs by {gap:.2g} of its size, in eval mode. Something draws "
            "random numbers: dropout called as a function with training=True, random masking, or noise."
        )


def _check_independent(task: Task, batch: Any, losses: Tensor) -> None:
    if len(losses) < 2:
        return
    # The one with the largest loss: a well-fitted example has too little of it to show a difference.
    i = int(losses.abs().argmax())
    try:
        alone = task.losses(task.params, select(batch, slice(i, i + 1), len(losses)))
    except (EigentraceError, torch.OutOfMemoryError):
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        why = _why_not_alone(batch, len(losses))
        raise TaskError(f"The loss of an example that is alone in its batch fails ({error}), {why}") from error
    if len(alone) != 1:
        raise TaskError(
            f"The loss of an example that is alone in its batch has {len(alone)} numbers, "
            f"{_why_not_alone(batch, len(losses))}"
        )
    gap = _relative(losses[i], alone)
    if gap > max(SAME_TOL[precision_of(task)], 1e-3):
        raise TaskError(
            f"The loss of an example changes by {gap:.2g} of its size when it is alone in its batch, "
            f"{_why_not_alone(batch, len(losses))}"
        )


def _why_not_alone(batch: Any, size: int) -> str:
    """Name what could not be taken apart, if anything, and else the usual causes."""
    whole = kept_whole(batch, size)
    if not whole:
        return _NOT_ALONE
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    return (
        f"so either losses are not per example, or the batch was not taken apart as it should be: of its {size} "
        f"examples, each keeps the whole of {whole[0]}{more}. Give every example a place along the first dimension of "
        "the tensors, in tuples, lists or dicts; where that cannot be (graphs in one piece, lists of tensors, objects "
        "of your own), give one example at a time: Data(dataset, collate, batch_size=1), on a GPU with "
        "Compute(batch='data')."
    )


def _check_gradient(task: Task, batch: Any, losses: Tensor) -> None:
    try:
        found = gradient(task, task.params, batch)
        task.layout.flatten(found)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TaskError(
            f"The loss cannot be differentiated: {error} | If an in-place operation is named, write it out of place "
            "(inplace=False); if a sparse gradient is, use sparse=False."
        ) from error
    bad = [name for name, part in found.items() if not part.isfinite().all()]
    if bad:
        raise NumericalError(
            f"The loss is finite but its gradient is not, first in {bad[0]!r}. Look for square roots, logarithms or "
            "norms at zero."
        )
    if losses.any() and not any(part.any() for part in found.values()):
        raise TaskError(
            "The gradient of the loss in the selected parameters is exactly zero: the loss does not depend on them. "
            "Look for .detach(), .item(), torch.no_grad(), argmax or reentrant checkpointing, or select others."
        )
