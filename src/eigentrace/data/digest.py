"""Digests: eight bytes that identify an example's content, independent of batch and process."""

import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.data.batch import is_per_example
from eigentrace.errors import DataError

_SIZE = 8
# Types that numpy lacks are read as integers of the same width; the name of the type is hashed too.
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Lists up to this length are encoded item by item, which is as fast as packing them.
_LONG = 8


def digest(example: Any) -> int:
    """Return a 64-bit hash of an example: nested tuples, lists and dicts of arrays, numbers and text.

    Tuples and lists with equal items have equal digests, the order of dict keys does not matter, and a torch tensor
    and a numpy array of the same type, shape and numbers have equal digests. Single numbers are hashed as Python
    numbers: integers of any type as int, float64 as float.

    Examples:
        >>> digest((np.ones(3), 7)) == digest([torch.ones(3, dtype=torch.float64), torch.tensor(7)])
        True
        >>> digest({"a": 1, "b": 2.0}) == digest({"b": np.float64(2.0), "a": np.int32(1)})
        True
        >>> digest(1) == digest(True) or digest(1) == digest(1.0) or digest([1]) == digest(1)
        False
    """
    return int.from_bytes(_hashed(_encoded(example)), "little")


def digests(examples: Iterable[Any]) -> np.ndarray | None:  # (B,)
    """Return one digest per example as uint64, or None if any example has no digest."""
    try:
        return _numbers(_hashed(_encoded(example)) for example in examples)
    except DataError:
        return None


def digest_rows(batch: Any, size: int, rows: np.ndarray | slice = slice(None)) -> np.ndarray | None:  # (B,)
    """Return the digests of the single examples of a collated batch as uint64, or None if they have none.

    An example consists of its slice of every tensor of the batch that has one slice per example; other contents of the
    batch are ignored. Examples have no digest if the batch has no such tensor.

    Args:
        batch: Nested tensors, the examples along the first dimension.
        size: Number of examples in the batch.
        rows: Positions in the batch; all by default.
    """
    try:
        pieces = _stacked(batch, size, rows)
    except DataError:
        return None
    if pieces is None:
        return None
    count = next(len(piece) for piece in pieces if piece.ndim == 2)
    table = np.concatenate([np.broadcast_to(piece, (count, piece.shape[-1])) for piece in pieces], axis=1)
    return _numbers(_hashed(row) for row in table)


def _hashed(content: Any) -> bytes:
    return blake2b(content, digest_size=_SIZE).digest()


def _numbers(found: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(found), dtype="<u8").astype(np.uint64)


def _encoded(value: Any) -> bytes:
    """Encode a value as bytes, such that different values have different bytes."""
    encode = _BY_TYPE.get(type(value))
    return encode(value) if encode is not None else _encoded_by_family(value)


def _encoded_by_family(value: Any) -> bytes:
    for family, encode in _BY_FAMILY:
        if isinstance(value, family):
            return encode(value)
    images = sys.modules.get("PIL.Image")
    if images is not None and isinstance(value, images.Image):
        return _image(value)
    raise _refusal(f"an object of type {type(value).__name__}")


def _refusal(what: str) -> DataError:
    return DataError(
        f"An example contains {what}, for which there is no digest. Supported are tensors, arrays, numbers, text, "
        "images, and tuples, lists and dicts of these."
    )


def _nothing(value: None) -> bytes:
    return b"n"


def _truth(value: bool) -> bytes:
    return b"b\1" if value else b"b\0"


def _integer(value: int) -> bytes:
    return struct.pack("<cq", b"i", value) if -(2**63) <= value < 2**63 else b"I%x:" % value


def _real(value: float) -> bytes:
    return struct.pack("<cd", b"f", value)


def _text(value: str) -> bytes:
    found = value.encode("utf-8", "surrogatepass")
    return b"s%d:" % len(found) + found


def _octets(value: bytes | bytearray | memoryview) -> bytes:
    found = bytes(value)
    return b"o%d:" % len(found) + found


def _items(value: list | tuple) -> bytes:
    packed = _packed(value) if len(value) > _LONG else None
    return b"(%d:" % len(value) + (b"".join(map(_encoded, value)) if packed is None else packed)


def _packed(value: list | tuple) -> bytes | None:
    """Encode a long list of only ints or only floats at once; return None for any other list."""
    kinds = set(map(type, value))
    if kinds not in ({int}, {float}):
        return None
    tag, dtype = (b"i", "<i8") if kinds == {int} else (b"f", "<f8")
    try:
        numbers = np.array(value, dtype=dtype)
    except OverflowError:
        return None
    table = np.empty(len(value), dtype=[("tag", "S1"), ("number", dtype)])
    table["tag"], table["number"] = tag, numbers
    return table.tobytes()


def _mapping(value: Mapping) -> bytes:
    pairs = sorted((_encoded(key), _encoded(item)) for key, item in value.items())
    return b"{%d:" % len(pairs) + b"".join(part for pair in pairs for part in pair)


