"""A forward and backward pass that is traced and compiled once per batch shape.

The pass is traced with its taps into a graph of plain operations. Products with directions are custom operations, so
that the compiler does not unroll their chunks.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eigentrace.data.batch import map_tensors, tensors_of
from eigentrace.errors import EigentraceWarning, UnsupportedError
from eigentrace.gradients.outer_products import CUSTOM_OPERATIONS, Dense, Factor, OneHot, Outer
from eigentrace.projection.engine import Job, Projection

Pass = Callable[[Job, Any, int], Projection]

# Maximum number of batch shapes to compile; others run eagerly. Text comes in many lengths.
_MOST_SHAPES = 4


@dataclass
class CompiledPass:
    """The pass of an engine, compiled from the second batch of each shape on."""

    run: Pass
    _seen: dict[Any, int] = field(default_factory=dict)
    _made: dict[Any, Callable | None] = field(default_factory=dict)

    def __call__(self, job: Job, batch: Any, size: int) -> Projection:
        """Project a batch."""
        shape = (size, *((t.shape, t.dtype) for t in tensors_of(batch)))
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] > 1 and shape not in self._made and len(self._made) < _MOST_SHAPES:
            self._made[shape] = self._compile(job, batch, size)
        compiled = self._made.get(shape)
        if compiled is None:
            return self.run(job, batch, size)
        features, squares, losses, outputs = compiled(list(job.task.detached().values()), list(tensors_of(batch)))
        return Projection(
            features,
            squares if job.norms else None,
            losses,
            outputs=outputs if job.outputs else None,
            is_whole=True,
        )

    def _compile(self, job: Job, batch: Any, size: int) -> Callable | None:
        from torch.fx.experimental.proxy_tensor import make_fx

        names = list(job.task.detached())

        def whole(values: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
            remaining = iter(tensors)
            task = job.task.with_values(dict(zip(names, values, strict=True)))
            own = replace(job, task=task, function=getattr(task, job.function.__name__))
            found = self.run(own, map_tensors(lambda t: next(remaining), batch), size)
            if found.read:
                raise UnsupportedError(f"the model reads numbers of its batch ({', '.join(sorted(found.read))})")
            # A graph returns tensors only: the losses are placeholders for outputs that were not requested.
            squares, outputs = (found.losses if t is None else t for t in (found.square_norms, found.outputs))
            return found.features, squares, found.losses, outputs

        inputs = (list(job.task.detached().values()), list(tensors_of(batch)))
        try:
            # On one thread, because tracing only records operations of its own thread.
            with torch.autograd.set_multithreading_enabled(False), _using(_Operations()):
                graph = make_fx(whole)(*inputs)
            compiled = torch.compile(graph, dynamic=False)
            compiled(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any failure of the compiler: the eager pass still works
            warnings.warn(
                f"The pass over batches of {size} examples could not be compiled and runs eagerly. Its results are the "
                f"same; leave out compile=True to avoid this warning. The compiler reported: {error}",
                EigentraceWarning,
                stacklevel=2,
            )
            return None
        return compiled


@contextmanager
def _using(operations: "_Operations | None") -> Iterator[None]:
    token = CUSTOM_OPERATIONS.set(operations)
    try:
        yield
    finally:
        CUSTOM_OPERATIONS.reset(token)


class _Operations:
    """Products of `Outer` gradients as custom operations of the traced graph."""

    def __init__(self) -> None:
        _define()

    def dot(self, form: Outer, directions: Tensor, budget: int) -> Tensor:
        sides = (*_side(form.left), *_side(form.right))
        return torch.ops.eigentrace.outer_dot(*sides, form.groups, directions, budget)

    def square_norms(self, form: Outer, budget: int) -> Tensor:
        sides = (*_side(form.left), *_side(form.right))
        return torch.ops.eigentrace.outer_square_norms(*sides, form.groups, budget)


def _side(factor: Factor) -> tuple[Tensor, int]:
    """Return a factor as a tensor and, for lookups, the number of entries (otherwise 0)."""
    if isinstance(factor, OneHot):
        return factor.index, factor.width
    return factor.take(0, factor.examples).contiguous(), 0


def _form(left: Tensor, left_width: int, right: Tensor, right_width: int, groups: int) -> Outer:
    a, b = (OneHot(t, width) if width else Dense(t) for t, width in ((left, left_width), (right, right_width)))
    return Outer(a, b, len(left), groups)


def _define() -> None:
    """Register the operations unless they are registered; not on import, which should have no side effects."""
    if hasattr(torch.ops.eigentrace, "outer_dot"):
        return

    @torch.library.custom_op("eigentrace::outer_dot", mutates_args=())
    def outer_dot(
        left: Tensor, left_width: int, right: Tensor, right_width: int, groups: int, directions: Tensor, budget: int
    ) -> Tensor:
        with _using(None):
            return _form(left, left_width, right, right_width, groups).dot(directions, budget).contiguous()

    @outer_dot.register_fake
    def _(left, left_width, right, right_width, groups, directions, budget):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return directions.new_empty(
            left.shape[0], directions.shape[0], dtype=torch.promote_types(directions.dtype, torch.float32)
        )

    @torch.library.custom_op("eigentrace::outer_square_norms", mutates_args=())
    def outer_square_norms(
        left: Tensor, left_width: int, right: Tensor, right_width: int, groups: int, budget: int
    ) -> Tensor:
        with _using(None):
            return _form(left, left_width, right, right_width, groups).square_norms(budget).contiguous()

    @outer_square_norms.register_fake
    def _(left, left_width, right, right_width, groups, budget):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return right.new_empty(left.shape[0], dtype=torch.promote_types(right.dtype, torch.float32))
