"""A residual network for a few hundred photos, and its training with augmentation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.images.parts.noise_problems import ResNet


@dataclass(frozen=True)
class Recipe:
    """Size and training: SGD with momentum, and a learning rate that decays to zero along a cosine."""

    width: int = 32
    epochs: int = 150
    batch_size: int = 64
    lr: float = 0.05
    weight_decay: float = 5e-4
    side: int = 64
    """Size of the network's input in pixels."""
    least_area: float = 0.25
    """Smallest share of the photo in a crop."""
    seed: int = 0


def train_photos(model: ResNet, photos: Tensor, labels: Tensor, recipe: Recipe) -> None:  # (N, 3, h, w), (N,)
    """Train in place on the device of the photos, with all randomness from the recipe's seed."""
    generator = torch.Generator(photos.device).manual_seed(recipe.seed)
    optimizer = torch.optim.SGD(model.parameters(), recipe.lr, 0.9, weight_decay=recipe.weight_decay, nesterov=True)
    model.train()
    for epoch in range(recipe.epochs):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs))
        order = torch.randperm(len(photos), generator=generator, device=photos.device)
        for rows in order.split(recipe.batch_size):
            loss = F.cross_entropy(model(changed(photos[rows], recipe, generator)), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()


def make_network(recipe: Recipe) -> ResNet:
    """Build the network without changing the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return ResNet(recipe.width)


def seen(photos: Tensor, side: int) -> Tensor:  # (N, 3, h, w) -> (N, 3, side, side)
    """Return photos as used in evaluation: resized, not cropped."""
    return F.interpolate(photos, (side, side), mode="bilinear", antialias=True, align_corners=False)


def changed(photos: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:  # (B, 3, h, w) -> (B, 3, side, side)
    """Crop, stretch and mirror each photo, and change its brightness and contrast, at random."""
    count = len(photos)

    def draw(low: float, high: float) -> Tensor:  # (B,)
        return low + (high - low) * torch.rand(count, generator=generator, device=photos.device)

    zoom, stretch = draw(recipe.least_area, 1.0).sqrt(), torch.exp(draw(-0.2, 0.2))
    across, down = (zoom * stretch).clamp_max(1.0), (zoom / stretch).clamp_max(1.0)
    mirror = torch.where(draw(0.0, 1.0) < 0.5, -1.0, 1.0)
    rows = torch.zeros(count, 2, 3, device=photos.device)
    rows[:, 0, 0], rows[:, 0, 2] = across * mirror, (1 - across) * draw(-1.0, 1.0)
    rows[:, 1, 1], rows[:, 1, 2] = down, (1 - down) * draw(-1.0, 1.0)
    grid = F.affine_grid(rows, [count, 3, recipe.side, recipe.side], align_corners=False)
    crops = F.grid_sample(photos, grid, align_corners=False, padding_mode="border")
    contrast, brightness = (values[:, None, None, None] for values in (draw(0.7, 1.3), draw(-0.3, 0.3)))
    return contrast * crops + brightness
