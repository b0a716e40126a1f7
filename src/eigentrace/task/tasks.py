"""Ready-made tasks for classification, sequence-to-sequence and causal language models."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eigentrace.errors import TaskError
from eigentrace.task.parameters import Params
from eigentrace.task.task import ModelFunction, Task
from eigentrace.task.training_record import Training

Reduction = Literal["sum", "mean"]
_IGNORED = -100


def classification(
    model: nn.Module,
    params: Params = "trainable",
    l2: float | Mapping[str, float] = 0.0,
    *,
    measurement: ModelFunction | None = None,
    training: Training | None = None,
) -> Task:
    """Create a task for a classifier trained with cross-entropy.

    Batches are `(inputs, labels)`, where inputs may be a tensor, a tuple or a dict, or dicts with a "labels" entry.
    The model returns logits (B, classes), or a Hugging Face output that has them.
    """

    def outputs(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = _inputs_and_labels(batch)
        logits = _logits(_run(model, inputs))
        if logits.ndim != 2:
            raise TaskError(
                f"classification expects logits of shape (B, classes), got {tuple(logits.shape)}. For other outputs "
                "build an eigentrace.Task with your own loss."
            )
        if logits.shape[1] == 1:
            raise TaskError(
                "classification expects one logit per class, got a single logit per example. For a binary model with "
                "one output build an eigentrace.Task with its own loss (binary_cross_entropy_with_logits)."
            )
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != logits.shape[:1]:
            raise TaskError(
                f"classification expects integer labels of shape ({len(logits)},), got {_described(labels)}."
            )
        return logits

    def labels(batch: Any) -> Tensor:
        return _inputs_and_labels(batch)[1]

    def output_loss(logits: Tensor, batch: Any) -> Tensor:
        return _cross_entropy(logits, labels(batch))

    return Task(
        model,
        params=params,
        l2=l2,
        outputs=outputs,
        output_loss=output_loss,
        measurement=measurement,
        training=training,
        labels=labels,
    )


def seq2seq(
    model: nn.Module,
    params: Params = "trainable",
    l2: float | Mapping[str, float] = 0.0,
    *,
    reduction: Reduction = "sum",
    measurement: ModelFunction | None = None,
    training: Training | None = None,
) -> Task:
    """Create a task for a Hugging Face style encoder-decoder.

    Batches are dicts with "labels" (-100 ignored), as for the Trainer. If they have no "decoder_input_ids", these are
    the labels shifted as the model does it. An example's loss is the sum over its valid tokens, or their mean.
    """

    def outputs(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = _dict_inputs(batch, "seq2seq"), _token_labels(batch)
        if "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = _decoder_inputs(model, labels)
        return _logits(_run(model, inputs))

    return _token_task(model, params, l2, outputs, _token_labels, reduction, measurement, training)


def causal_lm(
    model: nn.Module,
    params: Params = "trainable",
    l2: float | Mapping[str, float] = 0.0,
    *,
    reduction: Reduction = "sum",
    measurement: ModelFunction | None = None,
    training: Training | None = None,
) -> Task:
    """Create a task for a Hugging Face style decoder: position t predicts label t+1.

    Batches are dicts with "labels" aligned with "input_ids" (-100 ignored), as for the Trainer. An example's
    loss is the sum over its valid tokens, or their mean.
    """

    def outputs(model: nn.Module, batch: Any) -> Tensor:
        inputs = _dict_inputs(batch, "causal_lm")
        _token_labels(batch)  # checked before the model runs, for a clear error if the batch dimension is missing
        return _logits(_run(model, inputs))[:, :-1]

    return _token_task(
        model, params, l2, outputs, lambda batch: _token_labels(batch)[:, 1:], reduction, measurement, training
    )


def _token_task(
    model: nn.Module,
    params: Params,
    l2: float | Mapping[str, float],
    outputs: ModelFunction,
    targets: Callable[[Any], Tensor],
    reduction: Reduction,
    measurement: ModelFunction | None,
    training: Training | None,
) -> Task:
    if reduction not in ("sum", "mean"):
        raise TaskError(f"reduction must be 'sum' or 'mean' over the tokens of an example, got {reduction!r}.")

    def output_loss(logits: Tensor, batch: Any) -> Tensor:
        labels = targets(batch)
        if logits.ndim != 3 or logits.shape[:2] != labels.shape:
            raise TaskError(
                f"Logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not match: expected (B, T, "
                "vocabulary) and (B, T). Pad labels to the length of the inputs with -100."
            )
        valid = labels != _IGNORED
        losses = _cross_entropy(logits, labels.where(valid, 0))
        total = losses.where(valid, 0.0).sum(dim=1)
        return total if reduction == "sum" else total / valid.sum(dim=1).clamp_min(1)

    return Task(
        model,
        params=params,
        l2=l2,
        outputs=outputs,
        output_loss=output_loss,
        measurement=measurement,
        training=training,
    )


def _decoder_inputs(model: nn.Module, labels: Tensor) -> Tensor:  # (B, T) -> (B, T)
    """Shift labels right, as the model does when it is called with labels."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return shift(labels=labels)
    # Models of transformers without this function, such as Whisper and M2M-100, shift by these two tokens in `forward`.
    config = getattr(model, "config", None)
    start, pad = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if start is None or pad is None:
        raise TaskError(
            f"{type(model).__name__} cannot create decoder inputs from labels: it has no function "
            "prepare_decoder_input_ids_from_labels, and its config lacks decoder_start_token_id or pad_token_id. Add "
            "'decoder_input_ids' to the batches (the labels shifted right)."
        )
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == _IGNORED, pad)


