"""Checks of a task before expensive work, with errors that name the likely cause."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.data import NOT_SINGLE, UNBATCHED, Batch, Data
from eigentrace.data.batch import describe_batch, looks_single, tensors_of
from eigentrace.errors import (
    DataError,
    DeterminismError,
    EigentraceError,
    EigentraceWarning,
    MemoryLimitError,
    MismatchError,
    NumericalError,
    PrecisionWarning,
    TaskError,
    UnsupportedError,
)
from eigentrace.numeric.seeding import generator_of
from eigentrace.settings import counted
from eigentrace.task.company import SAME_TOL, CompanyCheck, check_company, precision_of
from eigentrace.task.derivatives import backward, gradient
from eigentrace.task.identity import LossFingerprint, another_loss
from eigentrace.task.parameters import some
from eigentrace.task.task import Task

# Number of examples that the loss is tested on.
_LOOKED_AT = 8
# Relative difference by which a gradient may change if its batch is differentiated in groups, by rounding in bfloat16.
_GROUPS_TOL = 0.1
# Maximum number of examples of a batch in which losses are compared in other company.
_COMPARED = 32
# Number of examples in which shorter ones are looked for.
_PADDED = 32


def check_task(task: Task, data: Data) -> LossFingerprint:
    """Check that the loss is per example, finite and repeatable, and does not change the model.

    Returns:
        The form of the first batch, with the losses and digests of its examples.
    """
    first, again = data.first(_LOOKED_AT, digests=True), data.first(_LOOKED_AT)
    if not _same_batch(first, again):
        raise DeterminismError(
            f"The first batch, {describe_batch(first.values)}, has other numbers when it is read again: the dataset "
            "augments or shuffles at random. Pass the examples without shuffling and random transforms."
        )
    _check_modules(task)
    _warn_about_accumulation_hooks(task)
    batch = task.place(first.values)
    try:
        if not task.is_own:
            _check_original_gradient(task, first.values)
        losses = _losses_leaving_model_alone(task, batch)
        check_losses(losses, first.rows, task=task, batch=batch)
        _check_repeatable(task, batch, losses)
        _check_gradient(task, batch, losses)
        _check_company(task, data, first)
        if task.is_own:
            _check_own_gradient(task, batch)
        _warn_if_padding_matters(task, data)
    except Exception as error:
        name_loader(error, data, first.values)
        raise
    if any(dtype == torch.bfloat16 for dtype in task.layout.dtypes):
        warnings.warn(
            "Some selected parameters are stored in bfloat16, so gradients have about two digits. Load the model in "
            "float32 and pass precision='bf16' to compute fast with full-precision parameters.",
            PrecisionWarning,
            stacklevel=4,
        )
    return LossFingerprint(describe_batch(first.values), losses.double().cpu(), first.digests)


def _check_modules(task: Task) -> None:
    """Raise TaskError for a module whose gradient of an example depends on the other examples of the batch."""
    selected = {tensor.data_ptr() for tensor in task.params.values()}
    for name, module in task.model.named_modules():
        scaled = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
        if scaled and (not task.is_own or module.weight.data_ptr() in selected):
            raise TaskError(
                f"The embedding {name!r} has scale_grad_by_freq=True, which divides gradients by how often a token "
                "occurs in the batch, so that they are not per example. Set scale_grad_by_freq=False on that module, "
                "or leave its weight out (params=...)."
            )


def note_batch(error: Exception, task: Task, batch: Any) -> None:
    """Add the forms of the batch and of the fit's batches to an error in the caller's functions, as a note."""
    is_ours = isinstance(error, EigentraceError) and not isinstance(error, UnsupportedError)
    if is_ours or isinstance(error, torch.OutOfMemoryError):
        return
    fitted = (
        ""
        if task.loss_fingerprint is None
        else f", and the fit was made with batches such as {task.loss_fingerprint.form}"
    )
    error.add_note(
        f"The error occurred on the batch {describe_batch(batch)}{fitted}. Training examples and queries are passed to "
        "the same loss: pass both in the form that it expects."
    )


def name_loader(error: Exception, data: Data, batch: Any) -> None:
    """Report a loader without a batch size if the loss fails: its single examples are read as batches."""
    if not data.is_unbatched or isinstance(error, MemoryLimitError | NumericalError | torch.OutOfMemoryError):
        return
    if looks_single(batch):
        raise DataError(
            f"{UNBATCHED}, but {describe_batch(batch)} looks like a single example: {NOT_SINGLE} If it is a batch, the "
            f"loss fails on it: {error}"
        ) from error
    error.add_note(f"{UNBATCHED}. If {describe_batch(batch)} is a single example, {NOT_SINGLE}")


def check_loss_fingerprint(task: Task, data: Data) -> None:
    """Raise MismatchError if the task's losses differ from those stored in a loaded fit.

    Loading a fit takes no data, so the first examples of the first data that it scores are compared, usually the
    training data. If none of them is known to the fit, the check is repeated with the next data.
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
            f"The task's loss differs from the loss that this fit was made with: that of row {batch.rows[at]} was "
            f"{held[at]:.4g} and is now {here[at]:.4g}. Load the fit with the task that it was made with."
        )
    known.is_checked = True


