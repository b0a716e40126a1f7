"""Read and write safetensors files. torch is imported only where used, because importing it takes seconds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from eigentrace.disk.blocks import BLOCK, sums_of
from eigentrace.disk.bounded import check_regular
from eigentrace.disk.tensor_file import CHECKSUMS, verify_tensors
from eigentrace.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor


# Bytes of the widest number, and of the header length at the start of a safetensors file.
_WIDEST = _LENGTH = 8


ALIGNED = 64
"""Alignment of tensors in memory, in bytes: with another one, matrix products may be summed in another order."""


_KINDS = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.complex64": "C64",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}


def write_tensors(
    tensors: Mapping[str, "Tensor"],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    checksums: bool = False,
) -> None:
    """Write a safetensors file, tensor by tensor.

    `safetensors.torch.save_file` writes to a hidden file first, which remains if the process is killed, and makes the
    result readable only by its owner.

    Args:
        tensors: The tensors by name.
        path: The file.
        metadata: Texts to store in the header.
        checksums: Add a tensor with the checksums of all blocks of 64 KiB before it.
    """
    import torch

    # In descending order of element size, every tensor is aligned to its element size. The largest tensor comes first
    # if that keeps the alignment: it then begins at a multiple of ALIGNED and can be used without a copy.
    largest = max(tensors, key=lambda name: tensors[name].nbytes, default="")
    begins = largest if tensors and tensors[largest].nbytes % _WIDEST == 0 else ""
    order = sorted(tensors, key=lambda name: (name != begins, -tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        kind = _KINDS[str(tensors[name].dtype)]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = _with_checksums(header, end) if checksums else _header_text(header)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for name in order:
            file.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if checksums:
            file.write(sums_of(file).tobytes())


def _header_text(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return text + b" " * (-(_LENGTH + len(text)) % ALIGNED)


def _with_checksums(header: Mapping[str, Any], end: int) -> bytes:
    """Return the header with a tensor for the checksums of all bytes before it, whose size depends on the header's."""
    text, blocks = b"", -1
    while blocks != -(-(_LENGTH + len(text) + end) // BLOCK):
        blocks = -(-(_LENGTH + len(text) + end) // BLOCK)
        place = {"dtype": "U8", "shape": [_WIDEST * blocks], "data_offsets": [end, end + _WIDEST * blocks]}
        text = _header_text({**header, CHECKSUMS: place})
    return text


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Read a safetensors file; tensors are aligned in memory, so that results are the same to the bit.

    If the file has checksums of its blocks, they are verified.
    """
    from safetensors.torch import load_file

    try:
        check_regular(path)
        verify_tensors(path)
        tensors = load_file(path)
        return {name: t.clone() if t.data_ptr() % ALIGNED else t for name, t in tensors.items() if name != CHECKSUMS}
    except FileNotFoundError:
        raise MismatchError(f"{path} is missing. Restore it, or create the artifact again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, MismatchError):
            raise
        raise MismatchError(f"{path} is damaged or truncated ({error}). Create it again.") from None


def begins_with(path: Path, tensors: Mapping[str, "Tensor"]) -> bool:
    """Return whether a file contains tensors of these shapes that begin with the same numbers."""
    import torch

    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                held: Any = file.get_slice(name)
                head = tuple(slice(0, size) for size in (*(8,) * (tensor.ndim - 1), 1024)[-tensor.ndim :])
                if list(held.get_shape()) != list(tensor.shape):
                    return False
                if tensor.numel() and tensor.ndim and not torch.equal(held[head], tensor[head].cpu()):
                    return False
    except (SafetensorError, MismatchError, OSError):
        return False
    return True