def _inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping):
        return _dict_inputs(batch, "classification"), batch["labels"]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)} items" if isinstance(batch, list | tuple) else ""
    raise TaskError(
        f"classification expects batches (inputs, labels) or dicts with 'labels', got {type(batch).__name__}{size}. "
        "For other batches build an eigentrace.Task with your own loss."
    )


def _dict_inputs(batch: Any, what: str) -> dict[str, Any]:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        found = f"a dict with {sorted(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise TaskError(f"{what} expects dict batches with a 'labels' entry, got {found}.")
    return {key: value for key, value in batch.items() if key != "labels"}


def _token_labels(batch: Any) -> Tensor:  # (B, T)
    labels = batch["labels"]
    _check_tokens(labels, "labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 2:
        single = isinstance(labels, Tensor) and labels.ndim == 1
        hint = " A single example needs a first dimension (1, T); pass a list of them as eigentrace.Data(examples)."
        raise TaskError(
            f"Token labels must be integers of shape (B, T), got {_described(labels)}.{hint if single else ''}"
        )
    return labels


def _check_tokens(tokens: Any, name: str) -> None:
    """Raise TaskError for lists and for batches of only empty texts: a model's own errors are less clear."""
    if isinstance(tokens, list | tuple):
        raise TaskError(
            f"The {name!r} of a batch must be integers of shape (B, T), got a {type(tokens).__name__} of "
            f"{len(tokens)}: examples that are Python lists are stacked number by number. Convert them to tensors "
            "(dataset.set_format('torch') of a Hugging Face dataset), or pass eigentrace.Data(dataset, collate=...) a "
            "collator of transformers, such as DataCollatorWithPadding."
        )
    if isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.shape[1]:
        raise TaskError(
            f"All texts of a batch are empty: its {name!r} have shape {tuple(tokens.shape)}. Leave such texts out, or "
            "pad them to at least one token, with an attention mask of 0 and labels of -100."
        )


def _note_length(error: RuntimeError, ids: Any, positions: Any) -> None:
    """Add a note about too long texts to an error; its type stays, by which missing derivatives are detected."""
    if isinstance(ids, Tensor) and ids.ndim == 2 and isinstance(positions, int) and ids.shape[1] > positions > 0:
        error.add_note(
            f"The texts of this batch have {ids.shape[1]} tokens, but the model has {positions} positions. Truncate "
            f"them: pass truncation=True, max_length={positions} to the tokenizer."
        )


def _described(labels: Any) -> str:
    return f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__


def _run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        # Caches of keys and values are state, which must not be differentiated.
        config = getattr(model, "config", None)
        extra = {"use_cache": False} if getattr(config, "use_cache", None) else {}
        ids = inputs.get("input_ids")
        _check_tokens(ids, "input_ids")
        try:
            return model(**inputs, **extra)
        except RuntimeError as error:
            _note_length(error, ids, getattr(config, "max_position_embeddings", None))
            raise
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def _logits(outputs: Any) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    if isinstance(logits, tuple) and logits and isinstance(logits[0], Tensor):
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise TaskError(
            f"The model returned {type(outputs).__name__}, in which no logits were found. Return a tensor or an object "
            "with `.logits`, or build an eigentrace.Task with your own loss."
        )
    return logits


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:  # (*b, classes), (*b) -> (*b)
    """Return one loss per label; NaN for labels that are not classes.

    NaN is reported later with its row; the kernel's own check aborts a GPU process without naming the row.
    """
    known = (labels >= 0) & (labels < logits.shape[-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, -2), labels.where(known, 0).flatten().long(), reduction="none")
    # Multiplied by NaN, not replaced by it: the derivatives must be NaN too, so that no product ignores such a row.
    return losses.view(labels.shape) * torch.where(known, 1.0, torch.nan).to(losses.dtype)
