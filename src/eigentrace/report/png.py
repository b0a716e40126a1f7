"""Small grey images that a page can carry inside itself."""

import base64

import numpy as np

from eigentrace.errors import InputError
from eigentrace.shown.png import encode_png


def data_uri(image: np.ndarray) -> str:  # (H, W) uint8
    """Return a grey image as the value of an `src` attribute.

    Raises:
        InputError: If the image is not a two-dimensional uint8 array with at least one pixel.
    """
    if image.ndim != 2 or image.dtype != np.uint8 or image.size == 0:
        raise InputError(
            f"A grey image must be a (height, width) uint8 array, got {image.dtype} of shape {image.shape}: "
            "scale values to 0-255 and drop the channel dimension."
        )
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")
