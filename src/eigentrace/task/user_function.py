"""The user's functions while they are differentiated: stopped gradients are constants, and assigned data is checked.

Forward mode ignores `torch.no_grad()`, but it can be disabled by itself. It is, wherever the user's code disables
gradients, so that all forms of differentiation agree with an ordinary backward pass.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from eigentrace.data.batch import map_tensors, tensors_of
from eigentrace.errors import TaskError, UnsupportedError

# Whether a function of the user is running, as opposed to eigentrace's own code around it.
_IN_FUNCTION: ContextVar[bool] = ContextVar("in_function", default=False)

# What disables forward mode in it; None if it is not in use.
_STOP: ContextVar["_Stop | None"] = ContextVar("stop", default=None)

# torch's own, in case that two threads replace it at the same time.
_SET_GRAD_ENABLED = torch._C._set_grad_enabled
# Modules between the code that enables or disables gradients and the function that does.
_BETWEEN = frozenset({__name__, "torch.autograd.grad_mode", "torch.utils._contextlib", "contextlib"})


@contextmanager
def user_function() -> Iterator[None]:
    """Run the user's code inside: what it computes while gradients are disabled is a constant, in forward mode too.

    In forward mode, gradients are enabled, as in training: otherwise code that restores the mode that it found could
    not be told from code that disables gradients. The mode is restored afterwards, whatever the code does.
    """
    token, enabled = _IN_FUNCTION.set(True), torch.is_grad_enabled()
    stop = _Stop() if is_forward_mode() else None
    try:
        if stop is not None:
            stop.begin()
        yield
    finally:
        if stop is not None:
            stop.end()
        if torch.is_grad_enabled() is not enabled:
            _enable_gradients(enabled)
        _IN_FUNCTION.reset(token)


def is_forward_mode() -> bool:
    """Return whether tensors may have tangents: inside of `dual_level` or `jvp`."""
    return forward_ad._current_level >= 0


def _enable_gradients(enabled: bool) -> None:
    # Function modes would be given whatever has torch's name for it now.
    with torch._C.DisableTorchFunction():
        _SET_GRAD_ENABLED(enabled)


class _Stop:
    """Disables forward mode while a function of the user disables gradients, in any form."""

    def __init__(self) -> None:
        self.is_active = False
        self._mode: _ConstantResults | None = None
        self._around = overrides._get_current_function_mode_stack()
        self._nesting = eager_transforms.JVP_NESTING

    def begin(self) -> None:
        """Let the functions and contexts of torch that disable gradients call `switch`."""
        self._forward, self._found = torch._C._is_fwd_grad_enabled(), torch._C._set_grad_enabled
        self._token = _STOP.set(self)
        torch._C._set_grad_enabled = self.switch
        if not torch.is_grad_enabled():
            _enable_gradients(True)

    def end(self) -> None:
        """Undo `begin`, and what the user's code left."""
        torch._C._set_grad_enabled = self._found
        _STOP.reset(self._token)
        torch._C._set_fwd_grad_enabled(self._forward)
        if self.is_active:
            self.is_active = False
            self._place()

    def switch(self, enabled: bool) -> None:
        """Enable or disable gradients, in place of torch's own function."""
        _enable_gradients(enabled)
        if _STOP.get() is not self or enabled is not self.is_active or _is_of_a_transform():
            return
        self.check_nesting()
        # Inside of `Function.forward`, forward mode is disabled already, and must stay so.
        if enabled or torch._C._is_fwd_grad_enabled():
            torch._C._set_fwd_grad_enabled(enabled)
            self.is_active = not enabled
            self._place()

    def check_nesting(self) -> None:
        """Raise UnsupportedError inside of a `jvp` of the user's: it ignores `torch.no_grad()`, and cannot here."""
        if self._nesting != eager_transforms.JVP_NESTING:
            raise UnsupportedError(
                "torch.func.jvp and torch.no_grad() are combined, which forward mode cannot differentiate again: stop "
                "gradients by .detach() instead"
            )

    def _place(self) -> None:
        """Put the mode below those that the user's code entered, which it exits in their own order; or remove it."""
        self._mode = self._mode or _ConstantResults(self)
        stack = overrides._get_current_function_mode_stack()
        for _ in stack:
            overrides._pop_mode()
        others = [mode for mode in stack if mode is not self._mode]
        # torch keeps the mode of a device lowest.
        lower = [mode for mode in others if isinstance(mode, DeviceContext) or mode in self._around]
        upper = [mode for mode in others if mode not in lower]
        for mode in (*lower, *([self._mode] if self.is_active else []), *upper):
            overrides._push_mode(mode)


class _ConstantResults(TorchFunctionMode):
    """Detach the results of torch's functions: views have the tangents of their base even in disabled forward mode."""

    def __init__(self, stop: _Stop) -> None:
        super().__init__()
        self._stop = stop

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._stop.check_nesting()
        result = func(*args, **(kwargs or {}))
        # A transform of torch.func that is called while gradients are disabled enables them for its own level.
        return result if torch.is_grad_enabled() else _detached(result, args)


@contextmanager
def guarded_gradients() -> Iterator[None]:
    """Let custom functions, computed gradients and `detach_()` agree in forward mode with an ordinary backward pass."""
    with _constant_custom_functions(), _constant_gradients(), _guarded_detaching():
        yield


