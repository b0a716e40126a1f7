"""Files and directories that appear whole or not at all: written under another name, forced to the disk, renamed."""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigentrace.errors import InputError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

_PARTIAL = ".partial"
_CHUNK = 1 << 22
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it becomes `path`, in one step and for good.

    Whatever goes wrong, `path` is as it was before, and the temporary file is gone.
    """
    partial = _beside(path)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        _discard(partial)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write a new file or directory to; on success it becomes `path`, in one step.

    A path that exists is refused, before the work and after it. Whatever goes wrong, nothing is left behind.
    """
    _refuse_existing(path)
    partial = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for written in (*partial.rglob("*"), partial):
            sync(written)
        _publish(partial, path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        _discard(partial)


def _discard(partial: Path) -> None:
    """Remove what was begun, if anything is there; a file system that is read-only refuses even that."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def _publish(partial: Path, path: Path) -> None:
    """Give what was written its name, and leave alone what has taken the name in the meantime."""
    if partial.is_file():
        with suppress(OSError):  # the name is taken, or the file system has no hard links
            os.link(partial, path)
            return
    _refuse_existing(path)
    partial.rename(path)


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists already and is left as it is. Choose another path, or remove it first.")


def storage_error(error: OSError, path: Path) -> StorageError:
    """Say what the system's refusal means, and what to do about it."""
    if isinstance(error, StorageError):
        return error
    if error.errno in _NO_ROOM:
        return StorageError(
            f"There is no room left to write {path}. What was written before is whole: free some space (or raise the "
            "quota), and run the same command again."
        )
    return StorageError(f"{path} could not be written ({error}). Check the path, its permissions and the disk.")


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for leftover in folder.glob(f".*{_PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Hash what a file holds."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_tensors(tensors: Mapping[str, "Tensor"], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, tensor by tensor.

    The library's own function writes to a hidden file first, which a killed process leaves behind for ever, and lets
    nobody but the owner read the result.
    """
    import torch

    # The widest numbers come first, so that all lie at multiples of their width; before them the largest tensor, if
    # that leaves them there, to lie where it can be used as it is read.
    largest = max(tensors, key=lambda name: tensors[name].nbytes, default="")
    begins = largest if tensors and tensors[largest].nbytes % _WIDEST == 0 else ""
    order = sorted(tensors, key=lambda name: (name != begins, -tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        kind = _KINDS[str(tensors[name].dtype)]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for name in order:
            file.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


# Bytes of the widest number, and of what says how long the header of a safetensors file is.
_WIDEST = _LENGTH = 8
ALIGNED = 64
"""Tensors begin at multiples of this in memory: matrix products of others may add up in another order."""
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
