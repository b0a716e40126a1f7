"""Compiled curvature products: the traced graph is split into repeated pieces, each compiled once."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from eigentrace.curvature.products import Product
from eigentrace.data.batch import map_tensors, tensors_of
from eigentrace.errors import EigentraceWarning
from eigentrace.task.task import Task, Values

Function = Callable[..., Sequence[Tensor]]
Compiler = Callable[[fx.GraphModule], Function]

# Minimum number of operations in a repeated piece: compiling fewer is quick anyway.
_SHORTEST = 24
# How many distances between equal operations are tried as the length of a repeated piece.
_CANDIDATES = 40
# Cost and savings of compiling, on one H200 with ViT-L/32 and 128 images in bf16: a whole Hessian product of 24
# layers (294 tensors) took 166 s to compile, of six (78) 49 s; 24 layers went from 240-330 ms to 87, Gauss-Newton of
# six layers from 43 ms to 17. Pieces that repeat are compiled once, so that deep models take less than this.
_COMPILE_SECONDS, _COMPILE_SECONDS_PER_TENSOR = 7.0, 0.54
COMPILED_SHARE = 0.5
"""The time of a compiled product relative to that of an eager one."""
# Tolerance between eager and compiled results: fused kernels round in other places, and in bfloat16 less often.
_TOL = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2}


def pays(eager_seconds: float, products: int, num_tensors: int) -> bool:
    """Return whether compiling pays off, if it halves the time of later products.

    >>> pays(0.25, products=200, num_tensors=294), pays(0.25, products=2000, num_tensors=294)
    (False, True)
    """
    return (
        1 - COMPILED_SHARE
    ) * eager_seconds * products > _COMPILE_SECONDS + _COMPILE_SECONDS_PER_TENSOR * num_tensors


def inductor(module: fx.GraphModule) -> Function:
    """Compile with `torch.compile`, which caches on disk; compilation starts at the first call."""
    return torch.compile(module, dynamic=False)


class CompiledProduct:
    """A product that is compiled for batches of one signature, and eager for others, such as a smaller last one.

    It is compiled at the first such batch and compared with the eager product. If the compiler fails or the results
    differ, a warning is issued and the product stays eager.
    """

    def __init__(self, product: Product, made_for: tuple | None, dtype: torch.dtype) -> None:
        self.made_for = made_for
        """The signature; that of the first batch if None."""
        self.program: Program | None = None
        self._product, self._tol = product, _TOL[dtype]
        self._given_up = False

    def __call__(self, task: Task, values: Values, tangents: Values, batch: Any) -> Mapping[str, Tensor]:
        """Return the product, computed by the compiled program if possible."""
        here = signature(batch)
        self.made_for = self.made_for or here
        if self._given_up or here != self.made_for or not here:
            return self._product(task, values, tangents, batch)
        arguments = [*values.values(), *tangents.values(), *tensors_of(batch)]
        if self.program is not None:
            return dict(zip(values, self.program(*arguments), strict=True))
        expected = self._product(task, values, tangents, batch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # compiler warnings that the user cannot act on
                program = Program(self._trace(task, list(values), batch, arguments), inductor)
                gap = _gap(dict(zip(values, program(*arguments), strict=True)), expected)
        except Exception as error:  # a compiler can fail in any way, and is optional
            self._give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            return expected
        if gap > self._tol:
            self._give_up(f"results differ by {gap:.2g} of their size")
        else:
            self.program = program
        return expected

    def _trace(self, task: Task, names: list[str], batch: Any, arguments: list[Tensor]) -> fx.GraphModule:
        """Trace the tensor operations of the product, including derivatives and casts."""

        def flat(*given: Tensor) -> list[Tensor]:
            size, rest = len(names), iter(given[2 * len(names) :])
            values, tangents = (dict(zip(names, given[i : i + size], strict=True)) for i in (0, size))
            found = self._product(task, values, tangents, map_tensors(lambda _: next(rest), batch))
            return [found[name] for name in names]

        # With fake tensors, tracing takes no memory, and models cannot branch on values.
        return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        warnings.warn(
            f"Compiling the curvature product failed ({reason}). Continuing without it; pass compile=False to skip it.",
            EigentraceWarning,
            stacklevel=2,
        )


def signature(batch: Any) -> tuple:
    """Return the structure, shapes and types of a batch; an empty tuple if it contains other objects."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), tuple(batch.stride()), str(batch.dtype))
    if batch is None or isinstance(batch, str | int | float):
        return (type(batch).__name__, batch)
    if isinstance(batch, Mapping):
        items: list[Any] = [*batch.items()]
    elif isinstance(batch, list | tuple):
        items = [*enumerate(batch)]
    else:
        return ()  # an object whose content would be traced as a constant
    parts = tuple((key, signature(value)) for key, value in items)
    return (type(batch).__name__, *parts) if all(part for _, part in parts) else ()


def _gap(found: Values, expected: Values) -> float:
    off = sum(float((found[name] - part).double().square().sum()) for name, part in expected.items())
    size = sum(float(part.double().square().sum()) for part in expected.values())
    return (off / size) ** 0.5 if size else float(off > 0)


@dataclass(frozen=True)
class Step:
    """One function call of a program, with its inputs and outputs."""

    function: Function
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    last_uses: tuple[fx.Node, ...]
    """Values that no later step needs."""


