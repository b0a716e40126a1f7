"""The convolutional network of the paper's digit experiment, and its training."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from eigentrace.demo.digits import NUM_CLASSES
from eigentrace.errors import InputError

# Large enough to use two cores fully, small enough that the first layer's activations take less than 100 MB.
_EVAL_BATCH = 1000


def make_cnn(seed: int) -> nn.Sequential:
    """Build the paper's larger CNN, with 824,458 parameters and weights that depend only on `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 256),
            nn.ReLU(),
            nn.Linear(256, NUM_CLASSES),
        )


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int = 10,
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    generator: torch.Generator,
    checkpoint_epochs: Collection[int] = (),
    on_epoch: Callable[[int, float], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Train `model` in place by stochastic gradient descent with momentum, and leave it in eval mode.

    Args:
        model: Returns logits (B, classes).
        images: Inputs, (N, 1, 28, 28).
        labels: Classes, (N,).
        epochs: Number of passes over the data.
        batch_size: Examples per step; the last batch of an epoch may be smaller.
        lr: Learning rate.
        momentum: Momentum factor.
        generator: Shuffles the examples in every epoch.
        checkpoint_epochs: Epochs, counted from 1, after which to copy the weights.
        on_epoch: Called after each epoch with its number and the mean training loss during it.

    Returns:
        The weights, copied to the CPU, after each of `checkpoint_epochs` and after the last epoch, in order.

    Raises:
        InputError: If an epoch in `checkpoint_epochs` is not between 1 and `epochs`.
    """
    kept = {*checkpoint_epochs, epochs}
    if min(kept) < 1 or max(kept) > epochs:
        raise InputError(
            f"checkpoint_epochs are {sorted(kept - {epochs})}, but training has {epochs} epochs: train for at least "
            f"one epoch, and choose epochs between 1 and {epochs}."
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    checkpoints = []
    model.train()
    for epoch in range(1, epochs + 1):
        batches = torch.randperm(len(labels), generator=generator).split(batch_size)
        mean_loss = _train_epoch(model, optimizer, images, labels, batches)
        if epoch in kept:
            checkpoints.append({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
        if on_epoch is not None:
            on_epoch(epoch, mean_loss)
    model.zero_grad(set_to_none=True)
    model.eval()
    return checkpoints


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the percentage of images whose predicted class is the label."""
    with torch.no_grad():
        predictions = torch.cat([model(batch).argmax(dim=1) for batch in images.split(_EVAL_BATCH)])
    return 100 * (predictions == labels).double().mean().item()


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batches: Sequence[Tensor],
) -> float:
    total = 0.0
    for rows in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return total / len(labels)
