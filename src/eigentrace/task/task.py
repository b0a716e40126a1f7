"""A task: a trained model, its per-example loss and the selected parameters."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eigentrace.data.batch import doubled, to_device, to_double
from eigentrace.errors import EigentraceWarning, MismatchError, TaskError
from eigentrace.task.identity import LossFingerprint, WeightSums, fingerprint
from eigentrace.task.layout import Layout
from eigentrace.task.parameters import Coverage, Params, aliases_of, coverage_of, match_values, select_params, some
from eigentrace.task.session import lookup_outside, prepared
from eigentrace.task.training_record import Training
from eigentrace.task.user_function import is_forward_mode, user_function

ModelFunction = Callable[[nn.Module, Any], Any]
Values = Mapping[str, Tensor]


class _Caller(nn.Module):
    """A module that lets `functional_call` replace parameters in any function of the model, not only `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: ModelFunction, batch: Any) -> Any:
        return function(self.model, batch)


class Task:
    """A trained model, its per-example loss and the parameters to compute influence with.

    Args:
        model: The trained model. It is not changed.
        loss: `loss(model, batch) -> Tensor (B,)`, the training loss of each example, without any regulariser.
        params: Which parameters are selected; see `eigentrace.task.parameters.select_params`.
        l2: λ of the penalty (λ/2)·‖θ‖² used in training, or `{glob: λ}`. It is added to the curvature only.
        outputs: `outputs(model, batch)`, the model's outputs. With `output_loss` it replaces `loss` and makes
            Gauss-Newton curvature available.
        output_loss: `output_loss(outputs, batch) -> Tensor (B,)`, convex in the outputs.
        measurement: `measurement(model, batch) -> Tensor (B,)`, a query's scalar that is explained; the loss if None.
        labels: `labels(batch) -> Tensor (B,)`, the given class of each example, to be stored in runs. The outputs must
            then be one number per class.
        training: How the model was trained, from which solves take their damping.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: ModelFunction | None = None,
        params: Params = "trainable",
        l2: float | Mapping[str, float] = 0.0,
        *,
        outputs: ModelFunction | None = None,
        output_loss: Callable[[Any, Any], Tensor] | None = None,
        measurement: ModelFunction | None = None,
        labels: Callable[[Any], Tensor] | None = None,
        training: Training | None = None,
    ) -> None:
        _check_functions(model, loss, outputs, output_loss, measurement)
        if labels is not None and outputs is None:
            raise TaskError("`labels` requires `outputs` with one number per class: pass both, or neither.")
        # A compiled model keeps the original under this name; torch.func needs the original.
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self._outputs, self._output_loss, self._measurement = outputs, output_loss, measurement
        self._labels = labels
        if training is not None and not isinstance(training, Training):
            raise TaskError(f"training must be an eigentrace.Training or None, got {type(training).__name__}.")
        self.training = training
        self._loss: ModelFunction = loss or (lambda m, batch: output_loss(outputs(m, batch), batch))  # type: ignore[misc]
        selected = select_params(self.model, params)
        self.params: dict[str, Tensor] = {name: p.detach() for name, p in selected.items()}
        self.layout = Layout.of(self.params)
        self._coverage = coverage_of(self.model, self.params)
        self._without_rule: dict[str, str] = {}  # shared by all copies of this task
        self.l2 = match_values({n: a for _, a in aliases_of(self.model) if (n := a[0]) in self.params}, l2, "l2")
        self._fixed: dict[str, Tensor] = {}
        self._double = self._bf16 = False
        self._weight_sums: WeightSums | None = None
        self._loss_fingerprint: LossFingerprint | None = None
        self._is_own = True  # whether params are the model's own tensors

    def __repr__(self) -> str:
        known = [words for words, found in (("outputs", self.has_outputs), ("labels", self.has_labels)) if found]
        known += ["a measurement"] if self.has_measurement else []
        penalties = sorted({float(value) for value in self.l2.values()})
        l2 = "" if not any(penalties) else f", l2={' or '.join(f'{value:g}' for value in penalties[:3])}"
        size = f"{self._coverage.selected:,} of {self._coverage.total:,} parameters"
        return f"<Task: {', '.join([type(self.model).__name__, size, 'loss', *known])}{l2}, on {self.layout.device}>"

    @property
    def coverage(self) -> Coverage:
        """Share of the model that is selected, and which parameters need a slower engine, with the reason."""
        return replace(self._coverage, without_rule=dict(self._without_rule))

    def note_engines(self, without_rule: Mapping[str, str]) -> None:
        """Record which parameters have no layerwise rule, with the reason."""
        self._without_rule.update(without_rule)

    @property
    def is_bf16(self) -> bool:
        """Whether the model runs under bfloat16 autocast."""
        return self._bf16

    @property
    def has_outputs(self) -> bool:
        """Whether Gauss-Newton curvature is available."""
        return self._outputs is not None

    @property
    def is_double_copy(self) -> bool:
        """Whether this is the result of `double()` on a task in a smaller type."""
        return self._double

    @property
    def vector(self) -> Tensor:  # (P,)
        """The selected parameters as one flat vector."""
        return self.layout.flatten(self.params)

    def own_losses(self, batch: Any) -> Tensor:  # (B,)
        """Return the per-example losses of the model as it is, without replacing its parameters."""
        with user_function():
            return _per_example(self._loss(self.model, batch), "loss")

    @property
    def is_own(self) -> bool:
        """Whether the values of the parameters are the model's own tensors."""
        return self._is_own

    @contextmanager
    def session(self) -> Iterator[None]:
        """Run the model in eval mode with differentiable kernels; see `prepared`.

        Raises:
            MismatchError: If the model has changed since this task was made or pinned.
            TaskError: If a parameter or buffer was written to inside.
        """
        self.check_unchanged()
        pinned = self._weight_sums if self._is_own else None
        before = pinned or WeightSums.of_tensors(self.tensors())
        with prepared(self.model):
            yield
        changed = before.changed(self.tensors())
        if changed:
            raise TaskError(
                f"The model changed {some(changed)} while it was evaluated: expected a forward that leaves parameters "
                "and buffers as they are. Write to a copy (.detach().clone()), and reload the model."
            )

    def check_unchanged(self) -> None:
        """Raise MismatchError if the model has changed since this task was made or pinned."""
        if self._is_own:
            own = dict(self.model.named_parameters())
            gone = [n for n, p in self.params.items() if n not in own or own[n].data_ptr() != p.data_ptr()]
            if gone:
                raise MismatchError(
                    f"The model was moved, or its parameters were replaced, after this task was made ({len(gone)} of "
                    f"{len(self.params)}, first: {gone[0]!r}). Create a new task for the current model."
                )
        if self._weight_sums is not None:
            self._weight_sums.check(self.model)

    def pinned(self, loss_fingerprint: LossFingerprint | None = None) -> "Task":
        """Return this task pinned to the current weights: a later session raises an error if they have changed.

        Args:
            loss_fingerprint: Losses of examples of the fit that pins the task.
        """
        other = copy.copy(self)
        other._weight_sums, other._loss_fingerprint = WeightSums.of(self.model), loss_fingerprint
        return other

    @property
    def loss_fingerprint(self) -> LossFingerprint | None:
        """Losses of examples of the fit that pinned this task, if any."""
        return self._loss_fingerprint

    def losses(self, values: Values, batch: Any) -> Tensor:  # (B,)
        """Return the per-example losses at the given values of the selected parameters."""
        return _per_example(self._call(self._loss, values, batch), "loss")

    def measurements(self, values: Values, batch: Any) -> Tensor:  # (B,)
        """Return the per-example measurements at the given values of the selected parameters."""
        if self._measurement is None:
            return self.losses(values, batch)
        return _per_example(self._call(self._measurement, values, batch), "measurement")

    def outputs(self, values: Values, batch: Any) -> Any:
        """Return the model's outputs at the given values of the selected parameters."""
        if self._outputs is None:
            raise TaskError(
                "This task has only `loss`, so Gauss-Newton curvature is not defined. Pass `outputs` and "
                "`output_loss` instead, or use curvature='hessian'."
            )
        return self._call(self._outputs, values, batch)

    def losses_and_outputs(self, values: Values, batch: Any) -> tuple[Tensor, Any]:  # (B,), outputs
        """Return the per-example losses, and the detached outputs from which they were computed."""
        kept: list[Any] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            outputs = self._outputs(model, batch)  # type: ignore[misc]
            # A copy, because the loss may change its input in place.
            kept.append(outputs.detach().clone() if isinstance(outputs, Tensor) else outputs)
            return self._output_loss(outputs, batch)  # type: ignore[misc]

        return _per_example(self._call(loss, values, batch), "loss"), kept[0]

    @property
    def has_measurement(self) -> bool:
        """Whether the measurement of queries is other than the loss."""
        return self._measurement is not None

    @property
    def has_labels(self) -> bool:
        """Whether examples have a given and a predicted class."""
        return self._labels is not None

    def labels(self, batch: Any) -> Tensor:  # (B,)
        """Return the given class of each example."""
        if self._labels is None:
            raise TaskError("This task has no classes: pass `labels` to Task, or use eigentrace.classification.")
        found = self._labels(batch)
        if not isinstance(found, Tensor) or found.ndim != 1 or found.is_floating_point() or found.is_complex():
            shape = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TaskError(
                f"`labels` must return the class of each example, integers of shape (B,), got {shape}. Leave `labels` "
                "out if examples have several classes or none, and pass such columns to score(columns=...)."
            )
        return found

    def output_losses(self, outputs: Any, batch: Any) -> Tensor:  # (B,)
        """Return the per-example losses of the given outputs."""
        with user_function():
            return _per_example(self._output_loss(outputs, batch), "output_loss")  # type: ignore[misc]

    def place(self, batch: Any) -> Any:
        """Move a batch to the model's device, and convert it to the task's dtype."""
        batch = to_device(batch, self.layout.device)
        return to_double(batch) if self._double else batch

    def canonical(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Check that a state dict fits the model, and return its tensors by the model's own names, tied ones once."""
        current, names = self.tensors(), self.model.state_dict().keys()
        state = dict(_unwrapped(state, current.keys() | names))
        for _, (first, *others) in aliases_of(self.model):
            # Files that store a tied tensor once may do so under any of its names.
            alias = next((name for name in others if name in state), None)
            if first not in state and alias is not None:
                state[first] = state[alias]
        _check_state(state, {name: tensor for name, tensor in current.items() if name in names})
        unknown = sorted(state.keys() - current.keys() - names)
        if unknown:
            warnings.warn(
                f"The checkpoint has {len(unknown)} tensors that are not in the model (first: {unknown[0]!r}); they "
                "are ignored. Check that it belongs to this model and not to a larger one.",
                EigentraceWarning,
                stacklevel=3,
            )
        return {name: state[name] for name in current if name in state}

    def at(self, state: Mapping[str, Tensor]) -> "Task":
        """Return this task at another checkpoint (a full state dict) of the same model."""
        current = self.tensors()
        moved = {k: v.detach().to(current[k].device, current[k].dtype) for k, v in self.canonical(state).items()}
        other = copy.copy(self)
        other.params = {name: moved[name] for name in self.params}
        other._fixed = {name: value for name, value in moved.items() if name not in self.params}
        other._is_own, other._loss_fingerprint = False, self._loss_fingerprint and self._loss_fingerprint.elsewhere()
        return other

    def double(self) -> "Task":
        """Return this task in float64, with copies of all tensors; the model's own tensors are not changed."""
        if self._double or all(dtype == torch.float64 for dtype in self.layout.dtypes):
            return self
        other = copy.copy(self)
        fixed = {name: value.detach() for name, value in self.tensors().items() if name not in self.params}
        other.params = {name: value.double() for name, value in self.params.items()}
        other._fixed = {name: doubled(value) for name, value in fixed.items()}
        other.layout = Layout.of(other.params)
        other._double = True
        other._weight_sums, other._is_own = None, False  # it has its own copies of all tensors
        return other

    def at_own_values(self) -> "Task":
        """Return this task at the model's own tensors, if it is a copy with other values or in another type."""
        other, own = copy.copy(self), dict(self.model.named_parameters())
        other.params = {name: own[name].detach() for name in self.params}
        other._fixed = {}
        other.layout = Layout.of(other.params)
        other._double, other._is_own = False, True
        return other

    def detached(self) -> dict[str, Tensor]:
        """Return all parameters of this task, with those that are not selected detached."""
        own = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return own | self._fixed | self.params

    def fingerprint(self) -> str:
        """Hash all tensors of this task, and which of them are selected."""
        return fingerprint(self.tensors(), self.params)

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of this task, selected or not."""
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return own | self._fixed | self.params

    def narrowed(self, names: Sequence[str]) -> "Task":
        """Return this task with fewer selected parameters."""
        other = copy.copy(self)
        other.params = {name: self.params[name] for name in names}
        other._fixed = self._fixed | {name: value for name, value in self.params.items() if name not in names}
        other.layout = Layout.of(other.params)
        other.l2 = {name: self.l2[name] for name in names}
        other._coverage = coverage_of(self.model, other.params)
        return other

    def with_values(self, values: Values) -> "Task":
        """Return this task at other values of its parameters, selected or not."""
        other = copy.copy(self)
        other.params = {name: values[name] for name in self.params}
        other._fixed = self._fixed | {name: value for name, value in values.items() if name not in self.params}
        other._is_own, other._loss_fingerprint = False, self._loss_fingerprint and self._loss_fingerprint.elsewhere()
        return other

    def in_bf16(self) -> "Task":
        """Return this task with the model evaluated under bfloat16 autocast."""
        other = copy.copy(self)
        other._bf16 = True
        return other

    def _call(self, function: ModelFunction, values: Values, batch: Any) -> Any:
        given = self._fixed | dict(values)
        if is_forward_mode() and not torch.is_grad_enabled():
            # The function runs with gradients enabled: other parameters would record a graph that nobody needs.
            given = self.detached() | given
        swapped = {f"model.{name}": value for name, value in given.items()}
        casting = torch.autocast(self.layout.device.type, torch.bfloat16, cache_enabled=False) if self._bf16 else None
        try:
            # Around the model only, as in training: backward passes use the types of the forward pass.
            with casting or nullcontext(), user_function():
                return functional_call(_Caller(self.model), swapped, (function, batch))
        except IndexError as error:
            outside = lookup_outside(self.model, error)
            if outside is None:
                raise
            raise outside from error


def _per_example(losses: Any, what: str) -> Tensor:
    if not isinstance(losses, Tensor):
        raise TaskError(f"The {what} must return a tensor with one number per example, got {type(losses).__name__}.")
    if losses.ndim != 1:
        hint = " (use reduction='none')" if losses.ndim == 0 else ""
        raise TaskError(
            f"The {what} must return one number per example, shape (B,), but returned shape {tuple(losses.shape)}. "
            f"Do not average or sum over examples{hint}."
        )
    if not losses.is_floating_point():
        raise TaskError(f"The {what} must return floating-point numbers, got {losses.dtype}.")
    return losses


def _check_functions(model: Any, loss: Any, outputs: Any, output_loss: Any, measurement: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TaskError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TaskError("A TorchScript model cannot be differentiated by torch.func: pass the original nn.Module.")
    functions = {"loss": loss, "outputs": outputs, "output_loss": output_loss, "measurement": measurement}
    passed = [name for name in ("loss", "outputs", "output_loss") if functions[name] is not None]
    if passed not in (["loss"], ["outputs", "output_loss"]):
        raise TaskError(f"Pass either `loss`, or both `outputs` and `output_loss`, got {passed}.")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TaskError(f"{name} must be a function, got {type(function).__name__}.")


def _unwrapped(state: Values, names: Set[str]) -> Values:
    """Remove the prefix that a wrapper (torch.compile, DataParallel, Lightning) added to all names, if any."""
    if names & state.keys():
        return state
    endings = {key[: -len(name)] for name in names for key in state if key.endswith(f".{name}")}
    best = max(endings, key=lambda prefix: sum(prefix + name in state for name in names), default="")
    return {key.removeprefix(best): value for key, value in state.items() if key.startswith(best)}


def _check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(state))
    if missing:
        raise MismatchError(
            f"The checkpoint lacks {len(missing)} of the model's {len(expected)} tensors (first: {missing[0]!r}); "
            f"it has {len(state)} tensors. It seems to belong to another model."
        )
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise MismatchError(
                f"Checkpoint tensor {name!r} has shape {tuple(state[name].shape)}, the model's has "
                f"{tuple(tensor.shape)}. It seems to belong to another model."
            )


def penalty_of(task: Task) -> Tensor:  # (P,)
    """Return λ of the ℓ2 penalty of each element of the flat vector."""
    layout = task.layout
    found = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
    for name in layout.names:
        found[layout.span(name)] = task.l2[name]
    return found
