"""Shards: stretches of rows with their features and scores, each a safetensors file with a checksum on record."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from eigentrace.disk.atomic import replacing
from eigentrace.disk.tensors import write_tensors
from eigentrace.errors import MismatchError, StorageError
from eigentrace.numeric.hashing import hash_arrays, hash_file

if TYPE_CHECKING:
    from torch import Tensor

RECORD, SHARDS = "shards.json", "shards"
_FORMAT = 1
# Half precision holds numbers from 6e-8 to 65,504: rows are scaled so that their largest lies just below 2**15.
_HALF = 15
# Rows that lie this close together on average are read in one piece.
_DENSE = 8


@dataclass(frozen=True)
class Shard:
    """What is on record about one shard."""

    start: int
    stop: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name, by its first row."""
        return f"{self.start:012d}.safetensors"


class Record:
    """The shards of a run that are known to be whole, in row order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder / SHARDS, folder / RECORD

    def read(self) -> tuple[Shard, ...]:
        """Return the shards on record."""
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            # A process that dies between its first shard and the record of it leaves one file, never several.
            if sum(1 for _ in self.folder.glob("*.safetensors")) > 1:
                raise MismatchError(f"{self.path} is missing. {_RECORD_ADVICE}") from None
            return ()
        except ValueError as error:
            raise MismatchError(f"{self.path} is damaged ({error}). {_RECORD_ADVICE}") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise MismatchError(f"{self.path} is of another format than this version of eigentrace reads.")
        try:
            return tuple(Shard(**entry) for entry in found["shards"])
        except (KeyError, TypeError) as error:
            raise MismatchError(f"{self.path} is incomplete or was edited ({error!r}). {_RECORD_ADVICE}") from None

    def write(self, shards: tuple[Shard, ...]) -> None:
        """Put other shards on record."""
        entries = [asdict(shard) for shard in sorted(shards, key=lambda shard: shard.start)]
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        with replacing(self.path) as partial:
            partial.write_text(f'{{"format": {_FORMAT}, "shards": [\n  {lines}\n]}}\n')

    def add(self, start: int, tensors: Mapping[str, "Tensor"]) -> Shard:
        """Write a shard, and only when it is on the disk put it on record, in the place of any it overlaps."""
        stop = start + len(next(iter(tensors.values())))
        path = self.folder / f"{start:012d}.safetensors"
        self.folder.mkdir(exist_ok=True)
        before = [shard for shard in self.read() if shard.stop <= start or stop <= shard.start]
        with replacing(path) as partial:
            held = shard_hash({name: tensor.numpy() for name, tensor in tensors.items()})
            write_tensors(tensors, partial, {"start": str(start), "stop": str(stop), "sha256": held})
            made = Shard(start, stop, partial.stat().st_size, hash_file(partial))
        self.write((*before, made))
        return made

    def file(self, shard: Shard) -> Path:
        """Return where a shard lies."""
        return self.folder / shard.name


def shard_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """Hash what a shard holds, so that its file vouches for itself where the record is lost."""
    arrays = sorted(tensors.items())
    return hash_arrays((f"{name} {array.shape} torch.{array.dtype};", array) for name, array in arrays)


def recovered(path: Path) -> Shard | None:
    """Read a shard that is not on record; None unless it holds what was written."""
    try:
        with safe_open(path, "np") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if shard_hash(tensors) != metadata["sha256"]:
            return None
        return Shard(int(metadata["start"]), int(metadata["stop"]), path.stat().st_size, hash_file(path))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def gaps(shards: tuple[Shard, ...], total: int) -> Iterator[range]:
    """Yield the stretches of rows that no shard holds."""
    at = 0
    for shard in shards:
        if shard.start > at:
            yield range(at, shard.start)
        at = max(at, shard.stop)
    if at < total:
        yield range(at, total)


def read_column(path: Path, name: str, low: int = 0, high: int | None = None) -> np.ndarray:
    """Read rows `low` to `high` of one of a shard's tensors."""
    with _opened(path) as file:
        part: Any = file.get_slice(name)
        return part[low:high]


def read_rows(path: Path, name: str, rows: np.ndarray) -> np.ndarray:  # (n, ...)
    """Read single rows of one of a shard's tensors, in the order asked for."""
    if not len(rows):
        return read_column(path, name, 0, 0)
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low <= _DENSE * len(rows):
        return read_column(path, name, low, high)[rows - low]
    with _opened(path) as file:
        part: Any = file.get_slice(name)
        return np.concatenate([part[row : row + 1] for row in rows.tolist()])


def names_in(path: Path) -> tuple[str, ...]:
    """Return which tensors a shard holds."""
    with _opened(path) as file:
        return tuple(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as file:
            yield file
    except FileNotFoundError:
        raise StorageError(f"{path} is missing. {CHECK_ADVICE}") from None
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {CHECK_ADVICE}") from None


_RECORD_ADVICE = "`eigentrace check RUN --repair` makes it again from the shards."
CHECK_ADVICE = "`eigentrace check RUN` says which shards are damaged, and with --repair scores only those again."


def fault_of(path: Path, shard: Shard) -> str | None:
    """Say what is wrong with a shard's file, if anything is."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size:,} bytes where {shard.bytes:,} were written"
    try:
        found = hash_file(path)
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == shard.sha256 else "holds other bytes than were written (its checksum differs)"


def halved(features: "Tensor") -> "tuple[Tensor, Tensor]":  # (n, K) -> (n, K) float16, (n,) int16
    """Put features in half precision, each row at a power of two of its own, so that none is too small or too large."""
    import torch

    exponents = torch.frexp(features.double().abs().amax(dim=1)).exponent.clamp(-900, 900)
    scaled = torch.ldexp(features.double(), (_HALF - exponents)[:, None])
    return scaled.half(), exponents.short()


def unhalved(features: np.ndarray, exponents: np.ndarray) -> np.ndarray:  # (n, K), (n,) -> (n, K) float32
    """Take the rows' scales off again."""
    return np.ldexp(features.astype(np.float32), (exponents.astype(np.int32) - _HALF)[:, None])
