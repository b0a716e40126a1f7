"""Read CIFAR-10 from NumPy files in which pixels are stored as differences between neighbours and colours."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of each colour over the training images, of pixels from 0 to 1."""


def read_cifar_shard(path: Path) -> tuple[Tensor, Tensor]:  # (5000, 3, 32, 32), (5000,)
    """Decode one file; return images of mean 0 and variance 1, and their classes."""
    with np.load(path) as file:
        pixels = np.cumsum(np.cumsum(file["d"], 2, dtype=np.uint8), 3, dtype=np.uint8)
        labels = torch.from_numpy(file["y"].astype(np.int64))
    pixels[:, [0, 2]] += pixels[:, 1:2]
    return normalised(pixels), labels


def normalised(pixels: np.ndarray) -> Tensor:  # (N, 3, 32, 32) uint8 -> (N, 3, 32, 32)
    """Scale pixels so that each colour has mean 0 and variance 1 over the training images."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (torch.from_numpy(pixels).float() / 255 - mean) / std
