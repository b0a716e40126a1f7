"""Pixels as PNG files, by nothing but the standard library."""

import struct
import zlib

import numpy as np

from eigentrace.errors import InputError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The standard's number for what each pixel holds, by how many values that is.
_COLOURS = {1: 0, 3: 2, 4: 6}


def encode_png(image: np.ndarray) -> bytes:  # (H, W) or (H, W, 1, 3 or 4) uint8
    """Encode an image without loss: grey, colours, or colours with opacity.

    Raises:
        InputError: If it is no uint8 array of such a shape, or has no pixels.
    """
    pixels = image[..., None] if image.ndim == 2 else image
    if pixels.ndim != 3 or pixels.shape[2] not in _COLOURS or pixels.dtype != np.uint8 or pixels.size == 0:
        raise InputError(
            f"An image must be a (height, width) or (height, width, 1, 3 or 4) uint8 array, got {image.dtype} of shape "
            f"{image.shape}: scale values to 0-255, with the channels last."
        )
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)  # 8 bits, nothing interlaced
    # Each line starts with the number of its filter; 0 leaves the pixels as they are.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines.tobytes())) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
