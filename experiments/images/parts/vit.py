"""A small vision transformer, and its training from scratch on small images."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.images.parts.cifar import NUM_CLASSES
from experiments.images.parts.noise_problems import augmented
from harness.models import ViT


@dataclass(frozen=True)
class Recipe:
    """Size and training: AdamW, warm-up for a tenth of the steps, then a cosine to zero."""

    width: int = 128
    depth: int = 6
    heads: int = 4
    patch: int = 4
    epochs: int = 80
    batch_size: int = 500
    lr: float = 1e-3
    weight_decay: float = 0.05
    augment: bool = True
    """Random flips, and shifts by up to four pixels."""


def make_vit(recipe: Recipe, device: torch.device, seed: int) -> nn.Module:
    """Build the network with random weights; the default size has 1,205,898 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViT(recipe.width, recipe.depth, recipe.heads, image=32, patch=recipe.patch, classes=NUM_CLASSES)
    return model.to(device)


def train_vit(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, seed: int) -> None:
    """Train in place on the device of the images; the seed determines order and augmentation."""
    device = images.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=device.type == "cuda"
    )
    steps = recipe.epochs * math.ceil(len(labels) / recipe.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(labels), generator=generator, device=device).split(recipe.batch_size):
            inputs = augmented(images[rows], generator) if recipe.augment else images[rows]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(inputs), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    optimizer.zero_grad(set_to_none=True)