def check_losses(
    losses: Tensor, rows: np.ndarray, what: str = "loss", *, task: Task | None = None, batch: Any = None
) -> None:
    """Raise an error unless a loss, or another function (`what`), returned one finite number per row.

    Given the task and the placed batch, the error reports a label that is not a class. Call it inside a session.
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
            f"The {what} is not finite for {counted(len(bad), 'example')} of a batch (first: row {bad[0]}). "
            + (
                label
                or "Check the inputs and labels of that row, and that the model was loaded with its trained weights."
            )
        )


def _wrong_label(task: Task, batch: Any, at: int) -> str | None:
    """Return a message if the label of an example is not one of the model's classes, else None."""
    outputs = task.outputs(task.params, batch) if task.has_labels else None
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return None
    label, classes = int(task.labels(batch)[at]), outputs.shape[1]
    if 0 <= label < classes:
        return None
    return (
        f"Its label is {label}, but the model has {classes} classes, numbered 0 to {classes - 1}. Fix the labels, or "
        "leave such rows out."
    )


def _same_batch(a: Batch, b: Batch) -> bool:
    ours, theirs = list(tensors_of(a.values)), list(tensors_of(b.values))
    return len(ours) == len(theirs) and all(_equal(x, y) for x, y in zip(ours, theirs, strict=True))


def _losses_leaving_model_alone(task: Task, batch: Any) -> Tensor:
    own = dict(task.model.named_parameters()) | dict(task.model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    values = {name: value.clone() for name, value in task.params.items()}
    try:
        losses = task.losses(values, batch).detach()
    except Exception as error:
        if not isinstance(error, EigentraceError):  # an error of the caller's function keeps its type and gets a note
            error.add_note(
                f"The loss failed when eigentrace first called it, in eval mode and under torch.no_grad(), with the "
                f"batch {describe_batch(batch)}. To reproduce it, call loss(model, batch) on such a batch. A loss that "
                "differentiates (a penalty on gradients, forces, a differential equation) must do so inside "
                "torch.enable_grad()."
            )
        raise
    finally:
        changed = [name for name, tensor in own.items() if not _equal(tensor, before[name])]
        for name in changed:
            own[name].detach().copy_(before[name])
    # Tensors that were replaced, not written to, are restored with all attributes at the end of the session.
    now, expected = dict(task.model.named_buffers()) | values, before | task.params
    changed += [name for name, tensor in now.items() if name in before and not _equal(tensor, expected[name])]
    if changed:
        raise TaskError(
            f"Evaluating the loss changes {changed[0]!r}, even in eval mode. The change was undone. Do not write to "
            "parameters or buffers inside forward."
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
            f"Two evaluations of the loss of one batch in eval mode differ by {gap:.2g} (relative). Something draws "
            "random numbers: dropout called as a function with training=True, random masking, or noise."
        )


def _check_company(task: Task, data: Data, first: Batch) -> None:
    """Check that losses do not depend on the other examples, in the first batch and in batches of random rows."""
    check = CompanyCheck(task, task.losses)
    check.observe(first.values, len(first))
    check_company(check, *_evaluated(task, data.first(_COMPARED)))
    if data.is_seekable and len(data) > _COMPARED:
        for _, later in zip(range(2), data.batches(data.sample(2 * _COMPARED, generator_of(0))), strict=False):
            check(*_evaluated(task, later))


def _evaluated(task: Task, batch: Batch) -> tuple[Any, np.ndarray, Tensor]:
    """Return a batch on the model's device, its rows, and its losses (B,)."""
    values = task.place(batch.values)
    losses = task.losses(task.params, values).detach()
    check_losses(losses, batch.rows, task=task, batch=values)
    return values, batch.rows, losses


def _warn_if_padding_matters(task: Task, data: Data) -> None:
    """Warn if a loss changes when its example is collated alone, without the padding to the length of others.

    Examples are drawn from all of the data, because the first ones may have one length by chance or by sorting.
    """
    if not data.can_rebatch:
        return
    rows = data.sample(_PADDED, generator_of(0)) if data.is_seekable else np.arange(min(_PADDED, len(data)))
    try:
        together = next(iter(data.rebatched(_PADDED).batches(rows)))
    except Exception:  # of the user's function: these examples have no common batch, so nothing is padded for them
        return
    shapes = [tensor.shape[1:] for tensor in tensors_of(together.values)]
    losses, compared = None, 0
    for at, row in enumerate(together.rows):
        batch = next(iter(data.batches(np.array([row]))))
        if [tensor.shape[1:] for tensor in tensors_of(batch.values)] == shapes:
            continue
        losses = _evaluated(task, together)[2] if losses is None else losses
        gap = _relative(losses[at : at + 1], _evaluated(task, batch)[2])
        if gap > max(SAME_TOL[precision_of(task)], 1e-3):
            warnings.warn(
                f"The loss of row {row} changes by {gap:.2g} (relative) when its example is collated alone, without "
                "padding to the length of others: the model depends on padding, and scores depend on the batch size. "
                "Pass an attention mask and position ids that ignore padding, pad on the side that the model was "
                "trained with, or use batches of one length (Compute(batch=1)).",
                PrecisionWarning,
                stacklevel=5,
            )
            return
        compared += 1
        if compared == _LOOKED_AT:
            return


def _check_gradient(task: Task, batch: Any, losses: Tensor) -> None:
    try:
        found = gradient(task, task.params, batch)
        task.layout.flatten(found)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TaskError(
            f"The loss cannot be differentiated: {error} | If this names an in-place operation, replace it "
            "(inplace=False); if it names a sparse gradient, use sparse=False; if it names inference tensors, stop "
            "gradients by .detach() or torch.no_grad(), not by torch.inference_mode()."
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
            "Look for .detach(), .item(), torch.no_grad(), argmax or reentrant checkpointing, or select other "
            "parameters."
        )


def _check_original_gradient(task: Task, values: Any) -> None:
    """Check the gradient of the model itself for a copy of its task, whose values a list or a closure does not have."""
    original = task.at_own_values()
    batch = original.place(values)
    try:
        original.losses(original.params, batch)
    except RuntimeError:  # data in the type of the copy only: nothing to compare with
        return
    _check_own_gradient(original, batch)


def _check_own_gradient(task: Task, batch: Any) -> None:
    """Raise TaskError if an ordinary backward pass of the model gives other gradients than replaced parameters do."""
    own = dict(task.model.named_parameters())
    params = {name: own[name] for name in task.params}
    frozen = [parameter for parameter in params.values() if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        expected, in_groups = _ordinary_gradients(task, batch, params)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    # The gradient of a parameter without effect, such as a bias before a softmax over keys, is rounding alone.
    gaps = _gaps(expected, gradient(task, task.params, batch), 1e-2)
    wrong = {name: gap for name, gap in gaps.items() if not gap <= SAME_TOL[precision_of(task)]}
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name])
        raise TaskError(
            f"The gradient of {some(list(wrong))} is not what training sees: that of {worst!r} differs by "
            f"{wrong[worst]:.0%} from an ordinary backward pass. The model uses a parameter in a way that replacing it "
            "does not reach (kept in a list, a closure or a module that is not registered), or a hook changes its "
            "gradient. Use the registered attribute (nn.ModuleList, nn.ParameterList), remove the hook, or leave the "
            "parameter out (params=...)."
        )
    gaps = _gaps(expected, in_groups, 0.1)
    mixed = {name: gap for name, gap in gaps.items() if not gap <= _GROUPS_TOL}
    if mixed:
        worst = max(mixed, key=lambda name: mixed[name])
        raise TaskError(
            f"The gradient of {some(list(mixed))} is not a sum over examples: that of {worst!r} differs by "
            f"{mixed[worst]:.0%} if a batch is differentiated in two parts, one of them halved. Remove the hook or the "
            "backward function of your own that divides by a norm or limits values, or leave the parameters out that "
            "come before it (params=...)."
        )


