"""Shards: stretches of rows with their features and scores, each a safetensors file with a checksum on record."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eigentrace.errors import MismatchError, StorageError
from eigentrace.files import checksum, replacing, write_tensors

_RECORD = "shards.json"
_FORMAT = 1
# Half precision holds numbers from 6e-8 to 65,504: rows are scaled so that their largest lies just below 2**15.
_HALF = 15


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
        self.folder, self.path = folder / "shards", folder / _RECORD

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

    def add(self, start: int, tensors: Mapping[str, Tensor]) -> Shard:
        """Write a shard, and only when it is on the disk put it on record, in the place of any it overlaps."""
        stop = start + len(next(iter(tensors.values())))
        path = self.folder / f"{start:012d}.safetensors"
        self.folder.mkdir(exist_ok=True)
        before = [shard for shard in self.read() if shard.stop <= start or stop <= shard.start]
        with replacing(path) as partial:
            write_tensors(tensors, partial, {"start": str(start), "stop": str(stop), "sha256": content_hash(tensors)})
            made = Shard(start, stop, partial.stat().st_size, checksum(partial))
        self.write((*before, made))
        return made

    def file(self, shard: Shard) -> Path:
        """Return where a shard lies."""
        return self.folder / shard.name


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Hash what a shard holds, so that its file vouches for itself where the record is lost."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def recovered(path: Path) -> Shard | None:
    """Read a shard that is not on record; None unless it holds what was written."""
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if content_hash(tensors) != metadata["sha256"]:
            return None
        return Shard(int(metadata["start"]), int(metadata["stop"]), path.stat().st_size, checksum(path))
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


def read_column(path: Path, name: str, low: int = 0, high: int | None = None) -> Tensor:
    """Read rows `low` to `high` of one of a shard's tensors."""
    try:
        with safe_open(path, "pt") as file:
            part: Any = file.get_slice(name)
            return part[low:high]
    except FileNotFoundError:
        raise StorageError(f"{path} is missing. {_ADVICE}") from None
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {_ADVICE}") from None


def read_rows(path: Path, name: str, rows: Sequence[int]) -> Tensor:  # (n, ...)
    """Read single rows of one of a shard's tensors, in the order asked for."""
    try:
        with safe_open(path, "pt") as file:
            part: Any = file.get_slice(name)
            return torch.cat([part[row : row + 1] for row in rows])
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {_ADVICE}") from None


def names_in(path: Path) -> tuple[str, ...]:
    """Return which tensors a shard holds."""
    try:
        with safe_open(path, "pt") as file:
            return tuple(file.keys())
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {_ADVICE}") from None


_RECORD_ADVICE = "`eigentrace check RUN --repair` makes it again from the shards."
_ADVICE = "`eigentrace check RUN` says which shards are damaged, and with --repair scores only those again."


def fault_of(path: Path, shard: Shard) -> str | None:
    """Say what is wrong with a shard's file, if anything is."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size:,} bytes where {shard.bytes:,} were written"
    try:
        found = checksum(path)
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == shard.sha256 else "holds other bytes than were written (its checksum differs)"


def begins_with(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a file, however large, holds tensors of these shapes that begin with the same numbers."""
    try:
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                held: Any = file.get_slice(name)
                head = tuple(slice(0, size) for size in (*(8,) * (tensor.ndim - 1), 1024)[-tensor.ndim :])
                if list(held.get_shape()) != list(tensor.shape):
                    return False
                if tensor.numel() and tensor.ndim and not torch.equal(held[head], tensor[head].cpu()):
                    return False
    except (SafetensorError, OSError):
        return False
    return True


def halved(features: Tensor) -> tuple[Tensor, Tensor]:  # (n, K) -> (n, K) float16, (n,) int16
    """Put features in half precision, each row at a power of two of its own, so that none is too small or too large."""
    exponents = torch.frexp(features.double().abs().amax(dim=1)).exponent.clamp(-900, 900)
    scaled = torch.ldexp(features.double(), (_HALF - exponents)[:, None])
    return scaled.half(), exponents.short()


def unhalved(features: Tensor, exponents: Tensor) -> Tensor:  # (n, K), (n,) -> (n, K) float32
    """Take the rows' scales off again."""
    return torch.ldexp(features.double(), (exponents.long() - _HALF)[:, None]).float()
