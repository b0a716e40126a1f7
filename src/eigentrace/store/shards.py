"""Shards of a run: consecutive rows with features and scores, one safetensors file each, listed with checksums."""

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
# float16 represents magnitudes from 6e-8 to 65,504: each row is scaled so that its largest is in [2**14, 2**15).
_HALF = 15
# Rows are read as one slice if it is at most this many times longer than the number of rows.
_DENSE = 8


@dataclass(frozen=True)
class Shard:
    """One entry of `shards.json`: rows `start` to `stop` (exclusive), the file's size and its checksum."""

    start: int
    stop: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file name, which contains the first row."""
        return f"{self.start:012d}.safetensors"


class Record:
    """The list of a run's complete shards, in `shards.json`, and the files of the shards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder / SHARDS, folder / RECORD

    def read(self) -> tuple[Shard, ...]:
        """Return the listed shards, in row order."""
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            # A process that is killed between writing its first shard and listing it leaves one file, never several.
            if sum(1 for _ in self.folder.glob("*.safetensors")) > 1:
                raise MismatchError(f"{self.path} is missing. {_RECORD_ADVICE}") from None
            return ()
        except ValueError as error:
            raise MismatchError(f"{self.path} is damaged ({error}). {_RECORD_ADVICE}") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise MismatchError(f"{self.path} has a format that this version of eigentrace cannot read.")
        try:
            return tuple(Shard(**entry) for entry in found["shards"])
        except (KeyError, TypeError) as error:
            raise MismatchError(f"{self.path} is incomplete or was edited ({error!r}). {_RECORD_ADVICE}") from None

    def write(self, shards: tuple[Shard, ...]) -> None:
        """Replace the list of shards."""
        entries = [asdict(shard) for shard in sorted(shards, key=lambda shard: shard.start)]
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        with replacing(self.path) as partial:
            partial.write_text(f'{{"format": {_FORMAT}, "shards": [\n  {lines}\n]}}\n')

    def add(self, start: int, tensors: Mapping[str, "Tensor"]) -> Shard:
        """Write a shard to disk, then list it in place of any shards that it overlaps."""
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
        """Return the path of a shard's file."""
        return self.folder / shard.name


def shard_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """Return a hash of a shard's tensors, which is stored in its file and verifies it if `shards.json` is lost."""
    arrays = sorted(tensors.items())
    return hash_arrays((f"{name} {array.shape} torch.{array.dtype};", array) for name, array in arrays)


def recovered(path: Path) -> Shard | None:
    """Return the entry of an unlisted shard, or None if its content does not match the hash stored in its file."""
    try:
        with safe_open(path, "np") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if shard_hash(tensors) != metadata["sha256"]:
            return None
        return Shard(int(metadata["start"]), int(metadata["stop"]), path.stat().st_size, hash_file(path))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def gaps(shards: tuple[Shard, ...], total: int) -> Iterator[range]:
    """Yield the ranges of rows that are in no shard."""
    at = 0
    for shard in shards:
        if shard.start > at:
            yield range(at, shard.start)
        at = max(at, shard.stop)
    if at < total:
        yield range(at, total)


def read_column(path: Path, name: str, low: int = 0, high: int | None = None) -> np.ndarray:
    """Return rows `low` to `high` (exclusive, counted in the shard) of one tensor of a shard."""
    with _opened(path) as file:
        part: Any = file.get_slice(name)
        return part[low:high]


def read_rows(path: Path, name: str, rows: np.ndarray) -> np.ndarray:  # (n, ...)
    """Return the given rows (counted in the shard) of one tensor of a shard, in the given order."""
    if not len(rows):
        return read_column(path, name, 0, 0)
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low <= _DENSE * len(rows):
        return read_column(path, name, low, high)[rows - low]
    with _opened(path) as file:
        part: Any = file.get_slice(name)
        return np.concatenate([part[row : row + 1] for row in rows.tolist()])


def names_in(path: Path) -> tuple[str, ...]:
    """Return the names of a shard's tensors."""
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


_RECORD_ADVICE = "Run `eigentrace check RUN --repair` to rebuild it from the shards."
CHECK_ADVICE = "Run `eigentrace check RUN` to list damaged shards; with --repair, only their rows are scored again."


def fault_of(path: Path, shard: Shard) -> str | None:
    """Describe what is wrong with a shard's file; None if it is intact."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size:,} bytes, expected {shard.bytes:,}"
    try:
        found = hash_file(path)
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == shard.sha256 else "has changed since it was written (its checksum differs)"


def halved(features: "Tensor") -> "tuple[Tensor, Tensor]":  # (n, K) -> (n, K) float16, (n,) int16
    """Convert features to float16, each row scaled by its own power of two against underflow and overflow."""
    import torch

    exponents = torch.frexp(features.double().abs().amax(dim=1)).exponent.clamp(-900, 900)
    scaled = torch.ldexp(features.double(), (_HALF - exponents)[:, None])
    return scaled.half(), exponents.short()


def unhalved(features: np.ndarray, exponents: np.ndarray) -> np.ndarray:  # (n, K), (n,) -> (n, K) float32
    """Convert features to float32 and undo the scaling of each row."""
    return np.ldexp(features.astype(np.float32), (exponents.astype(np.int32) - _HALF)[:, None])
