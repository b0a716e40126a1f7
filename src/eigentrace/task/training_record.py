"""How a model was trained, from which the damping of a solve follows.

A training is finite. With D the optimizer's preconditioner (1 for SGD, 1/(√v̂ + ε) for Adam) and τ the sum of learning
rates, what the training left undone acts like a damping of D⁻¹/τ: see docs/tail.md.
"""

import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.errors import EigentraceWarning, InputError, MismatchError
from eigentrace.settings import check_above_zero, check_not_negative, counted, short
from eigentrace.task.layout import Layout
from eigentrace.task.rate_sums import CALLBACK, TRAINER_STATE, RateSums, recorded_in

# v̂ is at least this share of its mean in the parameter, squared root: entries that were never updated have v̂ = 0.
_LEAST_SHARE = 1e-3
# Names of parameters without weight decay in the Trainer of transformers: of today, and of earlier versions.
_WITHOUT_DECAY = (r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", "bias")
# Entries of the groups of optimizers with second moments: Adam's, and those of Adafactor in torch and transformers.
_ADAPTIVE = ("betas", "beta2_decay", "decay_rate")


@dataclass(frozen=True)
class Training:
    """The optimizer of a training, as far as it determines the damping."""

    lr_sum: float | Mapping[str, float]
    """τ, the sum of the learning rates of all steps; or one by parameter name, if they differ."""
    momentum: float = 0.0
    """Momentum of SGD (also Nesterov's), by which the sum of learning rates is divided as 1 − momentum; 0 for Adam."""
    second_moments: Mapping[str, Tensor] | None = field(default=None, repr=False)
    """v̂ of Adam by parameter name, with the correction of its bias; None for SGD."""
    eps: float = 1e-8
    """ε of Adam."""
    weight_decay: float | Mapping[str, float] = 0.0
    """The optimizer's weight decay; or one by parameter name."""
    decoupled: bool = False
    """Whether weight decay is decoupled, as in AdamW, rather than a gradient."""
    loss_scale: float = 1.0
    """c, if the loss of the task is c times the loss that was trained on: the mean number of tokens of an example, for
    sums over tokens of a training on their mean."""
    source: str = field(default="", compare=False)
    """Where the sum of learning rates comes from, in words: recorded, or interpolated; empty if it was given."""

    def __repr__(self) -> str:
        sums = sorted(set(self.lr_sum.values())) if isinstance(self.lr_sum, Mapping) else [self.lr_sum]
        parts = [
            f"lr_sum={' or '.join(f'{value:.4g}' for value in sums[:3])}" + f" ({self.source})" * bool(self.source)
        ]
        parts += [f"momentum={self.momentum:g}"] if self.momentum else []
        parts += [f"second moments of {counted(len(self.second_moments), 'parameter')}"] if self.second_moments else []
        return f"<Training: {', '.join(parts)}>"

    def __post_init__(self) -> None:
        sums = self.lr_sum.values() if isinstance(self.lr_sum, Mapping) else [self.lr_sum]
        for value in sums:
            check_above_zero(lr_sum=value)
        decays = self.weight_decay.values() if isinstance(self.weight_decay, Mapping) else [self.weight_decay]
        for value in decays:
            check_not_negative(weight_decay=value)
        check_above_zero(loss_scale=self.loss_scale)
        check_not_negative(momentum=self.momentum, eps=self.eps)
        if self.momentum >= 1:
            raise InputError(f"momentum must be below 1, got {self.momentum}.")

    def damping(self, layout: Layout, has_penalty: bool = False) -> Tensor:  # (P,)
        """Return the damping of each parameter.

        Args:
            layout: The parameters.
            has_penalty: Whether the task's own penalty stands for coupled weight decay.
        """
        found = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        for name in layout.names:
            inverse = self._inverse_preconditioner(name, layout)
            tau = float(_of(self.lr_sum, name, "lr_sum")) / (1 - self.momentum)
            decay = float(_of(self.weight_decay, name, "weight_decay"))
            coupled = 0.0 if self.decoupled or has_penalty else decay
            found[layout.span(name)] = self.loss_scale * (
                inverse * (1 / tau + (decay if self.decoupled else 0.0)) + coupled
            )
        return found

    def _inverse_preconditioner(self, name: str, layout: Layout) -> Tensor | float:  # (p,)
        if self.second_moments is None:
            return 1.0
        moments, shape = _of(self.second_moments, name, "second moments"), layout.shapes[layout.names.index(name)]
        if not isinstance(moments, Tensor) or moments.shape != shape:
            found = f"shape {tuple(moments.shape)}" if isinstance(moments, Tensor) else f"type {type(moments).__name__}"
            raise MismatchError(
                f"The second moments of {name!r} have {found}, and the parameter has shape {tuple(shape)}: pass the "
                "optimizer of this model."
            )
        if not moments.isfinite().all():
            raise InputError(
                f"The second moments of {name!r} are not finite: the training diverged, or they are damaged. Pass the "
                "optimizer of a training that ended well."
            )
        roots = moments.detach().to(layout.device, layout.dtype).clamp_min(0).sqrt().flatten()
        return roots.clamp_min(_LEAST_SHARE * float(roots.square().mean().sqrt())) + self.eps

    @classmethod
    def from_optimizer(
        cls, optimizer: torch.optim.Optimizer, model: nn.Module, lrs: Sequence[Any], *, loss_scale: float = 1.0
    ) -> "Training":
        """Read an optimizer at the end of a training.

        Args:
            optimizer: SGD, Adam, AdamW or Adafactor of torch, with its state.
            model: The model that it trained, for the names of its parameters.
            lrs: The learning rate of every step; or a list of them for each group of the optimizer, if they differ.
            loss_scale: See the class.
        """
        what = type(optimizer).__name__
        return read_training(optimizer, model, lambda groups: _sums_of(lrs, groups, what), loss_scale)

    @classmethod
    def from_checkpoint(cls, path: str | Path, model: nn.Module, *, loss_scale: float = 1.0) -> "Training":
        """Read a checkpoint folder of Hugging Face's Trainer: `optimizer.pt` and `trainer_state.json`.

        The sums of learning rates are those that `training_callback` recorded. Without it, rates are interpolated
        between the logged ones, and those of the optimizer at both ends. `source` says which. Nothing in the folder is
        run.

        Args:
            path: The folder.
            model: The model, for the names of its parameters.
            loss_scale: See the class.
        """
        folder = Path(path)
        missing = [name for name in ("optimizer.pt", TRAINER_STATE) if not (folder / name).exists()]
        if missing:
            raise InputError(
                f"{folder} is not a checkpoint of a Trainer: it has no {' and no '.join(missing)}. Pass a folder such "
                "as checkpoint-500, saved without save_only_model."
            )
        saved = _read_optimizer(folder / "optimizer.pt")
        found = _read_state(folder / TRAINER_STATE)
        remedy = (
            f"Restore {folder / TRAINER_STATE}, or remove {CALLBACK!r} from its stateful_callbacks to interpolate the "
            "logged rates."
        )
        recorded = _recorded(found, folder / TRAINER_STATE, remedy)
        try:
            groups, states = saved["param_groups"], saved["state"]
            logged = [] if recorded else _logged(found, folder)
            held = list(_named_groups(groups, states, model, folder))
            state = {
                name: states[index]
                for (group, names) in held
                for index, name in zip(group["params"], names, strict=True)
                if index in states
            }
            what = f"the optimizer in {folder}"
            if recorded:
                recorded.check_steps(states, what, remedy)
                sums, source = (
                    recorded.for_groups(groups, what, remedy),
                    f"recorded at {counted(recorded.steps, 'step')}",
                )
            else:
                bases = [_base(group) for group in groups]
                total = _sum_of_rates(logged, int(found["global_step"]), bases[0], float(groups[0]["lr"]))
                # The Trainer logs the rate of the first group; the schedule is the same for all.
                sums = [total * (base / bases[0] if bases[0] else 1.0) for base in bases]
                source = f"interpolated between {counted(len(logged), 'logged rate')}"
            return _training(held, state, sums, loss_scale, what, source=source)
        except (MismatchError, InputError):
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise MismatchError(
                f"{folder / 'optimizer.pt'} is damaged, or no state of an optimizer: {error!r}"
            ) from None


def read_training(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    sums: Callable[[Sequence[Mapping[str, Any]]], Sequence[float]],
    loss_scale: float,
    source: str = "",
) -> Training:
    """Read an optimizer at the end of a training, with a function that returns the sum of rates of each group."""
    check_optimizer(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [(group, [names.get(id(p)) for p in group["params"]]) for group in optimizer.param_groups]
    state = {names[id(p)]: one for p, one in optimizer.state.items() if id(p) in names}
    if any(None in group for _, group in held):
        raise MismatchError(
            f"The optimizer has parameters that {type(model).__name__} does not have: pass the model that it "
            "trained, with the same parameter objects."
        )
    what = type(optimizer).__name__
    return _training(held, state, sums([group for group, _ in held]), loss_scale, what, what, source)


def check_optimizer(optimizer: Any) -> None:
    """Raise InputError unless an optimizer is of a kind whose damping is known."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer must be one of torch.optim, with its state, got {type(optimizer).__name__}. For another "
            "one give the numbers: eigentrace.Training(lr_sum=..., second_moments={...})."
        )
    for group in optimizer.param_groups:
        _is_adaptive(group, type(optimizer).__name__)


def _is_adaptive(group: Mapping[str, Any], what: str) -> bool:
    """Return whether the optimizer of a group has second moments; raise InputError if it is not known."""
    is_adaptive = any(name in group for name in _ADAPTIVE)
    if not is_adaptive and "dampening" not in group:
        raise InputError(
            f"{what} is neither SGD nor Adam, AdamW or Adafactor. Give the numbers that it amounts to: "
            "eigentrace.Training(lr_sum=..., second_moments={...})."
        )
    return is_adaptive


def _read_state(path: Path) -> Any:
    try:
        return read_json(path)
    except MismatchError:
        raise
    except (ValueError, OSError) as error:
        raise MismatchError(f"{path} cannot be read: it is damaged ({error}). Restore it from a copy.") from None


def _recorded(state: Any, path: Path, remedy: str) -> RateSums | None:
    """Return the sums that `training_callback` left in the state of a Trainer, if it was used to the end."""
    try:
        found = recorded_in(state)
    except (LookupError, TypeError, AttributeError, MismatchError) as error:
        raise MismatchError(f"{path} is damaged, or not the state of a Trainer ({error!r}). {remedy}") from None
    if found is None:
        return None
    sums, is_earlier = found
    if is_earlier:
        warnings.warn(
            f"{path} has learning rates that were recorded until an earlier step: the training was resumed without "
            "training_callback. The logged rates are interpolated instead.",
            EigentraceWarning,
            stacklevel=3,
        )
        return None
    return RateSums.from_json(sums, f"{path} ({CALLBACK})", remedy)


def _logged(state: Any, folder: Path) -> list[tuple[int, float]]:
    """Return the steps whose learning rates a Trainer logged, with the rates."""
    try:
        steps, history = int(state["global_step"]), state["log_history"]
        logged = [(int(one["step"]), float(one["learning_rate"])) for one in history if "learning_rate" in one]
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise MismatchError(f"{folder} is not a checkpoint of a Trainer, or damaged ({error!r}).") from None
    if not logged or steps < 1:
        raise MismatchError(
            f"{folder / TRAINER_STATE} has no steps with learning rates: none were logged. Train with "
            "logging_steps set or with callbacks=[eigentrace.training_callback()], or pass their sum: "
            "eigentrace.Training(lr_sum=...)."
        )
    return logged


def _read_optimizer(path: Path) -> Any:
    check_regular(path)
    try:
        with warnings.catch_warnings():  # of an old or foreign pickle, which is then refused
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise MismatchError(f"{path} is no state of an optimizer without code, or damaged: {error}") from None


def _of(value: Any, name: str, what: str) -> Any:
    """Return the value of a parameter, which the model may know by a name with or without that of a wrapper."""
    if not isinstance(value, Mapping):
        return value
    if name in value:
        return value[name]
    found = {_bare(key): one for key, one in value.items()}
    if _bare(name) not in found:
        raise MismatchError(
            f"The record of the training has no {what} of {name!r}. It has those of {counted(len(value), 'parameter')} "
            f"(first: {next(iter(value), None)!r}): pass the optimizer of this model, or leave parameters that were "
            "not trained out of the task (params=...)."
        )
    return found[_bare(name)]


def _bare(name: str) -> str:
    """Return a name without those that torch.compile and DataParallel put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _sums_of(lrs: Any, groups: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    """Return the sum of the learning rates of each group, from one list for all or one for each."""
    try:
        given = list(lrs)
        by_group = any(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in given)
        lists = given if by_group else [given] * len(groups)
        sums = [math.fsum(float(rate) for rate in one) for one in lists]
    except (TypeError, ValueError):
        raise InputError(
            f"lrs must be the learning rates of all steps, or a list of them for each group, got {short(repr(lrs))}."
        ) from None
    if len(sums) != len(groups):
        raise InputError(f"lrs has {counted(len(sums), 'list')}, and {what} {counted(len(groups), 'group')}.")
    rates = dict.fromkeys((_base(group), float(group["lr"])) for group in groups)
    if len(rates) > 1 and not by_group:
        raise InputError(
            f"The groups of {what} have learning rates of their own (first and last: "
            f"{short(', '.join(f'{base:g} and {end:g}' for base, end in rates))}): pass a list of the rates of all "
            "steps for each group, lrs=[[...], [...]]."
        )
    return sums


def _base(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group that its schedule multiplies."""
    return float(group.get("initial_lr", group["lr"]))


def _training(
    held: Sequence[tuple[Mapping[str, Any], list[Any]]],
    state: Mapping[str, Mapping[str, Any]],
    sums: Sequence[float],
    loss_scale: float,
    what: str,
    kind: str = "AdamW",
    source: str = "",
) -> Training:
    """Return the record of groups of named parameters and their states."""
    lr_sum, decay, moments = {}, {}, {}
    momentum, eps = set(), set()
    decoupled = False
    for number, (group, names) in enumerate(held):
        is_adam = _is_adaptive(group, what)
        momentum.add(0.0 if is_adam else float(group.get("momentum", 0.0)))
        # Adam's group says so in recent versions of torch; the Trainer's Adam is AdamW, and Adafactor decouples too.
        decoupled |= is_adam and bool(group.get("decoupled_weight_decay", kind != "Adam"))
        if is_adam:
            found = group["eps"]
            eps.add(float(found[0] or 0.0) if isinstance(found, tuple | list) else float(found))
        # Without momentum, dampening has no effect.
        share = 1.0 if is_adam or not group.get("momentum") else 1 - float(group["dampening"])
        for name in names:
            if is_adam and not state.get(name):
                continue  # frozen, or never used: it was not trained
            lr_sum[name], decay[name] = share * sums[number], float(group.get("weight_decay", 0.0))
            if is_adam:
                moments[name] = _second_moments(state[name], group, name, what)
    if not lr_sum:
        raise MismatchError(
            f"{what} has no state: it has taken no step. Pass it at the end of the training, or load its state."
        )
    if len(momentum) > 1 or len(eps) > 1 or (moments and len(moments) < len(lr_sum)):
        raise InputError(f"The groups of {what} have different settings of momentum or ε, which is not supported.")
    return Training(
        lr_sum,
        momentum.pop(),
        moments or None,
        eps.pop() if eps else 1e-8,
        decay,
        decoupled,
        loss_scale,
        source,
    )


def _second_moments(state: Mapping[str, Any], group: Mapping[str, Any], name: str, what: str) -> Tensor:
    """Return v̂ of a parameter: Adam's with the correction of its bias, or Adafactor's from its factors."""
    step = float(state.get("step", 0))
    for key in ("max_exp_avg_sq", "exp_avg_sq"):
        if key in state and "betas" in group and step:
            return state[key].double() / (1 - float(group["betas"][1]) ** step)
    for key in ("variance", "exp_avg_sq"):
        if key in state:
            return state[key].double()
    for rows, columns in (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col")):
        if rows in state and columns in state:
            left, right = state[rows].double(), state[columns].double()
            if left.ndim == right.ndim and left.shape[-1] != 1:  # transformers leaves out the dimension of size 1
                left, right = left[..., None], right[..., None, :]
            return left * right / left.mean(dim=-2, keepdim=True).clamp_min(1e-300)
    raise MismatchError(
        f"{what} has no second moments of {name!r}. Expected the state of SGD, Adam, AdamW or Adafactor after at least "
        "one step; for another optimizer pass them: eigentrace.Training(lr_sum=..., second_moments={...})."
    )


def _named_groups(
    groups: Any, states: Any, model: nn.Module, folder: Path
) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    """Name the parameters of a saved optimizer, which numbers them: the Trainer puts those with decay first."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    orders = [[list(trained)]]
    for patterns in _WITHOUT_DECAY:
        decayed = _decayed(model, patterns)
        parts = [[n for n in trained if n in decayed], [n for n in trained if n not in decayed]]
        orders += [parts, [part for part in parts if part]]
    for order in orders:
        if [len(part) for part in order] != [len(group["params"]) for group in groups]:
            continue
        pairs = [(i, n) for g, part in zip(groups, order, strict=True) for i, n in zip(g["params"], part, strict=True)]
        shapes = ((states[i].get("exp_avg_sq"), trained[n].shape) for i, n in pairs if i in states)
        if all(held is None or held.shape == shape for held, shape in shapes):
            yield from zip(groups, order, strict=True)
            return
    raise MismatchError(
        f"The optimizer in {folder} has groups of {[len(group['params']) for group in groups]} parameters, which are "
        f"not those of {type(model).__name__} ({len(trained)} trained). Load the model of the same checkpoint, with "
        "the same parameters frozen; or use Training.from_optimizer."
    )


def _decayed(model: nn.Module, patterns: str) -> set[str]:
    """Return the names of the parameters to which the Trainer applies weight decay: no biases, no normalisations."""
    inside = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if name not in inside and not re.search(patterns, name.lower())}


def _sum_of_rates(logged: list[tuple[int, float]], steps: int, initial: float, after: float) -> float:
    """Sum the learning rates of all steps, with those between two known ones interpolated.

    Args:
        logged: Steps, and their rates.
        steps: The number of steps.
        initial: The rate that the schedule multiplies: that of the first step, unless logged rates begin by rising.
        after: The rate of the step after the last.
    """
    points = {step: rate for step, rate in logged if 0 < step <= steps} or {steps: logged[0][1]}
    first = points[min(points)]
    points.setdefault(1, 0.0 if max(points.values()) > first else max(initial, first))
    points[steps + 1] = after
    total = points[1]
    for (a, low), (b, high) in pairwise(sorted(points.items())):
        total += (b - a) * low + (high - low) * (b - a + 1) / 2
    return total - after
