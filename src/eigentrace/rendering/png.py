"""Conversion of arrays, tensors and Pillow images to small PNG files, without importing Pillow."""

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from eigentrace.errors import InputError

SIGNATURE = b"\x89PNG\r\n\x1a\n"


MOST_PIXELS = 512
"""Maximum width and height of an image on the page, in pixels."""


_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Scale:
    """The values that are rendered as black and white."""

    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Scale":
        """Return the range of values: 0 to 1 or 0 to 255 if it contains all of them, else their minimum and maximum.

        Minimum and maximum are used for normalised images, whose colours are shifted then.
        """
        if values.dtype == np.uint8:
            return cls(0.0, 255.0)
        values = values.astype(np.float64)[np.isfinite(values)] if values.dtype.kind == "f" else values
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        for most in (1.0, 255.0):
            if low >= 0.0 and high <= most:
                return cls(0.0, most)
        return cls(low, high)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return values scaled to uint8, NaN as 0."""
        if values.dtype == np.uint8 and (self.low, self.high) == (0.0, 255.0):
            return values
        shares = (values.astype(np.float64) - self.low) / max(self.high - self.low, 1e-12)
        return (np.clip(np.nan_to_num(shares, posinf=1.0, neginf=0.0), 0.0, 1.0) * 255).round().astype(np.uint8)


def as_png(image: Any) -> bytes:
    """Convert an array, a tensor, a Pillow image, or the bytes of a PNG file to a PNG file of at most 512×512 pixels.

    Channels are the last axis of arrays and the first axis of tensors; if that axis does not have size 1, 3 or 4, the
    other one is used. The bytes of a PNG file are returned unchanged, whatever their size.
    """
    if isinstance(image, bytes):
        if not image.startswith(SIGNATURE):
            raise InputError("Images as bytes must be PNG files. Pass an array or a Pillow image for other formats.")
        return image
    # A Pillow image, recognised by its methods without importing Pillow.
    if hasattr(image, "save") and hasattr(image, "thumbnail"):
        return _from_pillow(image)
    pixels = as_pixels(image)
    return encode_png(smaller(Scale.of(pixels)(pixels)))


def as_pixels(image: Any) -> np.ndarray:  # (H, W) or (H, W, channels)
    """Return the values of an array or tensor, with the channels last."""
    first = isinstance(image, Tensor)
    values = image.detach().cpu().float().numpy() if _is_float(image) else np.asarray(image)
    if values.ndim == 2:
        return values
    if values.ndim == 3:
        for axis in (0, 2) if first else (2, 0):
            if values.shape[axis] in _CHANNELS:
                return np.moveaxis(values, axis, 2)
    raise InputError(
        "An image must have shape (height, width), (height, width, channels) or (channels, height, width) with 1, 3 "
        f"or 4 channels, got {tuple(values.shape)}."
    )


def smaller(pixels: np.ndarray) -> np.ndarray:  # uint8
    """Return an image of at most 512×512 pixels, by averaging square blocks of pixels."""
    step = -(-max(pixels.shape[:2]) // MOST_PIXELS)
    height, width = pixels.shape[0] // step, pixels.shape[1] // step
    if step == 1 or not height or not width:
        return pixels
    squares = pixels[: height * step, : width * step].reshape(height, step, width, step, *pixels.shape[2:])
    return squares.mean(axis=(1, 3)).round().astype(np.uint8)


def _is_float(image: Any) -> bool:
    # numpy has no bfloat16.
    return isinstance(image, Tensor) and image.is_floating_point()


def _from_pillow(image: Any) -> bytes:
    image = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    stored = io.BytesIO()
    image.save(stored, format="PNG")
    return stored.getvalue()


# The PNG colour type by the number of channels.
_COLOURS = {1: 0, 3: 2, 4: 6}


def encode_png(image: np.ndarray) -> bytes:  # (H, W) or (H, W, 1, 3 or 4) uint8
    """Encode a grey, RGB or RGBA image as a PNG file.

    Raises:
        InputError: If the image is not a uint8 array of such a shape, or has no pixels.
    """
    pixels = image[..., None] if image.ndim == 2 else image
    if pixels.ndim != 3 or pixels.shape[2] not in _COLOURS or pixels.dtype != np.uint8 or pixels.size == 0:
        raise InputError(
            f"An image must be a (height, width) or (height, width, 1, 3 or 4) uint8 array, got {image.dtype} of shape "
            f"{image.shape}. Scale values to 0-255 and move the channels last."
        )
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)  # 8 bits, not interlaced
    # Each line starts with its filter type; 0 means no filter.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines.tobytes())) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
