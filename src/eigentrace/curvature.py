"""Products of the training loss's curvature with vectors: Hessian or Gauss-Newton, over any number of batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from eigentrace.data import Data
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.fallback import first_supported
from eigentrace.task import Task, Values

Kind = Literal["auto", "hessian", "gauss-newton"]
Precision = Literal["fp32", "bf16"]
Product = Callable[[Task, Values, Values, Any], Values]

# A sample up to this size is collated once and held; a larger one is read again for every product.
HELD_EXAMPLES = 20_000
# Vectors that go through one batch together in `matmat`.
_VECTORS_AT_ONCE = 32


def gradient(task: Task, values: Values, batch: Any) -> Values:
    """Differentiate the summed loss of a batch by an ordinary backward pass, which every trainable model supports."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        return _backward(task.losses(leaves, batch).sum(), leaves)


def hessian_forward(task: Task, values: Values, tangents: Values, batch: Any) -> Values:
    """Multiply the summed Hessian of a batch: forward mode over reverse mode.

    `jvp(grad(f))`, never `jvp(jacrev(f))`: the latter is silently wrong for LayerNorm weights.
    """

    def total(p: Values) -> Tensor:
        return task.losses(p, batch).sum()

    return jvp(grad(total), (values,), (tangents,))[1]