def _ordinary_gradients(
    task: Task, batch: Any, params: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Differentiate the summed loss of the model as it is, and again as the sum of two groups of examples.

    One of the groups is halved on the way, which makes no difference to the sum, unless a hook divides by a norm or
    limits values, so that the gradient of an example depends on the others and on the scale of the loss.
    """
    with torch.enable_grad():
        losses = task.own_losses(batch)
        whole = backward(losses.sum(), params, retain_graph=True)
        found = backward(losses[::2].sum() / 2, params, retain_graph=True)
        found = {name: 2 * part for name, part in found.items()}
        if len(losses) > 1:
            others = backward(losses[1::2].sum(), params)
            found = {name: part + others[name] for name, part in found.items()}
    return whole, found


def _gaps(a: dict[str, Tensor], b: dict[str, Tensor], share: float) -> dict[str, float]:
    """Return the difference of each gradient, relative to its norm or to a share of the largest norm of all."""
    least = share * max(float(part.norm()) for part in (*a.values(), *b.values()))
    return {
        name: float((part - b[name]).norm()) / max(float(part.norm()), float(b[name].norm()), least)
        for name, part in a.items()
        if least > 0
    }


def _warn_about_accumulation_hooks(task: Task) -> None:
    """Warn about hooks after accumulation: calling them could step an optimizer, so their effect is not known."""
    own = dict(task.model.named_parameters())
    hooked = [name for name in task.params if getattr(own[name], "_post_accumulate_grad_hooks", None)]
    if hooked:
        warnings.warn(
            f"Hooks run after the gradients of {some(hooked)} were accumulated (register_post_accumulate_grad_hook). "
            "eigentrace does not call them, because they may step an optimizer. If they change gradients, such as by a "
            "mask, scores are not for what training sees: multiply by the mask in forward, or leave these parameters "
            "out (params=...). If they do not, ignore this warning, or remove the hooks.",
            EigentraceWarning,
            stacklevel=5,
        )
