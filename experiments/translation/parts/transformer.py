"""Transformer Base for translation, and its training.

The paper's sizes: 6 + 6 blocks, 512 wide, 8 heads, 2,048 in between, one embedding of 32k subwords for source, target
and output. As in the example of Flax that the paper names (examples/wmt): norms first and one after the last block,
sinusoids as positions, ReLU, Adam with β = (0.9, 0.98), ε = 1e-9 and no weight decay, label smoothing 0.1, warm-up over
1,000 steps and then one over the square root of the steps; pairs are packed into rows of up to 256 tokens.

What differs from that example:

- The amount of training: a fraction of the pairs and tokens, so the rate peaks at 0.001 and not 0.002, and gradients
  longer than 1 are shortened.
- Dropout is 0.3, not 0.1: there are so few pairs that the network soon knows them by heart. It acts on embeddings and
  on what each layer adds, not also on attention weights and between the two layers of a feed-forward block.
- Attention has biases, norms add 1e-5 and not 1e-6 to the variance, matrices begin as PyTorch draws them and not by
  Xavier's rule, and the slowest sinusoid is a little faster.
- The embedding is kept √512 times smaller and multiplied by that on the way in, where the example divides the logits
  by it: the same network, but the embedding learns faster, and weighs more in a gradient.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared.kept import keep
from experiments.shared.repeatable import repeatable
from experiments.translation.parts.corpora import LONGEST, PAD, Pairs
from experiments.translation.parts.packing import Side, batches, logits_of, packed
from harness.models import Transformer


@dataclass(frozen=True)
class Recipe:
    """Size and training: Adam, linear warm-up, then inverse square root."""

    width: int = 512
    depth: int = 6
    heads: int = 8
    words: int = 32_000
    steps: int = 2000
    """Number of steps; at the default size, 20 epochs of the training pairs."""
    tokens: int = 16_384
    """Number of tokens of a batch, on each side, including padding."""
    row: int = 256
    """Number of tokens of a row, in which as many pairs as fit are packed."""
    lr: float = 1e-3
    warm_up: int = 1000
    dropout: float = 0.3
    """Dropout of embeddings and of the output of each layer."""
    smoothing: float = 0.1
    """Label smoothing, in training only: scored losses have none."""
    save_every: int = 1000


def make_transformer(recipe: Recipe, device: torch.device, seed: int) -> Transformer:
    """Build the network with random weights; the default size has 60.5M parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(
            recipe.width,
            recipe.depth,
            recipe.heads,
            words=recipe.words,
            longest=LONGEST,
            norm_first=True,
            dropout=recipe.dropout,
        )
    return model.to(device)


def train_transformer(
    model: Transformer,
    pairs: Pairs,
    recipe: Recipe,
    seed: int,
    unfinished: Path | None = None,
    after: Callable[[int], None] = lambda steps: None,
    *,
    record: bool = True,
) -> None:
    """Train in place on the device of the pairs.

    Training is deterministic: on the same kind of device, equal seeds give bitwise equal weights.

    Args:
        model: The network with its initial weights.
        pairs: The training pairs.
        recipe: The hyperparameters.
        seed: Seed of the order and of dropout.
        unfinished: A file to which the state is saved regularly, and from which the same call resumes.
        after: Called with the number of steps done, after each of them. It may leave the model in eval mode and draw
            random numbers: neither changes the training.
        record: On a GPU, record a step as a CUDA graph and replay it: the same numbers in less time.
    """
    device = pairs.source.device
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), eps=1e-9, fused=on_gpu)
    begin = _resumed(model, optimizer, unfinished)
    gradients = _Gradients(model, recipe.smoothing, record and on_gpu)
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        drawn = batches(pairs, recipe.row, recipe.tokens, seed)
        for step, plan in enumerate(islice(drawn, begin, recipe.steps), start=begin):
            # Dropout is seeded per step, so that a resumed training gives the same numbers.
            torch.manual_seed(seed * 1_000_003 + step)
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * rate(step + 1, recipe.warm_up)
            gradients(*packed(pairs, plan))
            optimizer.step()
            if unfinished is not None and (step + 1) % recipe.save_every == 0 and step + 1 < recipe.steps:
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                keep(unfinished, state)
            after(step + 1)
    optimizer.zero_grad(set_to_none=True)
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)


