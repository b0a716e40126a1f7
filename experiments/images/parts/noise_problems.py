"""Networks trained with some wrong labels: embedded digits, and CIFAR-10 with human labels."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eigentrace.demo.digits import load_digits, relabel
from harness.cifar import read_cifar_shard

NUM_CLASSES = 10
_EVAL_BATCH = 1000
_COLUMNS = {"aggre": "aggre_label", "worse": "worse_label"} | {f"random{k}": f"random_label{k}" for k in (1, 2, 3)}


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 0.0
    augment: bool = False
    """Random flips and shifts by up to four pixels."""
    cosine: bool = False
    """Warm up for a tenth of the steps, then decay the learning rate to zero along a cosine; constant otherwise."""


@dataclass(frozen=True)
class Problem:
    """Examples with given labels, which of these are wrong, and how to train on them."""

    title: str
    inputs: Tensor
    labels: Tensor  # (N,)
    is_wrong: Tensor  # (N,) bool
    test_inputs: Tensor
    test_labels: Tensor  # true labels
    network: Callable[[], nn.Module]
    recipe: Recipe

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.inputs.device


def digits(seed: int, *, small: bool) -> Problem:
    """The embedded digits, a fifth relabeled uniformly, and a multilayer perceptron that memorises them."""
    found = load_digits()
    size = 600 if small else len(found.train_labels)
    noisy = relabel(found.train_labels[:size], 0.2, NUM_CLASSES, torch.Generator().manual_seed(seed))
    return Problem(
        title="digits, 20% relabeled, memorised",
        inputs=found.train_images[:size].flatten(1),
        labels=noisy.labels,
        is_wrong=noisy.is_wrong,
        test_inputs=found.test_images.flatten(1),
        test_labels=found.test_labels,
        network=lambda: nn.Sequential(
            nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)
        ),
        recipe=Recipe(epochs=30 if small else 100, batch_size=128, lr=0.1),
    )


@dataclass(frozen=True)
class Size:
    """Sizes of CIFAR-10, network and training."""

    examples: int = 15_000
    width: int = 48
    epochs: int = 60
    batch_size: int = 256


REDUCED = Size(examples=4000, width=24, epochs=40)
SMALL = Size(examples=400, width=8, epochs=4, batch_size=64)


def cifar(folder: Path, device: torch.device, labels: str, size: Size, *, augment: bool) -> Problem:
    """CIFAR-10 with human labels and a small residual network, trained with augmentation or to memorisation."""
    shards = [f"cifar10_train_{start:05d}.npz" for start in range(0, size.examples, 5000)]
    inputs = torch.cat([read_cifar_shard(folder / shard)[0] for shard in shards])[: size.examples]
    count = len(inputs)
    with np.load(folder / "cifar10n_labels_00000_14999.npz") as found:
        given = torch.from_numpy(found[_COLUMNS[labels]].astype(np.int64))[:count]
        true = torch.from_numpy(found["clean_label"].astype(np.int64))[:count]
    test_inputs, test_labels = read_cifar_shard(folder / "cifar10_test_00000.npz")
    recipe = Recipe(size.epochs, size.batch_size, 0.1, 5e-4 if augment else 0.0, augment, cosine=True)
    placed = partial_to(device)
    return Problem(
        title=f"CIFAR-10, human labels ({labels}), " + ("augmentation" if augment else "memorised") + _note(size),
        inputs=placed(inputs),
        labels=placed(given),
        is_wrong=given != true,
        test_inputs=placed(test_inputs),
        test_labels=placed(test_labels),
        network=lambda: ResNet(size.width),
        recipe=recipe,
    )


def _note(size: Size) -> str:
    return "" if size == Size() else f" (width {size.width}, {size.epochs} epochs)"


def partial_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that moves tensors to a device, images in the fastest layout for convolutions."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4 and device.type == "cuda":
            return tensor.to(device, memory_format=torch.channels_last)
        return tensor.to(device)

    return move


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - what it does is the class's description
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(h)) + self.around(x))


class ResNet(nn.Module):
    """Three stages of one residual block each: eight weight layers, 691,258 parameters at width 48."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - what it does is the class's description
        h = self.stages(F.relu(self.stem_norm(self.stem(x))))
        return self.head(h.mean(dim=(2, 3)))


def train(
    problem: Problem,
    rows: Tensor,
    seed: int,
    on_epoch: Callable[[nn.Module, int], None] = lambda model, epoch: None,
) -> nn.Module:
    """Train on some rows, with all randomness from the seed. `on_epoch` is called with the model after each epoch."""
    recipe, device = problem.recipe, problem.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = problem.network().to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=0.9, nesterov=recipe.cosine, weight_decay=recipe.weight_decay
    )
    per_epoch = math.ceil(len(rows) / recipe.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(recipe, per_epoch * recipe.epochs))
    rows = rows.to(device)
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        for chosen in rows[torch.randperm(len(rows), generator=generator, device=device)].split(recipe.batch_size):
            inputs = problem.inputs[chosen]
            inputs = augmented(inputs, generator) if recipe.augment else inputs
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(inputs), problem.labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        on_epoch(model, epoch)
    optimizer.zero_grad(set_to_none=True)
    model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model.eval()


def _schedule(recipe: Recipe, steps: int) -> Callable[[int], float]:
    def share(step: int) -> float:
        if not recipe.cosine:
            return 1.0
        done = step / steps
        return done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))

    return share


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each image with probability 1/2, and shift it by up to four pixels in both dimensions."""
    size, side = len(images), images.shape[-1]
    flip = torch.rand(size, generator=generator, device=images.device) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, size), generator=generator, device=images.device)
    along = torch.arange(side, device=images.device)
    index = torch.arange(size, device=images.device)[:, None, None]
    taken = padded.permute(0, 2, 3, 1)[index, (down[:, None] + along)[:, :, None], (right[:, None] + along)[:, None]]
    return taken.permute(0, 3, 1, 2)


@torch.no_grad()
def losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:  # (N,)
    """Return the loss of each example."""
    parts = zip(inputs.split(_EVAL_BATCH), labels.split(_EVAL_BATCH), strict=True)
    return torch.cat([F.cross_entropy(model(x).float(), y, reduction="none") for x, y in parts])


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of examples whose predicted class is the label."""
    hits = [
        (model(x).argmax(1) == y) for x, y in zip(inputs.split(_EVAL_BATCH), labels.split(_EVAL_BATCH), strict=True)
    ]
    return torch.cat(hits).double().mean().item()


def cross_validated(problem: Problem, folds: int, seed: int) -> Tensor:  # (N,)
    """Return each example's loss under a network trained without its fold."""
    order = torch.randperm(len(problem), generator=torch.Generator().manual_seed(seed))
    found = torch.empty(len(problem), device=problem.device)
    for number, left_out in enumerate(order.chunk(folds)):
        kept = torch.ones(len(problem), dtype=torch.bool)
        kept[left_out] = False
        model = train(problem, kept.nonzero()[:, 0], seed + 1 + number)
        rows = left_out.to(problem.device)
        found[rows] = losses(model, problem.inputs[rows], problem.labels[rows])
    return found


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state on the CPU."""
    return {name: value.cpu().contiguous() for name, value in copy.deepcopy(model.state_dict()).items()}