def _image(value: Any) -> bytes:
    palette = value.getpalette() if value.mode == "P" else None
    return b"p" + _items((value.mode, value.size, palette, value.tobytes()))


def _array(value: np.ndarray) -> bytes:
    if value.dtype.kind in "OUST":
        return _encoded(value.tolist())
    value, header = _settled(value, value.shape)
    return header + value.tobytes()


def _tensor(value: Tensor) -> bytes:
    array, name = _as_array(value)
    array, header = _settled(array, array.shape, name)
    return header + array.tobytes()


def _as_array(tensor: Tensor) -> tuple[np.ndarray, str | None]:
    """Return a tensor as a numpy array, and the name of its dtype if numpy lacks that dtype."""
    try:
        return tensor.numpy(), None  # a microsecond faster than with force=True, for most tensors
    except (TypeError, RuntimeError):
        return _as_array_by_force(tensor)


def _as_array_by_force(tensor: Tensor) -> tuple[np.ndarray, str | None]:
    try:
        return tensor.numpy(force=True), None
    except TypeError:
        stand_in = _STAND_INS.get(tensor.dtype.itemsize)
        if tensor.layout is not torch.strided or tensor.is_quantized or stand_in is None:
            raise _refusal(f"a tensor of type {tensor.dtype} and layout {tensor.layout}") from None
        return tensor.detach().contiguous().view(stand_in).numpy(force=True), str(tensor.dtype)
    except RuntimeError as error:
        raise _refusal(f"a tensor that cannot be read ({error})") from None


def _settled(array: np.ndarray, shape: tuple[int, ...], name: str | None = None) -> tuple[np.ndarray, bytes]:
    """Convert one or many values of this shape to the dtype that is hashed; return them with their header."""
    header, dtype = _form(array.dtype, shape, name)
    return (array if array.dtype == dtype else array.astype(dtype)), header


@lru_cache(maxsize=4096)
def _form(dtype: np.dtype, shape: tuple[int, ...], name: str | None) -> tuple[bytes, np.dtype]:
    """Return the header of arrays of a dtype and shape, and the dtype in which they are hashed."""
    if dtype.kind not in "biufcmM" or dtype.char in "gG":  # long doubles have undefined padding bytes
        raise _refusal(f"an array of type {dtype}")
    plain = np.dtype(dtype.newbyteorder("<"))
    if name is None and shape == ():
        if dtype.kind == "i" or (dtype.kind == "u" and dtype.itemsize < 8):
            return b"i", np.dtype("<i8")
        if dtype.kind == "b" or dtype == np.float64:
            return (b"b" if dtype.kind == "b" else b"f"), plain
    return f"a{name or dtype.name},{','.join(map(str, shape))}:".encode(), plain


def _stacked(value: Any, size: int, rows: np.ndarray | slice) -> list[np.ndarray] | None:
    """Encode the examples of a batch as arrays of bytes: shared ones (b,), and one row per example (B, b)."""
    if isinstance(value, Tensor):
        if not is_per_example(value, size):
            return None
        found, name = _as_array(value if isinstance(rows, slice) else value[torch.from_numpy(rows).to(value.device)])
        found = found[rows] if isinstance(rows, slice) else found
        array, header = _settled(found, found.shape[1:], name)
        octets = np.frombuffer(array.tobytes(), dtype=np.uint8)
        return [_octet_array(header), octets.reshape(len(array), len(octets) // max(1, len(array)))]
    if isinstance(value, Mapping):
        pieces = [(_encoded(key), _stacked(item, size, rows)) for key, item in value.items()]
        kept = sorted(((key, piece) for key, piece in pieces if piece is not None), key=lambda pair: pair[0])
        inside = [part for key, piece in kept for part in (_octet_array(key), *piece)]
        return [_octet_array(b"{%d:" % len(kept)), *inside] if kept else None
    if isinstance(value, list | tuple):
        found_items = [piece for item in value if (piece := _stacked(item, size, rows)) is not None]
        inside = [part for piece in found_items for part in piece]
        return [_octet_array(b"(%d:" % len(found_items)), *inside] if found_items else None
    return None


def _octet_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)


_BY_TYPE: dict[type, Callable[[Any], bytes]] = {
    type(None): _nothing,
    bool: _truth,
    int: _integer,
    float: _real,
    str: _text,
    bytes: _octets,
    list: _items,
    tuple: _items,
    dict: _mapping,
    Tensor: _tensor,
    np.ndarray: _array,
}
# Subclasses of the above, and numpy's numbers: a numpy string is a str, and a numpy float64 is both kinds of number.
_BY_FAMILY: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
    (str, _text),
    ((bytes, bytearray, memoryview), _octets),
    (np.generic, lambda value: _array(np.asarray(value))),
    (int, _integer),
    (float, _real),
    (Mapping, _mapping),
    ((list, tuple), _items),
    (Tensor, _tensor),
    (np.ndarray, _array),
)