class _Gradients:
    """Computes the gradient of a batch, clipped by its norm.

    A small network's step is thousands of kernels that take longer to launch one by one than to run. So all of a step
    are recorded, once a shape of batch has come a few times, and launched as one from then on. Most batches are of one
    shape; the last of a pass has fewer rows.
    """

    BEFORE = 3
    """Number of eager steps of a shape before it is recorded: libraries allocate memory in the first."""

    def __init__(self, model: Transformer, smoothing: float, record: bool) -> None:
        self.model, self.smoothing, self.record = model, smoothing, record
        self.seen: Counter[torch.Size] = Counter()
        self.recordings: dict[torch.Size, _Recording] = {}
        # Only one is replayed at a time, so all share one memory pool.
        self.pool = torch.cuda.graph_pool_handle() if record else None

    def __call__(self, source: Side, target: Side) -> None:
        shape = source.tokens.shape
        self.seen[shape] += 1
        if self.record and self.seen[shape] == self.BEFORE + 1:
            self.recordings[shape] = _Recording(self.plain, self.model, self.pool, source, target)
        if shape in self.recordings:
            self.recordings[shape].play(source, target)
        else:
            self.plain(source, target)

    def plain(self, source: Side, target: Side) -> None:
        """Run a step eagerly."""
        with repeatable():
            loss = _loss(self.model, source, target, self.smoothing)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class _Recording:
    """A CUDA graph of a function of a batch, replayed for other batches of the same shape."""

    def __init__(self, work: Callable[[Side, Side], None], model: nn.Module, pool: Any, *sides: Side) -> None:
        # The graph always reads these tensors and writes those gradients.
        self.read = tuple(Side(*(tensor.clone() for tensor in side)) for side in sides)
        self.parameters = list(model.parameters())
        self.graph = torch.cuda.CUDAGraph()
        # Existing gradients would be accumulated to.
        model.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph, pool):
            work(*self.read)
        self.written = [parameter.grad for parameter in self.parameters]

    def play(self, *sides: Side) -> None:
        for place, tensor in zip(chain(*self.read), chain(*sides), strict=True):
            place.copy_(tensor)
        # Replays use the generator's current seed.
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.written, strict=True):
            parameter.grad = gradient


def rate(step: int, warm_up: int) -> float:
    """Return the learning rate of a step, counted from 1, relative to the highest."""
    return min(step / warm_up, math.sqrt(warm_up / step))


def _loss(model: Transformer, source: Side, target: Side, smoothing: float) -> Tensor:
    casting = torch.autocast("cuda", torch.bfloat16) if source.tokens.is_cuda else nullcontext()
    with casting:
        logits = logits_of(model, source, target)
    labels = target.tokens.flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=PAD, label_smoothing=smoothing)


def _resumed(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path | None) -> int:
    """Restore the saved state of a training; return the number of finished steps."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def held_out(model: nn.Module, pairs: Pairs, tokens: int = 16_384) -> dict[str, float]:
    """Measure the loss per token, in nats, and the accuracy of next tokens given the true previous ones."""
    model.eval()
    order = np.argsort(-pairs.lengths, kind="stable")
    total, right, start = 0.0, 0, 0
    with torch.no_grad():
        while start < len(order):
            count = max(1, tokens // int(pairs.lengths[order[start]]))
            source, before, target = pairs.batch(order[start : start + count])
            logits = model(source, before, source != PAD).flatten(0, 1)
            labels = target.flatten()
            total += float(F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum"))
            right += int(((logits.argmax(dim=1) == labels) & (labels != PAD)).sum())
            start += count
    number = int(pairs.target_lengths.sum())
    return {"loss": total / number, "accuracy": 100 * right / number}
