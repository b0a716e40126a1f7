"""Products of the training loss's curvature with vectors: Hessian or Gauss-Newton, over any number of batches."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from eigentrace.curvature.compiled import CompiledProduct, pays, signature
from eigentrace.curvature.products import Differentiation, Precision, product_of
from eigentrace.data import Data
from eigentrace.data.batch import length_of, tensors_of
from eigentrace.errors import InputError
from eigentrace.task.derivatives import first_supported
from eigentrace.task.task import Task, Values

Kind = Literal["auto", "hessian", "gauss-newton"]

# A sample up to this size is collated once and kept in memory; a larger one is read again for every product.
HELD_EXAMPLES = 20_000
# Share of the device's free memory for these examples; others are copied to it again for every product.
_HELD_SHARE = 0.1
# Number of vectors that are multiplied on a batch together in `matmat`.
_VECTORS_AT_ONCE = 32


def resolve_kind(kind: Kind, task: Task) -> Literal["hessian", "gauss-newton"]:
    """Resolve "auto" to Gauss-Newton if the task has outputs, else to the Hessian."""
    if kind == "auto":
        return "gauss-newton" if task.has_outputs else "hessian"
    if kind not in ("hessian", "gauss-newton"):
        raise InputError(f"curvature must be 'auto', 'hessian' or 'gauss-newton', got {kind!r}.")
    if kind == "gauss-newton" and not task.has_outputs:
        raise InputError(
            "curvature='gauss-newton' needs a task with outputs: pass `outputs` and `output_loss` to Task, or use "
            "curvature='hessian'."
        )
    return kind


@dataclass(frozen=True)
class Curvature:
    """The operator H = (1/n) Σ ∇²L(x) + ℓ2 over n examples, for products with vectors."""

    task: Task
    data: Data
    rows: np.ndarray | None
    """Rows of the curvature sample; all of the data if None."""
    kind: Literal["hessian", "gauss-newton"] = "hessian"
    precision: Precision = "fp32"
    form: Differentiation = Differentiation.DUAL
    hold: bool = True
    """Collate the examples once and keep them in memory, up to `HELD_EXAMPLES` of them."""
    compile: bool = False
    """Compile the product for the most common form of micro-batch; others, such as a smaller last one, run eagerly."""
    _fitting: list[int] = field(default_factory=list, repr=False, compare=False)
    """Numbers of vectors at a time that replaced larger ones in `matmat`."""
    _held: list[Any] = field(default_factory=list, repr=False, compare=False)
    _programs: dict[Any, CompiledProduct] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"precision must be 'fp32' or 'bf16', got {self.precision!r}.")

    @property
    def num_examples(self) -> int:
        """n, the number of examples that H is averaged over."""
        return len(self.data) if self.rows is None else len(self.rows)

    def batches(self) -> Iterator[Any]:
        """Yield the micro-batches, placed on the model's device."""
        if not self.hold or self.num_examples > HELD_EXAMPLES:
            yield from (self.task.place(batch.values) for batch in self.data.batches(self.rows))
            return
        if not self._held:
            self._held.extend(self._near(batch.values for batch in self.data.batches(self.rows)))
        yield from (self.task.place(values) for values in self._held)

    def _near(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Keep batches on the GPU up to a share of its free memory, because copying them is slow."""
        device = self.task.layout.device
        room = _HELD_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0.0
        for values in batches:
            room -= sum(tensor.nbytes for tensor in tensors_of(values))
            yield self.task.place(values) if room >= 0 else values

    def first_batch(self) -> Any:
        """Return the first micro-batch."""
        batches = self.batches()
        batch = next(batches)
        batches.close()  # type: ignore[attr-defined]
        return batch

    def matvec(self, v: Tensor) -> Tensor:  # (P,) -> (P,)
        """Return H·v; products are summed over examples and divided once, so batch sizes may differ."""
        return self._accumulate(v, self._one)

    def matmat(self, V: Tensor) -> Tensor:  # (Q, P) -> (Q, P)
        """Return H·v for every vector v in V, many at a time if the model supports vmap."""
        return torch.cat([self._accumulate(chunk, self._many) for chunk in V.split(_VECTORS_AT_ONCE)])

    def product_on(self, v: Tensor, batch: Any) -> Tensor:  # (P,) -> (P,)
        """Return the product of v with the *summed* curvature of one placed batch, without the regulariser."""
        return self.task.layout.flatten(self._one(self._tangents(v), batch))

    def _accumulate(self, v: Tensor, product: Callable[[Values, Any], Values]) -> Tensor:
        layout, tangents = self.task.layout, self._tangents(v)
        total = torch.zeros_like(v)
        parts = dict(zip(layout.names, total.split(layout.sizes, dim=-1), strict=True))
        for batch in self.batches():
            # Added parameter by parameter: flattening each product first would copy P numbers.
            found = product(tangents, batch)
            for name, part in parts.items():
                part.add_(found[name].reshape(part.shape))
        total /= self.num_examples
        for name, part in parts.items():
            if self.task.l2[name]:
                part.add_(tangents[name].reshape(part.shape), alpha=self.task.l2[name])
        return total

    def _tangents(self, v: Tensor) -> dict[str, Tensor]:
        parts = self.task.layout.unflatten(v)
        if self.form is not Differentiation.DUAL:
            return parts
        # Dual numbers would copy a tangent that is a view of a larger tensor every time: copy it once.
        return {name: part.clone() for name, part in parts.items()}

    def _product(self, tangents: Values, batch: Any) -> Values:
        return product_of(self.kind, self.form, self.precision)(self.task, self.task.params, tangents, batch)

    def _one(self, tangents: Values, batch: Any) -> Values:
        if not self.compile:
            return self._product(tangents, batch)
        key = self.kind, self.form, self.precision
        if key not in self._programs:
            usual = Counter(signature(values) for values in self._held).most_common(1)
            dtype = torch.bfloat16 if self.precision == "bf16" else self.task.layout.dtype
            self._programs[key] = CompiledProduct(product_of(*key), usual[0][0] if usual else None, dtype)
        return self._programs[key](self.task, self.task.params, tangents, batch)

    def _many(self, tangents: Values, batch: Any) -> Values:
        count = len(next(iter(tangents.values())))
        while self.form is not Differentiation.REVERSE and (at_once := min([count, *self._fitting])) > 1:
            found = self._together(tangents, batch, at_once)
            if found is not None:
                return found
            # What did not fit is not tried again on other batches.
            self._fitting.append(at_once // 2)
        each = [self._product({name: t[i] for name, t in tangents.items()}, batch) for i in range(count)]
        return {name: torch.stack([product[name] for product in each]) for name in tangents}

    def _together(self, tangents: Values, batch: Any, at_once: int) -> Values | None:
        """Multiply several vectors in one pass; return None if that does not fit in memory or is not supported."""
        product = product_of(self.kind, Differentiation.FORWARD, self.precision)
        try:
            return vmap(lambda t: product(self.task, self.task.params, t, batch), chunk_size=at_once)(tangents)
        except torch.OutOfMemoryError:
            pass
        except RuntimeError:  # some operations of the model have no batching rule: one vector at a time
            self._fitting.append(1)
        if self.task.layout.device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def working_form(curvature: Curvature, batch: Any) -> Differentiation:
    """Return the first form of differentiation that the model supports, tested on one batch."""
    probe = torch.ones_like(curvature.task.vector)
    return first_supported(
        Differentiation,
        lambda form: replace(curvature, form=form, compile=False).product_on(probe, batch),
        lambda form: form.value,
        f"{type(curvature.task.model).__name__} cannot be differentiated twice. {{}} | Replace operations without "
        "derivatives, or leave out the parameters that they depend on (params=...); load Hugging Face models with "
        "attn_implementation='eager'.",
    )


def compiling_pays(curvature: Curvature, steps: int, seconds: float) -> bool:
    """Return whether compiling pays for `steps` products of so many seconds; never on a CPU, where it saves little."""
    if curvature.task.layout.device.type != "cuda":
        return False
    return pays(seconds, steps, len(curvature.task.layout.names))


def product_seconds(curvature: Curvature) -> float:
    """Measure the time of an eager product on one batch, after it has run once, and scale it to all examples."""
    batch, device = curvature.first_batch(), curvature.task.layout.device
    curvature = replace(curvature, compile=False)
    v = torch.ones_like(curvature.task.vector)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    curvature.product_on(v, batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * -(-curvature.num_examples // length_of(batch))
