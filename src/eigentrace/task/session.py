"""Sessions: run a model in eval mode with differentiable kernels, and restore its state afterwards."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from traceback import walk_tb
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from eigentrace.errors import InputError, UnsupportedError
from eigentrace.task.user_function import guarded_data, guarded_gradients, guarded_text

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Names that torch.utils.checkpoint.checkpoint calls for either kind. Models import that function by name, so it cannot
# be replaced itself.
_CHECKPOINTING = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode with kernels that have second-order and forward-mode derivatives.

    - Fused attention has neither, so the math kernel is selected. The fused path that `nn.MultiheadAttention` and
      `nn.TransformerEncoder` use in eval mode is disabled.
    - oneDNN's and cuDNN's fused recurrent kernels have neither. They are disabled only for models with a recurrent
      layer, because convolutions need these backends for speed.
    - Embeddings with `sparse=True` would return sparse gradients, which cannot be flattened: `sparse` is set to False.
    - `nn.EmbeddingBag` has neither: bags of equal length are computed by a lookup and a sum.
    - An embedding's padding row gets no gradient in reverse mode, as in training, but would get one in forward mode:
      it is constant in both.
    - Fused weight normalisation treats norms as constant in its second derivative: separate operations replace it.
    - What the user's functions compute while they disable gradients, or read from `tensor.data`, is constant in forward
      mode too, which ignores the former: see `user_function`. So are gradients computed without `create_graph`.
      `tensor.detach_()` in nested transforms is refused.
    - Inside of a transform, assigning to the `data` of a tensor can cause a segmentation fault, and its text does not
      show its numbers: see `guarded_data` and `guarded_text`.
    - Activation checkpointing is disabled: the backward pass would recompute a block outside of the transforms of the
      forward pass, at the model's own parameters.
    - The global random state is restored, even if a data loader or dropout drew from it.

    Eval mode is set module by module: `model.eval()` may be overridden, for example to merge adapters into weights.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "Nothing can be differentiated inside torch.inference_mode(). Call eigentrace outside of it; under "
            "torch.no_grad() it works."
        )
    with ExitStack() as stack:
        stack.enter_context(_as_found(model))
        stack.enter_context(_in_eval_mode(model))
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False
            if _is_plain_bag(module):
                module.forward = _looked_up(module)  # type: ignore[method-assign]
        stack.enter_context(_constant_padding(model))
        stack.enter_context(_no_checkpointing())
        stack.enter_context(guarded_data(model))
        stack.enter_context(guarded_gradients())
        stack.enter_context(guarded_text())
        stack.enter_context(_no_fused_weight_norm())
        stack.enter_context(_no_fused_encoder())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
        if any(isinstance(module, _RECURRENT) for module in model.modules()):
            # Not `flags(enabled=False)`, which also sets every other flag of its backend.
            stack.enter_context(_disabled(torch.backends.mkldnn))
            stack.enter_context(_disabled(torch.backends.cudnn))
        # torch.func differentiates inside an outer no_grad, which saves the ordinary graph that parameters outside the
        # selection would record.
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", next(model.parameters()).device.type}:
            # The caller's autocast is disabled: only `precision` determines where numbers are rounded.
            # Its cache of cast weights is disabled: nested contexts never clear it, and it grew with every product.
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        # vmap warns once per operation that it falls back to a slow loop, which the caller cannot change.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def lookup_outside(model: nn.Module, error: IndexError) -> InputError | None:
    """Return an InputError that names the embedding and the index outside of it; None for any other error.

    The table and the indices are found in the frames of the traceback, so successful lookups need no check.
    """
    names = {id(module): name for name, module in model.named_modules()}
    owner = ""
    for frame, _ in walk_tb(error.__traceback__):
        found = frame.f_locals
        owner = names.get(id(found.get("self")), owner)
        if frame.f_code is nn.functional.embedding.__code__:
            size = len(found["weight"])
            return InputError(
                f"A lookup in {owner!r} of {type(model).__name__} requests {_first_outside(found['input'], size)}, but "
                f"the table has entries 0 to {size - 1}. If it contains tokens, create their ids with the tokenizer of "
                "this model; if positions, truncate the inputs to the model's length (pass truncation=True, "
                "max_length=... to the tokenizer)."
            )
    return None


def _first_outside(index: Tensor, size: int) -> str:
    try:
        bad = ((index < 0) | (index >= size)).nonzero()[0].tolist()
        return f"entry {int(index[tuple(bad)])} (at {bad} of indices of shape {tuple(index.shape)})"
    except (RuntimeError, IndexError):  # inside a transform that hides the numbers
        return "an entry out of range"


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module on exit: modes, hooks, buffers, and tensors stored by forward.

    Each module is restored separately: `model.train()` would overwrite submodules that the caller froze in eval mode.
    A tensor stored by forward (`self.attention = ...`) belongs to a transform that has ended, and is unusable later.
    """
    found = [_Attributes(vars(module)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes in found:
            attributes.restore()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set and restore the mode of each module without calling its `train` or `eval`, which may have side effects."""
    found: list[tuple[nn.Module, bool]] = []
    try:
        for name, module in model.named_modules():
            mode = module.training
            try:
                module.training = False
            except (AttributeError, RuntimeError) as error:
                raise UnsupportedError(
                    f"The mode of module {name!r} ({type(module).__name__}) cannot be set: {error} | eigentrace sets "
                    "`training` of every module to False and restores it. Make the attribute writable."
                ) from error
            found.append((module, mode))
        yield
    finally:
        for module, mode in found:
            module.training = mode


class _Attributes:
    """A copy of an object's attributes, including the contents of its dicts and lists."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes, self.values = attributes, dict(attributes)
        self.dicts = [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]
        self.lists = [(value, list(value)) for value in attributes.values() if isinstance(value, list)]

    def restore(self) -> None:
        for mapping, content in [*self.dicts, (self.attributes, self.values)]:
            mapping.clear()
            mapping.update(content)
        for sequence, items in self.lists:
            sequence[:] = items


def _is_plain_bag(module: nn.Module) -> TypeGuard[nn.EmbeddingBag]:
    return (
        isinstance(module, nn.EmbeddingBag)
        and getattr(module.forward, "__func__", None) is nn.EmbeddingBag.forward
        and module.mode in ("sum", "mean")
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def _looked_up(module: nn.EmbeddingBag) -> Callable[..., Tensor]:
    """Return a forward function that computes a lookup and a sum; with offsets, it calls the original."""
    own = module.forward

    def forward(input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if input.ndim != 2 or offsets is not None:
            return own(input, offsets, per_sample_weights)
        entries = nn.functional.embedding(input, module.weight)  # (B, T, width)
        shares = torch.ones_like(input, dtype=entries.dtype) if per_sample_weights is None else per_sample_weights
        if module.padding_idx is not None:
            shares = shares * (input != module.padding_idx)
        if module.mode == "mean":
            shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(1)
        return (shares.unsqueeze(-1) * entries).sum(dim=1)

    return forward


@contextmanager
def _constant_padding(model: nn.Module) -> Iterator[None]:
    def hold(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        tokens = args[0] if args else kwargs.get("input")
        if not isinstance(tokens, Tensor) or tokens.shape != output.shape[:-1]:
            return output  # a subclass that looks something else up, such as positions
        padding = torch.eq(tokens, module.padding_idx).unsqueeze(-1)  # type: ignore[arg-type]
        return torch.where(padding, output.detach(), output)

    padded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    hooks = [module.register_forward_hook(hold, with_kwargs=True) for module in padded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _no_fused_encoder() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _no_fused_weight_norm() -> Iterator[None]:
    def written(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        others = [d for d in range(v.ndim) if d != dim]  # all of them for -1, which means one norm of all elements
        squares = v.square().sum(others, keepdim=True) if others else v.square()
        return v * (g / squares.sqrt())

    # The older layer imports the function by name, in a module that is hidden by a function of the same name.
    holders = [torch, sys.modules["torch.nn.utils.weight_norm"]]
    found = [holder._weight_norm for holder in holders]
    try:
        for holder in holders:
            holder._weight_norm = written  # type: ignore[attr-defined]
        yield
    finally:
        for holder, own in zip(holders, found, strict=True):
            holder._weight_norm = own  # type: ignore[attr-defined]


@contextmanager
def _no_checkpointing() -> Iterator[None]:
    def plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable, preserve: bool, *args: Any) -> Any:
            return function(*args)

    found = {name: getattr(checkpoint, name) for name in _CHECKPOINTING}
    try:
        for name, other in zip(_CHECKPOINTING, (plainly, Plain), strict=True):
            setattr(checkpoint, name, other)
        yield
    finally:
        for name, own in found.items():
            setattr(checkpoint, name, own)


@contextmanager
def _disabled(backend: Any) -> Iterator[None]:
    enabled, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = enabled


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
