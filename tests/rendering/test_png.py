import base64
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eigentrace.demo.report import data_uri
from eigentrace.errors import InputError
from eigentrace.rendering.png import encode_png
from tests.helpers.expecting import refused


def decode(png):
    """Read a PNG as the standard lays it out, checking each chunk's length and checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", png[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 0, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()  # no filter on any line
    return lines[:, 1:]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_round_trip(height, width, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    np.testing.assert_array_equal(decode(encode_png(image)), image)


def test_a_view_with_strides_is_encoded_as_it_looks():
    image = np.arange(24, dtype=np.uint8).reshape(4, 6)[::2, ::-1]
    np.testing.assert_array_equal(decode(encode_png(image)), image)


def test_data_uri_holds_the_png():
    image = np.eye(3, dtype=np.uint8)
    kind, _, body = data_uri(image).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(body) == encode_png(image)


@pytest.mark.parametrize("image", [np.zeros((2, 2)), np.zeros((1, 2, 2), np.uint8), np.zeros((0, 2), np.uint8)])
def test_refuses_what_is_not_a_grey_image(image):
    with refused(InputError, "(height, width)", "uint8", image.dtype, image.shape):
        data_uri(image)
