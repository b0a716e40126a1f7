"""Small grey images as PNG, so that a page can carry them inside itself."""

import base64
import struct
import zlib

import numpy as np

from eigentrace.errors import InputError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(image: np.ndarray) -> bytes:  # (H, W) uint8
    """Encode a grey image without loss.

    Raises:
        InputError: If the image is not a two-dimensional uint8 array with at least one pixel.
    """
    if image.ndim != 2 or image.dtype != np.uint8 or image.size == 0:
        raise InputError(
            f"A grey image must be a (height, width) uint8 array, got {image.dtype} of shape {image.shape}: "
            "scale values to 0-255 and drop the channel dimension."
        )
    height, width = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grey, nothing interlaced
    # Each line starts with the number of its filter; 0 leaves the pixels as they are.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image], axis=1)
    body = zlib.compress(lines.tobytes(), 9)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def data_uri(image: np.ndarray) -> str:  # (H, W) uint8
    """Return a grey image as the value of an `src` attribute."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
