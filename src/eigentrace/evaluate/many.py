"""Training many small networks at once, with the same result as training each alone."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from eigentrace.errors import InputError
from eigentrace.evaluate.stacked import SGD, FusedStack, MappedStack, OutputLoss, Stack, State, plain_layers
from eigentrace.evaluate.subsets import TrainingJob
from eigentrace.evaluate.training import recipe_as_json, tensor_hash
from eigentrace.progress import track
from eigentrace.settings import check_counts, counted, settings_of

Initialise = Callable[[nn.Module, int], None]
Engine = Literal["auto", "fused", "mapped"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# More models at once were not faster on a CPU, because they do not fit its caches.
_AT_ONCE_ON_CPU = 16
_MOST_AT_ONCE = 1024


def reset(model: nn.Module, seed: int) -> None:
    """Reinitialise all weights by `reset_parameters` of each layer, in the order in which a constructor draws them."""
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(p.requires_grad for p in own):
            continue
        again = getattr(module, "reset_parameters", None)
        if again is None or not all(p.requires_grad for p in own):
            raise InputError(
                f"The weights of {name or 'the model'} ({type(module).__name__}) cannot be reinitialised: it has no "
                "`reset_parameters`, or only some of its weights are trained. Pass initialise=..., a function of the "
                "model and a seed."
            )
        again()


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:  # (B, classes), (B,) -> (B,)
    """Return the cross-entropy of each example."""
    return F.cross_entropy(outputs, labels, reduction="none")


def margin(outputs: Tensor, labels: Tensor) -> Tensor:  # (B, classes), (B,) -> (B,)
    """Return the log-odds log(p / (1 - p)) of each example's label."""
    own = outputs.gather(1, labels[:, None])
    rest = outputs.scatter(1, labels[:, None], -torch.inf)
    return own.squeeze(1) - rest.logsumexp(dim=1)


def probability(outputs: Tensor, labels: Tensor) -> Tensor:  # (B, classes), (B,) -> (B,)
    """Return the probability of each example's label."""
    return outputs.softmax(dim=1).gather(1, labels[:, None]).squeeze(1)


_SCORES: dict[str, OutputLoss] = {"margin": margin, "probability": probability}
"""Named measures that increase as a model improves."""


