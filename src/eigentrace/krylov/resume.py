"""The state of a Krylov iteration on disk: killed at any moment, it goes on from there with the same numbers.

A directory holds `vectors-00000.bin`, to which every vector is appended once (after a restart, the mixed ones begin a
new file), and `state.safetensors`, which says how many of them count and all else that the next step depends on. The
vectors reach the disk first, then the state replaces the one before, then a file that is no longer needed goes.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eigentrace.disk.atomic import replacing, storage_error, sweep, sync
from eigentrace.disk.lock import locked
from eigentrace.disk.manifest import MANIFEST, read_manifest
from eigentrace.errors import InputError, MismatchError, StorageError
from eigentrace.krylov.iterate import Ending, Snapshot
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.settings import short
from eigentrace.version import __version__

KIND = "Krylov iteration"
# Products that are quicker than this are kept several at a time: forcing files to the disk would take longer than
# doing them again.
SECONDS_BETWEEN_SAVES = 1.0
# Numbers that go to or come from the disk at a time.
_PIECE = 1 << 22
# Losses of the same example on the same model agree better than this share of the largest, in bfloat16 too.
_LOSS_TOL = 1e-2
_STATE = "state.safetensors"


class SavedIteration:
    """A directory that remembers one iteration.

    Use it inside `opened`, which sees to it that nobody else writes there.

    Args:
        path: The directory.
        identity: What the iteration is of, in plain values by name.
        draws: The generator that the matrix draws examples with, if it does; its state belongs to the iteration's.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], draws: torch.Generator | None = None) -> None:
        self.path, self._identity, self._draws = path, identity, draws
        self._checksums: list[int] = []  # of the vectors in the current file
        self._restarts: int | None = None  # which the current file belongs to
        self._kept_at = -float("inf")

    def begin(self, **chosen: Any) -> None:
        """Write down what the iteration is of, and what was chosen for it by measuring, unless it has begun before."""
        if (self.path / MANIFEST).exists():
            return
        manifest: dict[str, Any] = {"kind": KIND, "format": 1, "version": __version__}
        manifest |= {"identity": self._identity, "chosen": chosen}
        with replacing(self.path / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")

    def chosen(self, name: str, otherwise: Any) -> Any:
        """Return what was chosen when the iteration began; something else if it begins now."""
        return read_manifest(self.path, KIND)["chosen"][name] if (self.path / MANIFEST).exists() else otherwise

    def is_finished(self) -> bool:
        """Tell whether the iteration has ended, so that no product is left to do."""
        found = self._read_state()
        return found is not None and found[0].ending is not None

    def recall(self, store: Tensor) -> Snapshot | None:  # (capacity, P)
        """Read the saved vectors into the first places of `store`; None if nothing was saved yet."""
        found = self._read_state()
        if found is None:
            return None
        snapshot, checksums, draws = found
        file = self._file(snapshot.restarts)
        if not len(checksums) == snapshot.count <= len(store):
            raise self._damaged(_STATE, f"it counts {snapshot.count} vectors where {len(store)} are the most")
        try:
            with file.open("rb") as stream:
                for number, (vector, expected) in enumerate(zip(store, checksums, strict=False)):
                    if _fill(stream, vector) != expected:
                        raise self._damaged(
                            file.name, f"vector {number + 1} of {snapshot.count} is not what was kept there"
                        )
            for other in self.path.glob("vectors-*.bin"):
                if other != file:  # left by a process that was killed around a restart
                    other.unlink()
        except FileNotFoundError:
            raise self._damaged(file.name, "it is missing") from None
        except OSError as error:
            raise StorageError(f"{file} could not be read ({error}). Check its permissions and the disk.") from error
        if self._draws is not None and draws is not None:
            self._draws.set_state(draws)
        self._checksums, self._restarts = checksums, snapshot.restarts
        return snapshot

    def is_due(self) -> bool:
        """Tell whether the last time the state was kept is long enough ago."""
        return time.monotonic() - self._kept_at >= SECONDS_BETWEEN_SAVES

    def keep(self, store: Tensor, snapshot: Snapshot) -> None:  # (capacity, P)
        """Append the vectors that are new, or all of them after a restart, then let the state count them."""
        before = None if self._restarts is None else self._file(self._restarts)
        file, anew = self._file(snapshot.restarts), snapshot.restarts != self._restarts
        checksums = [] if anew else list(self._checksums)
        try:
            with file.open("wb" if anew else "r+b") as stream:
                # Beyond what counts there may be part of a vector that a killed process wrote.
                stream.seek(len(checksums) * store.shape[1] * store.element_size())
                checksums += [_append(stream, vector) for vector in store[len(checksums) : snapshot.count]]
            sync(file)
            if anew:
                sync(self.path)
        except OSError as error:
            raise storage_error(error, file) from error
        self._write_state(snapshot, checksums)
        self._checksums, self._restarts = checksums, snapshot.restarts
        if anew and before is not None:
            before.unlink(missing_ok=True)
        self._kept_at = time.monotonic()

    def _file(self, restarts: int) -> Path:
        return self.path / f"vectors-{restarts:05d}.bin"

    def _write_state(self, snapshot: Snapshot, checksums: list[int]) -> None:
        values = {field.name: getattr(snapshot, field.name) for field in dataclasses.fields(snapshot)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if self._draws is not None:
            tensors["draws"] = self._draws.get_state()
        plain = {name: value for name, value in values.items() if name not in tensors}
        plain |= {"ending": snapshot.ending and snapshot.ending.name, "checksums": checksums}
        record = json.dumps(plain, allow_nan=False)
        with replacing(self.path / _STATE) as partial:
            partial.write_bytes(save(tensors, {"record": record, "checksum": _hash(record, tensors)}))

    def _read_state(self) -> tuple[Snapshot, list[int], Tensor | None] | None:
        path = self.path / _STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                # Copies: what is read lazily would change with the file.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            record = metadata.get("record", "")
            if metadata.get("checksum") != _hash(record, tensors):
                raise self._damaged(_STATE, "its numbers are not those that were kept")
        except SafetensorError as error:
            raise self._damaged(_STATE, str(error)) from None
        values = json.loads(record)
        checksums, draws = values.pop("checksums"), tensors.pop("draws", None)
        values["ending"] = values["ending"] and Ending[values["ending"]]
        return Snapshot(**values, **tensors), checksums, draws

    def _damaged(self, name: str, what: str) -> MismatchError:
        return MismatchError(
            f"{self.path / name} is damaged: {what}. Restore the file, or remove {self.path} to begin the fit again."
        )


@contextmanager
def opened(
    path: str | Path, identity: Mapping[str, Any], draws: torch.Generator | None = None
) -> Iterator[SavedIteration]:
    """Hold a directory, new or with an iteration of the same identity; others are refused and left as they are.

    Args:
        path: The directory; made if it is not there.
        identity: What the iteration is of, in plain values by name. Under "losses" it has some of the model's, which
            need only agree to rounding.
        draws: See `SavedIteration`.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"resume must be the path of a directory, got {type(path).__name__}.")
    path = Path(path)
    _check(path, identity)
    with locked(path):
        _check(path, identity)
        sweep(path)
        yield SavedIteration(path, identity, draws)


def _check(path: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a directory that holds something else, naming what differs."""
    if not path.exists():
        return
    # A process that is killed at once leaves a lock, and perhaps a hidden file half written.
    if path.is_dir() and all(item.name == "lock" or item.name.startswith(".") for item in path.iterdir()):
        return
    try:
        there = read_manifest(path, KIND)["identity"]
    except MismatchError as error:
        if not (path / _STATE).exists():
            raise
        raise MismatchError(f"{error} Or remove {path} to begin the fit again.") from None
    here = json.loads(json.dumps(identity))
    names = [name for name in (*here, *(there.keys() - here.keys())) if not _same(there.get(name), here.get(name))]
    # Other losses follow from another model: they are named when nothing else explains them.
    names = [name for name in names if name != "losses"] or names
    differ = [f"{name}: {short(there.get(name))} there, {short(here.get(name))} here" for name in names]
    if differ:
        raise MismatchError(
            f"{path} holds the iteration of another fit: {'; '.join(differ)}. Give another directory, or the model, "
            "data and settings that it was begun with."
        )


def _same(there: Any, here: Any) -> bool:
    """Compare two values of an identity: lists of numbers to rounding, all else exactly."""
    if not isinstance(there, list) or not isinstance(here, list) or len(there) != len(here):
        return there == here
    size = max(map(abs, there), default=0.0)
    return all(abs(a - b) <= _LOSS_TOL * size for a, b in zip(there, here, strict=True))


def _hash(record: str, tensors: Mapping[str, Tensor]) -> str:
    return hash_arrays(((f"{name} {tuple(t.shape)} {t.dtype};", t) for name, t in sorted(tensors.items())), record)


def _append(stream: IO[bytes], vector: Tensor) -> int:
    """Write one vector and return the checksum of its bytes."""
    found = 0
    for piece in vector.split(_PIECE):
        data = piece.cpu().view(torch.uint8).numpy().data
        stream.write(data)
        found = zlib.crc32(data, found)
    return found


def _fill(stream: BufferedReader, vector: Tensor) -> int:
    """Read one vector and return the checksum of its bytes; a file that is too short gives another one."""
    found = 0
    for piece in vector.split(_PIECE):
        buffer = torch.empty(len(piece), dtype=vector.dtype, device="cpu")
        data = buffer.view(torch.uint8).numpy().data
        found = zlib.crc32(data[: stream.readinto(data)], found)
        piece.copy_(buffer)
    return found
