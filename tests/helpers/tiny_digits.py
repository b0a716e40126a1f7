"""Task and data of `pages.digit_run`, for commands that load this file by its path."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.demo.digits import load_digits
from eigentrace.demo.inputs import CLASSES, new_digits
from eigentrace.loading import Inputs
from eigentrace.rendering import Tensors

COUNT = 200


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * 7 * 7, 10)
    )


def make(folder: str) -> Inputs:
    """Return the task and the data."""
    kept = load_file(Path(folder) / "network.safetensors")
    labels = kept.pop("given_labels")
    model = network()
    model.load_state_dict(kept)
    digits = load_digits()
    images, true_labels = digits.train_images[:COUNT], digits.train_labels[:COUNT]
    ids = [f"digit-{row:03}" for row in range(COUNT)]
    columns = {
        "corrupted": (labels != true_labels).numpy(),
        "true_label": true_labels.numpy(),
        "scanner": np.where(np.arange(COUNT) % 3 == 0, "old", "new"),
    }
    return Inputs(
        et.classification(model.eval()),
        et.Data(TensorDataset(images, labels), batch_size=50, ids=ids),
        pa.table(columns),
        show=Tensors(images, classes=CLASSES),
        read=new_digits,
    )