@contextmanager
def _constant_custom_functions() -> Iterator[None]:
    """Let custom functions respect disabled forward mode too: torch would call their `jvp`."""
    function = torch.autograd.Function
    own = vars(function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result, stop = own.__func__(cls, *args, **kwargs), _STOP.get()
        return _detached(result, args) if stop is not None and stop.is_active else result

    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        function.apply = own  # type: ignore[method-assign]


@contextmanager
def _constant_gradients() -> Iterator[None]:
    """Let gradients that the user's code computes without `create_graph` have no tangents, as they have no graph."""
    holder: Any = torch.autograd
    own = holder._engine_run_backward

    def run(outputs: Any, given: Any, retain: Any, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        if create_graph or _STOP.get() is None:
            return own(outputs, given, retain, create_graph, *args, **kwargs)
        with forward_ad._set_fwd_grad_enabled(False):
            return map_tensors(Tensor.detach, own(outputs, given, retain, create_graph, *args, **kwargs))

    holder._engine_run_backward = run
    try:
        yield
    finally:
        holder._engine_run_backward = own


def _detached(result: Any, args: tuple) -> Any:
    """Detach the results of a function, but not the arguments among them, which in-place functions return."""
    given = {id(tensor) for tensor in tensors_of(list(args))}
    return map_tensors(lambda tensor: tensor if id(tensor) in given else tensor.detach(), result)


def _is_of_a_transform() -> bool:
    """Return whether a transform of torch.func is switching gradients, which it does for each of its levels."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(inspect.currentframe()))
    return next((name for name in modules if name not in _BETWEEN), "").startswith("torch._functorch.")


@contextmanager
def guarded_data(model: nn.Module) -> Iterator[None]:
    """Check assignments to `tensor.data` in the user's functions, where `module.to(dtype)` makes them too.

    Reading it stops the gradient, in forward mode too.

    While the model is evaluated, its parameters are tensors of the task, which an assignment would change permanently.
    If the function is transformed (grad, vmap, jvp), the assigned tensor is invalid after the transform, and its next
    use is a segmentation fault. Assignments of equal values are skipped; others raise an error.
    """
    found = vars(torch.Tensor).get("data")  # a guard of a session around this one; torch has it in a base class
    own: Any = torch.Tensor.data

    def read(tensor: Tensor) -> Tensor:
        value = own.__get__(tensor)
        # Inside of nested transforms, torch's own is constant for the innermost one only.
        return value.detach() if _IN_FUNCTION.get() and is_forward_mode() else value

    def assign(tensor: Tensor, value: Tensor) -> None:
        if not _IN_FUNCTION.get() or not isinstance(value, Tensor):
            own.__set__(tensor, value)
            return
        named = (*model.named_parameters(), *model.named_buffers())
        name = next((name for name, held in named if held is tensor), None)
        if name is None and (_is_transformed(tensor) or _is_transformed(value)):
            raise UnsupportedError("the model assigns to the `data` of a tensor, which torch cannot transform")
        if name is None:
            own.__set__(tensor, value)
        elif value is not tensor and not _same_numbers(value, tensor):
            raise TaskError(
                f"Evaluating the loss assigns other values to the data of {name!r}: {_form(value)} instead of "
                f"{_form(tensor)}. Expected a loss that leaves the model as it is. Convert modules (`.to`, `.half`) "
                "and constrain weights before passing the model, not in forward."
            )

    torch.Tensor.data = property(read, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        if found is None:
            del torch.Tensor.data
        else:
            torch.Tensor.data = found


@contextmanager
def guarded_text() -> Iterator[None]:
    """Raise UnsupportedError if the user's functions ask for the text of a tensor inside a transform (grad, vmap, jvp).

    It would describe the transform, and a model that reads numbers from texts would find others. Another engine, which
    uses no transform, shows the text that training shows.
    """
    own = torch.Tensor.__repr__

    def shown(tensor: Tensor, **options: Any) -> str:
        if _IN_FUNCTION.get() and _is_transformed(tensor):
            raise UnsupportedError(
                "the model uses the text of a tensor (str, repr, print), which torch cannot transform"
            )
        return own(tensor, **options)

    shown.__name__ = own.__name__  # by which modes for torch functions know it
    torch.Tensor.__repr__ = shown  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.__repr__ = own  # type: ignore[method-assign, assignment]


def _is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a transform (grad, vmap, jvp) and therefore has no memory of its own."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@contextmanager
def _guarded_detaching() -> Iterator[None]:
    """Refuse `tensor.detach_()` in nested transforms, where it stops the gradient of the innermost one only."""
    holders: tuple[Any, ...] = (torch, torch.Tensor)
    found = [holder.detach_ for holder in holders]

    def guarded(own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def detach_(tensor: Tensor) -> Tensor:
            if _IN_FUNCTION.get() and is_forward_mode() and tensor.requires_grad and _is_transformed(tensor):
                raise UnsupportedError(
                    f"the model calls detach_() on a tensor {_form(tensor)}, which torch cannot undo in forward mode: "
                    "use .detach() and its result"
                )
            return own(tensor)

        return detach_

    try:
        for holder, own in zip(holders, found, strict=True):
            holder.detach_ = guarded(own)
        yield
    finally:
        for holder, own in zip(holders, found, strict=True):
            holder.detach_ = own