def hessian_reverse(task: Task, values: Values, tangents: Values, batch: Any) -> Values:
    """Multiply the summed Hessian of a batch by differentiating backwards twice, for models without forward mode."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        total = task.losses(leaves, batch).sum()
        first = _backward(total, leaves, create_graph=True)
        return _backward(_dot(first, tangents), leaves)


def gauss_newton_forward(task: Task, values: Values, tangents: Values, batch: Any) -> Values:
    """Multiply the summed Gauss-Newton matrix JᵀSJ of a batch, S the Hessian of the loss in the outputs."""

    def outputs_at(p: Values) -> Any:
        return task.outputs(p, batch)

    outputs, pull_back = vjp(outputs_at, values)[:2]
    pushed = jvp(outputs_at, (values,), (tangents,))[1]
    return pull_back(_output_hessian(task, outputs, pushed, batch))[0]


def gauss_newton_reverse(task: Task, values: Values, tangents: Values, batch: Any) -> Values:
    """Multiply the summed Gauss-Newton matrix of a batch without forward mode through the model.

    J·v is the derivative, in u, of ⟨Jᵀu, v⟩.
    """
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        outputs = task.outputs(leaves, batch)
        if not isinstance(outputs, Tensor):
            raise UnsupportedError(f"outputs of type {type(outputs).__name__} need forward mode: return one tensor.")
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = _backward(outputs, leaves, grad_outputs=u, create_graph=True)
        (pushed,) = torch.autograd.grad(_dot(pulled, tangents), u, retain_graph=True, materialize_grads=True)
        with torch.no_grad():
            back = _output_hessian(task, outputs.detach(), pushed.detach(), batch)
        return _backward(outputs, leaves, grad_outputs=back)


def _output_hessian(task: Task, outputs: Any, pushed: Any, batch: Any) -> Any:
    def total(o: Any) -> Tensor:
        return task.output_losses(o, batch).sum()

    return jvp(grad(total), (outputs,), (pushed,))[1]


def _backward(of: Tensor, leaves: Values, **options: Any) -> dict[str, Tensor]:
    if not of.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(of, list(leaves.values()), materialize_grads=True, **options)
    return dict(zip(leaves, found, strict=True))


def _dot(a: Values, b: Values) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


class Form(Enum):
    """How a product is differentiated: with forward mode where the model allows it, else backwards only."""

    FORWARD = "forward over reverse"
    REVERSE = "reverse over reverse"


_PRODUCTS: dict[tuple[str, Form], Product] = {
    ("hessian", Form.FORWARD): hessian_forward,
    ("hessian", Form.REVERSE): hessian_reverse,
    ("gauss-newton", Form.FORWARD): gauss_newton_forward,
    ("gauss-newton", Form.REVERSE): gauss_newton_reverse,
}


def resolve_kind(kind: Kind, task: Task) -> Literal["hessian", "gauss-newton"]:
    """Turn "auto" into Gauss-Newton where the task knows its outputs, else the Hessian."""
    if kind == "auto":
        return "gauss-newton" if task.has_outputs else "hessian"
    if kind not in ("hessian", "gauss-newton"):
        raise InputError(f"curvature must be 'auto', 'hessian' or 'gauss-newton', got {kind!r}.")
    if kind == "gauss-newton" and not task.has_outputs:
        raise InputError(
            "curvature='gauss-newton' needs a task that knows its outputs: give `outputs` and `output_loss` to Task, "
            "or use curvature='hessian'."
        )
    return kind


@dataclass(frozen=True)
class Curvature:
    """H = (1/n) Σ ∇²L(x) + ℓ2 over n examples, as something that multiplies vectors."""

    task: Task
    data: Data
    rows: np.ndarray | None
    """The examples H is taken on; all of the data if None."""
    kind: Literal["hessian", "gauss-newton"] = "hessian"
    precision: Precision = "fp32"
    form: Form = Form.FORWARD
    hold: bool = True
    """Collate the examples once and hold them, if they are not too many."""
    _held: list[Any] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision must be 'fp32' or 'bf16', got {self.precision!r}.")

    @property
    def num_examples(self) -> int:
        """n, the examples H is averaged over."""
        return len(self.data) if self.rows is None else len(self.rows)

    def batches(self) -> Iterator[Any]:
        """Yield the micro-batches, placed on the model's device."""
        if not self.hold or self.num_examples > HELD_EXAMPLES:
            yield from (self.task.place(batch.values) for batch in self.data.batches(self.rows))
            return
        if not self._held:
            self._held.extend(batch.values for batch in self.data.batches(self.rows))
        yield from (self.task.place(values) for values in self._held)

    def matvec(self, v: Tensor) -> Tensor:  # (P,) -> (P,)
        """Multiply H with a vector: the sum over examples, then one division, so uneven batches weigh right."""
        return self._accumulate(v, self._product)

    def matmat(self, V: Tensor) -> Tensor:  # (Q, P) -> (Q, P)
        """Multiply H with several vectors, many at a time through each batch where the model can be vmapped."""
        return torch.cat([self._accumulate(chunk, self._many) for chunk in V.split(_VECTORS_AT_ONCE)])

    def product_on(self, v: Tensor, batch: Any) -> Tensor:  # (P,) -> (P,)
        """Multiply the *summed* curvature of one placed batch, without the regulariser."""
        return self.task.layout.flatten(self._product(self.task.layout.unflatten(v), batch))

    def _accumulate(self, v: Tensor, product: Callable[[Values, Any], Values]) -> Tensor:
        layout = self.task.layout
        tangents, total = layout.unflatten(v), torch.zeros_like(v)
        for batch in self.batches():
            total += layout.flatten(product(tangents, batch), batch_dims=v.ndim - 1)
        penalty = {name: self.task.l2[name] * tangents[name] for name in layout.names}
        return total / self.num_examples + layout.flatten(penalty, batch_dims=v.ndim - 1)

    def _product(self, tangents: Values, batch: Any) -> Values:
        product = _PRODUCTS[self.kind, self.form]
        if self.precision == "fp32":
            return product(self.task, self.task.params, tangents, batch)
        if self.form is Form.REVERSE:
            return product(self.task.in_bf16(), self.task.params, tangents, batch)
        # Under torch.func autocast acts below the transforms, which never see its casts: the backward half must run
        # inside it too. Some models still meet mixed types (attention), and take the other form.
        with torch.autocast(self.task.layout.device.type, torch.bfloat16, cache_enabled=False):
            return product(self.task, self.task.params, tangents, batch)

    def _many(self, tangents: Values, batch: Any) -> Values:
        if self.form is Form.FORWARD:
            try:
                return vmap(lambda t: self._product(t, batch))(tangents)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # some operations of the model have no batching rule: one vector at a time
                pass
        count = len(next(iter(tangents.values())))
        each = [self._product({name: t[i] for name, t in tangents.items()}, batch) for i in range(count)]
        return {name: torch.stack([product[name] for product in each]) for name in tangents}


def working_form(curvature: Curvature, batch: Any) -> Form:
    """Find the form the model supports by trying each on one batch."""
    probe = torch.ones_like(curvature.task.vector)
    return first_supported(
        Form,
        lambda form: replace(curvature, form=form).product_on(probe, batch),
        lambda form: form.value,
        f"{type(curvature.task.model).__name__} cannot be differentiated twice. {{}} | Replace operations without "
        "derivatives; for Hugging Face models load with attn_implementation='eager'.",
    )