class ManyModels:
    """A trainer of many small networks at once, on subsets of a dataset, by stochastic gradient descent.

    A model's seed works like `torch.manual_seed(seed)` at the top of a script: it determines the weights, and then one
    `torch.randperm` of the model's examples per epoch. The result equals that of a plain training loop for each model,
    up to rounding. A faster implementation is used for `nn.Linear` layers with ReLU, tanh or sigmoid and cross-entropy.

    Args:
        model: The architecture of the networks; it is copied, not changed.
        train: Inputs and targets of the whole training set, each (N, ...), as a tuple or a `TensorDataset`.
        queries: Inputs and targets of the queries, in the same form.
        sgd: Settings of the optimiser.
        loss: `loss(outputs, targets) -> (B,)`; cross-entropy by default. Its mean over a batch is minimised.
        measure: What to measure for a query: "loss", "margin" (log-odds of its label), "probability" (of its label), or
            a function like `loss`.
        higher_is_worse: Whether a larger measured number is worse; by default false for "margin" and "probability".
        initialise: `initialise(model, seed)` sets the weights in place, after the global generator was seeded; by
            default, calls `reset_parameters` of every layer.
        at_once: Number of models to train together; by default, as many as fit in memory.
        device: Device to train on; by default, that of the inputs.
        engine: "fused" for the faster implementation, "mapped" for the general one, "auto" for "fused" if it supports
            the network, the loss and the data.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        queries: Any,
        sgd: SGD,
        *,
        loss: OutputLoss | None = None,
        measure: Literal["loss", "margin", "probability"] | OutputLoss = "loss",
        higher_is_worse: bool | None = None,
        initialise: Initialise | None = None,
        at_once: int | None = None,
        device: torch.device | str | None = None,
        engine: Engine = "auto",
    ) -> None:
        self._model = _template(model)
        self._dtype = next(p.dtype for p in self._model.parameters() if p.requires_grad)
        self._initialise, self._sgd = initialise or reset, sgd
        self._loss = loss or cross_entropy
        if measure not in ("loss", *_SCORES) and not callable(measure):
            raise InputError(f"measure must be 'loss', 'margin', 'probability' or a function, got {measure!r}.")
        self._measure = measure if callable(measure) else _SCORES.get(measure, self._loss)
        self.higher_is_worse = measure not in _SCORES if higher_is_worse is None else higher_is_worse
        pairs = [_pair(train, "train"), _pair(queries, "queries")]
        self._described = {"train": tensor_hash(*pairs[0]), "queries": tensor_hash(*pairs[1])}
        self._device = torch.device(device) if device is not None else pairs[0][0].device
        (self._x, self._y), (self._qx, self._qy) = ((self._placed(x), self._targets(y)) for x, y in pairs)
        self._layers = self._plan(engine)
        if at_once is not None:
            check_counts(1, at_once=at_once)
        self._at_once = at_once or self._fitting()

    def __repr__(self) -> str:
        size = f"{counted(len(self._x), 'example')}, {counted(len(self._qx), 'query')}"
        return f"<ManyModels: {type(self._model).__name__} on {size}, {self.at_once} at once>"

    @property
    def at_once(self) -> int:
        """Number of models to train together."""
        return self._at_once

    def check(self, num_train: int) -> None:
        """Raise InputError unless the trainer's training set has this size."""
        if num_train != len(self._x):
            raise InputError(
                f"The subsets are of {num_train} examples, but the trainer has {len(self._x)}: pass subsets of the "
                "trainer's training set."
            )

    def recipe(self) -> dict[str, Any]:
        """Describe everything that outputs depend on besides rows and seed."""
        own = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        # Weights that are reinitialised do not matter; all other tensors do.
        kept = [n for n, t in own.items() if self._initialise is not reset or not t.requires_grad]
        shapes = {name: f"{p.dtype} {tuple(p.shape)}" for name, p in own.items()}
        return {
            "trainer": "ManyModels",
            "model": " ".join(str(self._model).split()),
            "class": recipe_as_json(type(self._model)),
            "shapes": shapes,
            "kept": tensor_hash(*(own[n] for n in kept)) if kept else None,
            "sgd": settings_of(self._sgd),
            **{name: _named(f) for name, f in {"loss": self._loss, "measure": self._measure}.items()},
            "initialise": _named(self._initialise),
            **self._described,
        }

    def outputs(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        """Train one model per job, and measure each query with it."""
        found: list[Tensor | None] = [None] * len(jobs)
        sizes = {len(job.rows) for job in jobs}
        for size in sorted(sizes):
            places = [i for i, job in enumerate(jobs) if len(job.rows) == size]
            start = 0
            while start < len(places):
                chunk = places[start : start + self._at_once]
                try:
                    outputs = self._train([jobs[i] for i in chunk])
                except torch.OutOfMemoryError:
                    if len(chunk) == 1:
                        raise
                    self._at_once = len(chunk) // 2
                    torch.cuda.empty_cache()
                    continue
                for i, row in zip(chunk, outputs.cpu(), strict=True):
                    found[i] = row
                start += len(chunk)
        return torch.stack([row for row in found if row is not None])

    def start(self, seed: int) -> tuple[State, torch.Generator]:
        """Return a model's initial weights, and the generator that shuffles its examples."""
        model = copy.deepcopy(self._model)  # weights that `initialise` does not set are those passed
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._initialise(model, seed)
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
        return {name: tensor.detach() for name, tensor in model.named_parameters()}, generator

    def _train(self, jobs: Sequence[TrainingJob]) -> Tensor:  # (jobs, Q)
        states, generators = zip(*(self.start(job.seed) for job in jobs), strict=True)
        stack = self._stack(states)
        del states
        rows = torch.from_numpy(np.stack([job.rows for job in jobs]))  # (M, n)
        size = rows.shape[1]
        for _ in track(range(self._sgd.epochs), f"Training {len(jobs)} models", self._sgd.epochs):
            orders = torch.stack([torch.randperm(size, generator=g, device="cpu") for g in generators])
            for batch in rows.gather(1, orders).to(self._device).split(self._sgd.batch_size, dim=1):
                index = batch.flatten()
                stack.step(*(t.index_select(0, index).unflatten(0, batch.shape) for t in (self._x, self._y)))
        return torch.cat([self._measured(stack, part) for part in self._query_parts(len(jobs))], dim=1)

    @torch.no_grad()
    def _measured(self, stack: Stack, part: slice) -> Tensor:  # (M, q)
        outputs, targets = stack.outputs(self._qx[part]), self._qy[part]
        values = torch.stack([self._measure(own, targets) for own in outputs])
        if values.shape != (len(outputs), len(targets)):
            raise InputError(
                f"The queries must be measured by one number each, got shape {tuple(values.shape[1:])} for "
                f"{len(targets)} queries. Make `measure` return a tensor of shape (B,)."
            )
        return values

    def _query_parts(self, num_models: int) -> list[slice]:
        # M networks need as much memory for one query as for one example of a batch.
        step = max(self._sgd.batch_size, 65536 // num_models)
        return [slice(i, i + step) for i in range(0, len(self._qx), step)]

    def _stack(self, states: Sequence[State]) -> Stack:
        if self._layers is not None:
            return FusedStack(self._layers, states, self._sgd, self._device)
        return MappedStack(self._model, states, self._sgd, self._loss, self._device)

    def _placed(self, x: Tensor) -> Tensor:
        return x.to(self._device, self._dtype if x.is_floating_point() else x.dtype)

    def _targets(self, y: Tensor) -> Tensor:
        is_whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
        return y.to(self._device, torch.int64 if is_whole else y.dtype)

    def _plan(self, engine: Engine) -> Any:
        """Return the layers for the fused engine, or None if the mapped engine is to be used."""
        if engine not in ("auto", "fused", "mapped"):
            raise InputError(f"engine must be 'auto', 'fused' or 'mapped', got {engine!r}.")
        with torch.no_grad():
            shown = copy.deepcopy(self._model).to(self._device)(self._x[:1])
        if self._loss is cross_entropy or self._measure in _SCORES.values():
            for name, labels in {"train": self._y, "queries": self._qy}.items():
                _check_labels(name, labels, shown)
        if engine == "mapped":
            return None
        layers = plain_layers(self._model)
        flattens = isinstance(next(iter(self._model.children()), None), nn.Flatten)
        fits = self._loss is cross_entropy and (self._x.ndim == 2 or flattens) and self._x.is_floating_point()
        if engine == "fused" and (layers is None or not fits):
            raise InputError(
                "engine='fused' is for nn.Sequential of nn.Linear, ReLU, Tanh and Sigmoid on flat inputs, trained with "
                f"cross-entropy; it does not support this {type(self._model).__name__} with its loss and inputs. Use "
                "engine='auto'."
            )
        return layers if fits else None

    def _fitting(self) -> int:
        if self._device.type != "cuda":
            return _AT_ONCE_ON_CPU
        free, _ = torch.cuda.mem_get_info(self._device)
        num_params = sum(p.numel() for p in self._model.parameters())
        # Weights, velocity and gradient, and a batch with activations of several times its size. This aims at half of
        # the free memory; `outputs` tries fewer models if that is too much.
        numbers = 4 * num_params + self._sgd.batch_size * (4 * self._x[0].numel() + 4096)
        return int(min(max(free // 2 // (numbers * self._dtype.itemsize), 1), _MOST_AT_ONCE))


def _template(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            f"model must be a torch.nn.Module with trainable parameters, got {type(model).__name__}. Set requires_grad "
            "of the parameters to train."
        )
    for name, module in model.named_modules():
        if (isinstance(module, _DROPOUT) and module.p > 0) or getattr(module, "running_mean", None) is not None:
            raise InputError(
                f"{name or 'The model'} ({type(module).__name__}) draws random numbers or updates statistics in "
                "training, which ManyModels does not support. Remove it, or train with eigentrace.evaluate.Loop."
            )
    return copy.deepcopy(model).cpu().train()


def _pair(data: Any, name: str) -> tuple[Tensor, Tensor]:
    tensors = data.tensors if isinstance(data, TensorDataset) else data
    if not isinstance(tensors, list | tuple) or len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        raise InputError(
            f"{name} must be a tuple of two tensors (inputs, targets), or a TensorDataset, got {type(data).__name__}."
        )
    if not len(tensors[0]) or len(tensors[0]) != len(tensors[1]):
        raise InputError(
            f"{name} has {len(tensors[0])} inputs and {len(tensors[1])} targets: pass as many of each, at least one."
        )
    return tensors[0], tensors[1]


def _check_labels(name: str, labels: Tensor, shown: Tensor) -> None:
    if shown.ndim != 2 or labels.ndim != 1 or labels.is_floating_point():
        raise InputError(
            "Cross-entropy, margins and probabilities need outputs of shape (B, classes) and integer labels of shape "
            f"(B,), but the model returned shape {tuple(shown.shape)} for one example, and the targets of {name} are "
            f"{labels.dtype} {tuple(labels.shape)}. Pass loss=..., a function of outputs and targets."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= shown.shape[1]:
        raise InputError(
            f"The labels of {name} range from {low} to {high}, but the model has {shown.shape[1]} classes: expected "
            f"labels from 0 to {shown.shape[1] - 1}."
        )


def _named(function: Any) -> str:
    # Functions of this module are identified by name, so that caches stay valid when their source changes.
    return function.__name__ if function in (cross_entropy, margin, probability, reset) else recipe_as_json(function)
