"""Datasets of images, preprocessed to pixel values for a model. Only this module imports PIL."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.errors import DataError, InputError
from eigentrace.formats.dataset_columns import is_text
from eigentrace.formats.records import Records
from eigentrace.loading.hugging_face import load_image_processor
from eigentrace.rendering.png import MOST_PIXELS

Prepare = Callable[[Any], np.ndarray]  # an image -> (channels, height, width)
# Formats of uploaded images that are decoded, and their maximum number of pixels.
_FROM_OUTSIDE = ("PNG", "JPEG", "WEBP")
_MOST_FROM_OUTSIDE = 1 << 24
# Settings that `Plain` implements, or that do not affect pixel values.
_FOLLOWED = {
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_convert_rgb", "image_processor_type", "feature_extractor_type", "processor_class",
    "_valid_processor_keys", "data_format", "input_data_format", "return_tensors", "device", "default_to_square",
}  # fmt: skip
# Processors with no other steps than these. The settings must state each step, because defaults depend on the class.
_THREE = {"do_resize", "do_rescale", "do_normalize"}
_STEPS = {
    "ViTImageProcessor": _THREE,
    "SiglipImageProcessor": _THREE,
    "DeiTImageProcessor": _THREE | {"do_center_crop"},
    "CLIPImageProcessor": _THREE | {"do_center_crop"},
}


@dataclass(frozen=True)
class ImageDataset:
    """A map-style torch dataset of pixel values and labels."""

    records: Records
    column: str
    folder: Path
    """The folder that paths in the dataset are relative to."""
    prepare: Prepare
    labels: np.ndarray  # (N,)
    mode: str = "RGB"

    def __len__(self) -> int:
        return len(self.records)

    def all_labels(self) -> np.ndarray:  # (N,)
        """Return the class of every row."""
        return self.labels

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return several examples, as torch's DataLoader requests a batch."""
        stored = self.records.read(rows, [self.column]).column(0).to_pylist()
        return [
            {"pixel_values": self._pixels(row, image), "labels": int(self.labels[row])}
            for row, image in zip(rows, stored, strict=True)
        ]

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch of stacked examples."""
        pixels = torch.from_numpy(np.stack([example["pixel_values"] for example in examples]))
        return {"pixel_values": pixels, "labels": torch.tensor([example["labels"] for example in examples])}

    def _pixels(self, row: int, stored: Any) -> np.ndarray:
        return self.prepare(_opened(self, row, stored).convert(self.mode))


@dataclass(frozen=True)
class Pictures:
    """Images of a dataset by row, as Pillow images no larger than on the page."""

    records: Records
    column: str
    folder: Path
    """The folder that paths in the dataset are relative to."""

    def __call__(self, row: int) -> Any:
        """Open the image of one row."""
        (stored,) = self.records.read([row], [self.column]).column(0).to_pylist()
        return _opened(self, row, stored, MOST_PIXELS)


def _opened(files: ImageDataset | Pictures, row: int, stored: Any, most: int | None = None) -> Any:
    """Open the image of a row, rotated by its EXIF orientation, with both sides of at most `most` pixels."""
    pillow = _pillow()
    where = f"{row} of {files.records.name} (counted from 0)"
    data, path = _parts(stored)
    if data is None and path is None:
        raise DataError(f"Row {where} has no image in {files.column!r}.")
    place = files.folder / str(path)
    try:
        if data is None:
            check_regular(place)
        with pillow.Image.open(place if data is None else io.BytesIO(data)) as opened:
            if most is not None:
                opened.thumbnail((most, most))
            return pillow.ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError, ValueError, pillow.Image.DecompressionBombError) as error:
        raise DataError(
            f"The image of row {where} cannot be read: {error} | Paths are relative to {files.folder}."
        ) from None


def read_pixels(data: bytes, mode: str = "RGB") -> np.ndarray:  # (H, W) or (H, W, channels) uint8
    """Decode an uploaded image, which must be a PNG, JPEG or WebP file of at most 2²⁴ pixels.

    Raises:
        InputError: If the file has another format, is damaged or has more pixels; the size is read from its header.
    """
    pillow, size = _pillow(), "more"
    try:
        with pillow.Image.open(io.BytesIO(data), formats=_FROM_OUTSIDE) as opened:
            if opened.width * opened.height <= _MOST_FROM_OUTSIDE:
                return np.asarray(pillow.ImageOps.exif_transpose(opened).convert(mode))
            size = f"{opened.width}×{opened.height}"
    except (pillow.Image.DecompressionBombWarning, pillow.Image.DecompressionBombError):
        pass
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"The image cannot be read: {error}. Pass a PNG, JPEG or WebP file.") from None
    raise InputError(f"The image must have at most 2²⁴ pixels, got {size}. Resize it.")


def check_images(records: Records, column: str) -> None:
    """Raise InputError unless a column contains paths, bytes, or both as the `datasets` package stores them."""
    kind = records.schema.field(column).type
    names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    if not (is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or {"bytes", "path"} <= names):
        raise InputError(
            f"Column {column!r} of {records.name} must contain paths, bytes of image files, or both as the `datasets` "
            f"package stores them, got {kind}. Choose another column with image."
        )


def preparation(folder: Path) -> Prepare:
    """Return a function that converts an image to pixel values by the model folder's preprocessor_config.json.

    Common settings are implemented by `Plain`, with the same results as the folder's image processor, whose classes
    import torchvision if it is installed. Other settings use that processor.
    """
    _pillow()
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        raise InputError(
            f"{folder} has no preprocessor_config.json, so the size and scale of its images are unknown. Save the "
            "image processor that the model was trained with in this folder (processor.save_pretrained)."
        )
    try:
        settings = read_json(path)
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}. Save the image processor again.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path} is damaged: it must contain a JSON object. Save the image processor again.")
    if _is_plain(settings):
        return Plain(settings)
    return Processed(load_image_processor(folder))


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Return whether `Plain` implements the settings: all steps are stated, and no others are used."""
    kind = str(settings.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if kind not in _STEPS or not settings.keys() <= _FOLLOWED or not settings.keys() >= _STEPS[kind]:
        return False
    needed = {
        "do_resize": ("size", "resample"),
        "do_center_crop": ("crop_size",),
        "do_normalize": ("image_mean", "image_std"),
    }
    spelled = all(name in settings for on, names in needed.items() if settings.get(on) for name in names)
    boxes = {"size": ({"height", "width"}, {"shortest_edge"}), "crop_size": ({"height", "width"},)}
    told = {name: settings[name] for name in boxes if settings.get(name) is not None}
    return spelled and all(isinstance(box, Mapping) and set(box) in boxes[name] for name, box in told.items())


@dataclass(frozen=True)
class Plain:
    """The common image preprocessing: resize, centre crop, rescale, normalise."""

    settings: Mapping[str, Any]

    def __call__(self, image: Any) -> np.ndarray:  # (channels, height, width)
        """Return the pixel values of one image."""
        told = self.settings
        if told["do_resize"]:
            image = image.resize(_new_size(image.size, told["size"]), told["resample"])
        pixels = np.atleast_3d(np.asarray(image))  # (height, width, channels)
        if told.get("do_center_crop"):
            pixels = _middle(pixels, told["crop_size"])
        if told["do_rescale"]:
            pixels = (pixels.astype(np.float64) * told.get("rescale_factor", 1 / 255)).astype(np.float32)
        if told["do_normalize"]:
            mean, std = (np.asarray(told[name], np.float32) for name in ("image_mean", "image_std"))
            pixels = (pixels - mean) / std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


@dataclass(frozen=True)
class Processed:
    """Preprocessing by the model folder's image processor, one image at a time."""

    processor: Any

    def __call__(self, image: Any) -> np.ndarray:  # (channels, height, width)
        """Return the pixel values of one image."""
        return np.asarray(self.processor(image, return_tensors="np")["pixel_values"][0], dtype=np.float32)


def _new_size(size: tuple[int, int], wanted: Mapping[str, int]) -> tuple[int, int]:
    if "height" in wanted:
        return wanted["width"], wanted["height"]
    short, long = sorted(size)
    edge = wanted["shortest_edge"]
    other = int(edge * long / short)
    return (edge, other) if size[0] <= size[1] else (other, edge)


def _middle(pixels: np.ndarray, wanted: Mapping[str, int]) -> np.ndarray:
    """Return the centre crop, with images that are too small padded by zeros."""
    height, width = wanted["height"], wanted["width"]
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    missing = [max(0, -top), max(0, -left)]
    pixels = np.pad(pixels, [(missing[0], missing[0] + 1), (missing[1], missing[1] + 1), (0, 0)])
    return pixels[top + missing[0] :, left + missing[1] :][:height, :width]


def _parts(stored: Any) -> tuple[bytes | None, str | None]:
    if isinstance(stored, Mapping):
        return stored.get("bytes"), stored.get("path")
    return (stored, None) if isinstance(stored, bytes) else (None, stored)


def _pillow() -> ModuleType:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ModuleNotFoundError:
        raise InputError(
            'Images need the package pillow, which is not installed. In the clone, run: pip install -e ".[images]"'
        ) from None
    return PIL
