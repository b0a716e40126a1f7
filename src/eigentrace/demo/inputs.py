"""Loading the demo's network and digits from its run; the run's request refers to `digits`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.demo.cnn import make_cnn
from eigentrace.demo.digits import NUM_CLASSES, load_digits
from eigentrace.demo.experiment import Trained
from eigentrace.disk.atomic import replacing
from eigentrace.disk.tensors import read_tensors, write_tensors
from eigentrace.formats.dataset_columns import class_of
from eigentrace.loading import Inputs
from eigentrace.loading.image_dataset import read_pixels
from eigentrace.loading.inputs import Example
from eigentrace.loading.settings_file import IN_RUN, RUN
from eigentrace.rendering import Tensors
from eigentrace.store.folder import REQUEST

FUNCTION = "eigentrace.demo.inputs:digits"
NETWORK = "network.safetensors"
CLASSES = tuple(str(digit) for digit in range(NUM_CLASSES))
_SIDE = 28
_LABELS = "given_labels"


def digits(folder: str) -> Inputs:
    """Create the demo's task and data from the network and the labels stored in its run.

    Args:
        folder: The run's directory.
    """
    kept = read_tensors(Path(folder) / NETWORK)
    labels = kept.pop(_LABELS)
    model = make_cnn(seed=0)
    model.load_state_dict(kept)
    known = load_digits()
    return _inputs(model.eval(), known.train_images[: len(labels)], labels, known.train_labels[: len(labels)])


def inputs_of(trained: Trained) -> Inputs:
    """Create the demo's task and data from a network that has just been trained."""
    return _inputs(trained.model, trained.images, trained.labels, trained.true_labels)


def request_of(run: Path, fit: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a run, from which its inputs can be loaded even after the run is moved.

    Args:
        run: The final directory of the run.
        fit: The settings of its fit.
    """
    asked = {"function": FUNCTION, "args": {"folder": IN_RUN}, "resolved": {RUN: str(run.resolve())}}
    return {"input": asked, "fit": fit, "score": {}}


def keep_request(folder: Path, request: dict[str, Any]) -> None:
    """Write the request of a run, which the commands of `eigentrace` read."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / REQUEST) as partial:
        partial.write_text(json.dumps(request, indent=2) + "\n")


def keep_network(folder: Path, trained: Trained) -> None:
    """Write the weights and the training labels into a run."""
    with replacing(folder / NETWORK) as partial:
        write_tensors(trained.model.state_dict() | {_LABELS: trained.labels}, partial)


def _inputs(model: nn.Module, images: Tensor, labels: Tensor, true_labels: Tensor) -> Inputs:
    return Inputs(
        et.classification(model),
        et.Data(TensorDataset(images, labels), batch_size=256),
        pa.table({"corrupted": (labels != true_labels).numpy(), "true_label": true_labels.numpy()}),
        show=Tensors(images, classes=CLASSES),
        read=new_digits,
    )


def new_digits(given: Sequence[Example]) -> et.Data:
    """Convert images of digits, of any size, and their labels to the form of the training data."""
    images = torch.stack([_as_digit(example["image"]) for example in given])
    labels = torch.tensor([class_of(example["label"], {}, NUM_CLASSES) for example in given])
    return et.Data(TensorDataset(images, labels))


def _as_digit(image: bytes | np.ndarray) -> Tensor:  # (1, 28, 28)
    pixels = read_pixels(image, "L") if isinstance(image, bytes) else image
    values = torch.from_numpy(pixels.copy()).float() / 255
    if values.ndim == 3:
        values = values[..., :3].mean(dim=2)
    # The network was trained on light digits on a dark background; on paper they are dark.
    edges = torch.cat([values[0], values[-1], values[:, 0], values[:, -1]])
    if edges.mean() > 0.5:
        values = 1 - values
    height, width = values.shape
    side = max(height, width)
    above, before = (side - height) // 2, (side - width) // 2
    around = (before, side - width - before, above, side - height - above)
    square = nn.functional.pad(values, around)[None, None]
    if side != _SIDE:
        square = nn.functional.interpolate(square, (_SIDE, _SIDE), mode="bilinear", antialias=True)
    return square[0]