class Program:
    """A traced function, divided into pieces; equal pieces (layers of a model) share one compiled function."""

    def __init__(self, graph: fx.GraphModule, compiler: Compiler) -> None:
        _drop_aliases(graph.graph)
        graph.graph.eliminate_dead_code()
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        self._arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
        constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
        self._constants = {node: getattr(graph, str(node.target)) for node in constants}
        (self._results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        self.pieces = _pieces(nodes)
        self.functions: dict[str, Function] = {}
        for piece in self.pieces:
            if piece.form not in self.functions:
                self.functions[piece.form] = compiler(_module(piece, _outputs(piece, self.pieces)))
        self._steps = list(self._schedule())

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Run all steps, freeing values after their last use."""
        values: dict[fx.Node, Tensor] = self._constants | dict(zip(self._arguments, arguments, strict=True))
        for step in self._steps:
            found = step.function(*(values[node] for node in step.inputs))
            values.update(zip(step.outputs, found, strict=True))
            for node in step.last_uses:
                del values[node]
        return [values[node] for node in self._results]

    def _schedule(self) -> Iterator[Step]:
        needed = set(self._results)
        steps = []
        for piece in reversed(self.pieces):
            outputs = tuple(piece.nodes[i] for i in _outputs(piece, self.pieces))
            last = {node for node in (*piece.inputs, *outputs) if node not in needed}
            needed.update(piece.inputs)
            steps.append(Step(self.functions[piece.form], piece.inputs, outputs, tuple(last)))
        return reversed(steps)


@dataclass(frozen=True)
class Piece:
    """Consecutive operations; pieces of equal form compute the same function of their inputs."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    form: str


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove operations that only alias a tensor: detach, alias, and views of the same shape."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        same = node.target is aten.view.default and _described(node) == _described(node.args[0]) != ""
        if same or node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _pieces(nodes: list[fx.Node]) -> list[Piece]:
    place = {node: number for number, node in enumerate(nodes)}
    bounds = sorted({0, len(nodes), *_bounds(_kinds(nodes), 0, len(nodes))})
    return [_piece(nodes, place, *span) for span in pairwise(bounds)]


def _piece(nodes: list[fx.Node], place: dict[fx.Node, int], start: int, stop: int) -> Piece:
    inputs: dict[fx.Node, int] = {}

    def named(node: fx.Node) -> str:
        here = place.get(node, -1)
        if start <= here < stop:
            return f"own {here - start}"
        number = inputs.setdefault(node, len(inputs))
        return f"input {number} {_described(node)}"

    forms = [f"{n.target} {map_arg((n.args, n.kwargs), named)}" for n in nodes[start:stop]]
    return Piece(tuple(nodes[start:stop]), tuple(inputs), "\n".join(forms))


def _outputs(piece: Piece, pieces: list[Piece]) -> list[int]:
    """Return the indices of values that are used outside of this piece, or of any piece of equal form."""
    like = [other for other in pieces if other.form == piece.form]
    used = set()
    for other in like:
        own = set(other.nodes)
        used |= {i for i, node in enumerate(other.nodes) if any(user not in own for user in node.users)}
    return sorted(used)


def _module(piece: Piece, outputs: list[int]) -> fx.GraphModule:
    graph, copies = fx.Graph(), {}
    for number, node in enumerate(piece.inputs):
        copies[node] = graph.placeholder(f"input_{number}")
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[piece.nodes[i]] for i in outputs))
    return fx.GraphModule({}, graph)


def _described(node: fx.Node) -> str:
    meta: Any = node.meta.get("tensor_meta")
    return f"{meta.shape} {meta.dtype} {meta.stride}" if hasattr(meta, "shape") else ""


def _kinds(nodes: list[fx.Node]) -> np.ndarray:
    """Number the operations: equal numbers for the same kernel, options and result type."""
    keys = [f"{n.target} {map_arg((n.args, n.kwargs), lambda _: '·')} {_described(n)}" for n in nodes]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys])


def _bounds(kinds: np.ndarray, start: int, stop: int) -> Iterator[int]:
    """Yield bounds of pieces: of each repetition of the longest repeated piece, then of the rest."""
    found = _longest_repeat(kinds[start:stop])
    if found is None:
        return
    first, length, count = found
    first += start
    yield from range(first, first + length * count + 1, length)
    yield from _bounds(kinds, start, first)
    yield from _bounds(kinds, first + length * count, stop)


def _longest_repeat(kinds: np.ndarray) -> tuple[int, int, int] | None:
    """Return start, length and count of the consecutive equal pieces that save most compiling."""
    best: tuple[int, int, int] | None = None
    for length in _distances(kinds):
        alike = kinds[:-length] == kinds[length:]
        breaks = np.flatnonzero(~np.concatenate([[False], alike, [False]]))
        runs = np.diff(breaks) - 1
        run = int(runs.max())
        count = run // length + 1
        if count > 1 and (best is None or (count - 1) * length > (best[2] - 1) * best[1]):
            best = int(breaks[runs.argmax()]), length, count
    return best


def _distances(kinds: np.ndarray) -> list[int]:
    order = np.argsort(kinds, kind="stable")
    gaps = np.diff(order)[np.diff(kinds[order]) == 0]
    common = Counter(gaps[gaps >= _SHORTEST].tolist()).most_common(_CANDIDATES)
    return sorted(gap for gap, _ in common)
