"""Products of one batch's curvature with a vector, by three forms of differentiation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, jvp, vjp

from eigentrace.data.batch import map_tensors
from eigentrace.errors import UnsupportedError
from eigentrace.task.autocast import SeenCasts
from eigentrace.task.derivatives import backward, leaves_of
from eigentrace.task.task import Task, Values

Precision = Literal["fp32", "bf16"]
Product = Callable[[Task, Values, Values, Any], dict[str, Tensor]]

_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
)  # fmt: skip


class Differentiation(Enum):
    """Ways to compute a product by differentiating twice, best first; models may not support all."""

    DUAL = "dual numbers through backward"
    """One forward pass with tangent v records the graph for the backward pass. Both include autocast's casts."""
    FORWARD = "forward over reverse"
    """`torch.func`: slower, but it supports nested outputs and, under vmap, many vectors at once."""
    REVERSE = "reverse over reverse"
    """Two backward passes, for models with operations without forward mode."""


def hessian_dual(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return H·v for the summed Hessian H of a batch: the tangent of the gradient of dual numbers."""
    with torch.enable_grad(), dual_level():
        leaves = leaves_of(values)
        total = task.losses(_duals(leaves, tangents), batch).sum()
        return {name: _tangent(g) for name, g in backward(total, leaves).items()}


def hessian_forward(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return H·v for the summed Hessian H of a batch, by forward mode over reverse mode.

    `jvp(grad(f))`, never `jvp(jacrev(f))`: the latter is silently wrong for LayerNorm weights.
    """

    def total(p: Values) -> Tensor:
        return task.losses(p, batch).sum()

    return jvp(grad(total), (values,), (tangents,))[1]


def hessian_reverse(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return H·v for the summed Hessian H of a batch, by two backward passes."""
    with torch.enable_grad():
        leaves = leaves_of(values)
        total = task.losses(leaves, batch).sum()
        first = backward(total, leaves, create_graph=True)
        return backward(_dot(first, tangents), leaves)


def gauss_newton_dual(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return JᵀSJ·v for a batch, the summed Gauss-Newton matrix; S is the Hessian of the loss in the outputs.

    The forward pass that computes J·v also records the graph for the backward pass of S·J·v: leaving the dual level
    drops the tangents and keeps the graph.
    """
    with torch.enable_grad():
        leaves = leaves_of(values)
        with dual_level():
            found = _tensor(task.outputs(_duals(leaves, tangents), batch))
            outputs, pushed = unpack_dual(found).primal, _tangent(found)
        return backward(outputs, leaves, grad_outputs=output_product(task, outputs, pushed, batch))


def output_product(task: Task, outputs: Tensor, pushed: Tensor, batch: Any) -> Tensor:
    """Return S·u, where S is the Hessian of the summed loss of a batch in its outputs.

    Two backward passes: forward mode of cross-entropy would first load a compiler, for seconds.
    """
    with torch.enable_grad():
        ends = {"outputs": outputs.detach().requires_grad_()}
        first = backward(task.output_losses(ends["outputs"], batch).sum(), ends, create_graph=True)
        return backward(_dot(first, {"outputs": pushed}), ends)["outputs"]


def gauss_newton_forward(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return JᵀSJ·v for a batch, the summed Gauss-Newton matrix; the outputs may be nested."""

    def outputs_at(p: Values) -> Any:
        return task.outputs(p, batch)

    outputs, pull_back = vjp(outputs_at, values)[:2]
    pushed = map_tensors(Tensor.detach, jvp(outputs_at, (values,), (tangents,))[1])
    return pull_back(_output_hessian(task, outputs, pushed, batch))[0]


def gauss_newton_reverse(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
    """Return JᵀSJ·v for a batch, the summed Gauss-Newton matrix, without forward mode through the model.

    J·v is the derivative of ⟨Jᵀu, v⟩ with respect to u.
    """
    with torch.enable_grad():
        leaves = leaves_of(values)
        outputs = _tensor(task.outputs(leaves, batch))
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = backward(outputs, leaves, grad_outputs=u, create_graph=True)
        (pushed,) = torch.autograd.grad(_dot(pulled, tangents), u, retain_graph=True, materialize_grads=True)
        with torch.no_grad():
            back = _output_hessian(task, outputs.detach(), pushed.detach(), batch)
        return backward(outputs, leaves, grad_outputs=back)


PRODUCTS: dict[tuple[str, Differentiation], Product] = {
    ("hessian", Differentiation.DUAL): hessian_dual,
    ("hessian", Differentiation.FORWARD): hessian_forward,
    ("hessian", Differentiation.REVERSE): hessian_reverse,
    ("gauss-newton", Differentiation.DUAL): gauss_newton_dual,
    ("gauss-newton", Differentiation.FORWARD): gauss_newton_forward,
    ("gauss-newton", Differentiation.REVERSE): gauss_newton_reverse,
}


def product_of(kind: str, form: Differentiation, precision: Precision) -> Product:
    """Return the function that multiplies a batch's curvature with a vector, in the given precision."""
    product = PRODUCTS[kind, form]
    if precision == "fp32":
        return product

    def in_bf16(task: Task, values: Values, tangents: Values, batch: Any) -> dict[str, Tensor]:
        if form is not Differentiation.FORWARD:
            with _norms_in_float(task.model):
                return product(task.in_bf16(), values, tangents, batch)
        with SeenCasts(task.layout.device.type):
            return product(task.in_bf16(), values, tangents, batch)

    return in_bf16


@contextmanager
def _norms_in_float(model: nn.Module) -> Iterator[None]:
    """Run normalisation layers in float32, and convert their outputs back to bfloat16.

    For bfloat16 inputs and float32 parameters, their forward-mode rules return float32 tangents of bfloat16 results,
    for which the next product raises an error.
    """
    widened: list[nn.Module] = []

    def widen(module: nn.Module, args: tuple) -> tuple | None:
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.bfloat16:
            return None
        widened.append(module)
        return (args[0].float(), *args[1:])

    def narrow(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        if not widened or widened[-1] is not module:
            return output
        widened.pop()
        return output.to(torch.bfloat16)

    norms = [module for module in model.modules() if isinstance(module, _NORMS)]
    hooks = [module.register_forward_pre_hook(widen) for module in norms]
    hooks += [module.register_forward_hook(narrow) for module in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _duals(leaves: Values, tangents: Values) -> dict[str, Tensor]:
    duals = {}
    for name, leaf in leaves.items():
        # A tangent gets storage as large as its leaf's: for a view of a large buffer, that is the size of the buffer.
        whole = leaf.untyped_storage().nbytes() == leaf.nbytes
        duals[name] = make_dual(leaf if whole else leaf.clone(), tangents[name])
    return duals


def _tangent(dual: Tensor) -> Tensor:
    primal, tangent = unpack_dual(dual)
    return torch.zeros_like(primal) if tangent is None else tangent.detach()


def _tensor(outputs: Any) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise UnsupportedError(f"outputs of type {type(outputs).__name__} need forward mode. Return one tensor.")
    return outputs


def _output_hessian(task: Task, outputs: Any, pushed: Any, batch: Any) -> Any:
    def total(o: Any) -> Tensor:
        return task.output_losses(o, batch).sum()

    return jvp(grad(total), (outputs,), (pushed,))[1]


def _dot(a: Values, b: Values) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()
