"""A resumable Krylov iteration on disk: killed at any moment, it resumes with the same numbers.

A directory contains `vectors-00000.bin`, to which every vector is appended once (after a restart, the mixed ones begin
a new file), and `state.safetensors`, with the number of valid vectors and all other state of the next step. Vectors are
flushed to disk first, then the state is replaced atomically, then a file that is no longer needed is removed. Results
that are computed from a finished iteration, such as the calibration of a fit, have a file each.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eigentrace.disk.atomic import replacing, storage_error, sweep, sync
from eigentrace.disk.bounded import check_regular, open_regular, parsed
from eigentrace.disk.lock import locked
from eigentrace.disk.manifest import MANIFEST, read_manifest
from eigentrace.disk.tensors import read_tensors, write_tensors
from eigentrace.errors import InputError, MismatchError, StorageError
from eigentrace.krylov.iterate import Ending, Snapshot
from eigentrace.numeric.hashing import hash_arrays
from eigentrace.settings import short
from eigentrace.version import __version__

KIND = "Krylov iteration"
# Minimum time between saves: several quick products are saved together, because flushing files to disk would take
# longer than repeating them.
SECONDS_BETWEEN_SAVES = 1.0
# Numbers that are read or written at a time.
_PIECE = 1 << 22
# Losses of the same examples and model agree within this share of the largest, in bfloat16 too.
_LOSS_TOL = 1e-2
# Types of the entries of an identity that a basis is restored from.
_BASIS_TYPES: dict[str, Any] = {
    "basis dtype": str | None,
    "basis place": str | None,
    "basis max_vectors": int | None,
    "basis restart_keep": int | None,
}
# Larger numbers are no losses, and no counts or checksums.
_MOST, _MOST_COUNT = 1e300, 1 << 32
_STATE = "state.safetensors"
_VECTORS = "vectors-{}.bin"
_RESULT = "result-{}.safetensors"


class SavedIteration:
    """A directory that stores the state of one iteration.

    Open it with `opened`, which takes the write lock of the directory.

    Args:
        path: The directory.
        identity: JSON values by name that identify the iteration.
        draws: The generator with which the matrix draws examples, if any; its state is saved too.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], draws: torch.Generator | None = None) -> None:
        self.path, self._identity, self._draws = path, identity, draws
        self._checksums: list[int] = []  # of the vectors in the current file
        self._restarts: int | None = None  # number of the current file
        self._kept_at = -float("inf")

    @property
    def is_new(self) -> bool:
        """Whether no iteration has begun in the directory."""
        return not (self.path / MANIFEST).exists()

    def begin(self, **chosen: Any) -> None:
        """Write the manifest with the identity and the measured choices, unless it already exists."""
        if not self.is_new:
            return
        manifest: dict[str, Any] = {"kind": KIND, "format": 1, "version": __version__}
        manifest |= {"identity": self._identity, "chosen": chosen}
        with replacing(self.path / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")

    def chosen(self, name: str, otherwise: Any) -> Any:
        """Return a choice recorded by `begin`, or `otherwise` if the iteration is new."""
        return otherwise if self.is_new else _read(self.path)["chosen"][name]

    def is_finished(self) -> bool:
        """Return whether the saved iteration is finished, so that no product is left to compute."""
        found = self._read_state()
        return found is not None and found[0].ending is not None

    def recall(self, store: Tensor) -> Snapshot | None:  # (capacity, P)
        """Load the saved vectors into the start of `store`, and return the snapshot; None if nothing is saved."""
        found = self._read_state()
        if found is None:
            return None
        snapshot, checksums, draws = found
        file = self._file(snapshot.restarts)
        if not len(checksums) == snapshot.count <= len(store):
            raise self._damaged(_STATE, f"it has {snapshot.count} vectors, expected at most {len(store)}")
        try:
            with open_regular(file) as raw, BufferedReader(cast(FileIO, raw)) as stream:
                for number, (vector, expected) in enumerate(zip(store, checksums, strict=False)):
                    if _fill(stream, vector) != expected:
                        raise self._damaged(
                            file.name, f"the checksum of vector {number + 1} of {snapshot.count} does not match"
                        )
            for other in self.path.glob(_VECTORS.format("*")):
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
        """Return whether the last save is at least `SECONDS_BETWEEN_SAVES` ago."""
        return time.monotonic() - self._kept_at >= SECONDS_BETWEEN_SAVES

    def keep(self, store: Tensor, snapshot: Snapshot) -> None:  # (capacity, P)
        """Append the new vectors (after a restart, write all to a new file), then replace the state."""
        before = None if self._restarts is None else self._file(self._restarts)
        file, anew = self._file(snapshot.restarts), snapshot.restarts != self._restarts
        checksums = [] if anew else list(self._checksums)
        try:
            with file.open("wb" if anew else "r+b") as stream:
                # After the valid vectors there may be a partial one from a killed process.
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

    def recall_result(self, name: str) -> dict[str, Tensor] | None:
        """Load what `keep_result` stored under a name; None if there is nothing."""
        path = self.path / _RESULT.format(name)
        if not path.exists():
            return None
        try:
            return read_tensors(path)
        except MismatchError:
            raise self._damaged(path.name, "its checksums do not match, or it is truncated") from None

    def keep_result(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors that were computed from the finished iteration, so that a resumed fit need not repeat them."""
        with replacing(self.path / _RESULT.format(name)) as partial:
            write_tensors(tensors, partial, checksums=True)

    def _file(self, restarts: int) -> Path:
        return self.path / _VECTORS.format(f"{restarts:05d}")

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
            check_regular(path)
            with safe_open(path, "pt") as file:
                # Copies, because lazily read tensors would change with the file.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            record = metadata.get("record", "")
            if metadata.get("checksum") != _hash(record, tensors):
                raise self._damaged(_STATE, "its checksum does not match")
        except SafetensorError as error:
            raise self._damaged(_STATE, str(error)) from None
        try:
            return _state_of(parsed(record, path), tensors)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged(_STATE, f"it has no valid state ({short(repr(error), 200)})") from None

    def _damaged(self, name: str, what: str) -> MismatchError:
        return MismatchError(
            f"{self.path / name} is damaged: {what}. Restore the file, or remove {self.path} to start the fit again."
        )


@contextmanager
def opened(
    path: str | Path, identity: Mapping[str, Any], draws: torch.Generator | None = None
) -> Iterator[SavedIteration]:
    """Lock and open a directory that is new or has the same identity; else raise MismatchError, changing nothing.

    Args:
        path: The directory; created if missing.
        identity: JSON values by name that identify the iteration. "losses" contains losses of the model, which need to
            agree only up to rounding.
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


def begun_with(path: str | Path) -> dict[str, Any]:
    """Return the identity of the iteration in a directory; empty if it contains none that can be read."""
    try:
        return _read(Path(path))["identity"]
    except (MismatchError, TypeError):  # `opened` reports what is wrong
        return {}


def size_on_disk(path: Path) -> int:
    """Return the bytes of the vectors in the directory of an iteration."""
    return sum(file.stat().st_size for file in path.glob(_VECTORS.format("*")))


def progress_of(path: str | Path) -> tuple[int, int] | None:
    """Return how many products an iteration has saved and how many it computes; None if that cannot be read."""
    try:
        total = int(read_manifest(Path(path), KIND)["identity"]["steps"])
        state = Path(path) / _STATE
        if not state.exists():
            return 0, total
        check_regular(state)
        with safe_open(state, "pt") as file:
            return int(parsed((file.metadata() or {})["record"], state)["num_products"]), total
    except (MismatchError, SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def _state_of(values: Any, tensors: dict[str, Tensor]) -> tuple[Snapshot, list[int], Tensor | None]:
    """Return the snapshot, checksums and draws of a state; raise an error unless all of it is what `keep` writes."""
    values = dict(values)
    checksums, draws = values.pop("checksums"), tensors.pop("draws", None)
    values["ending"] = values["ending"] and Ending[values["ending"]]
    found = Snapshot(**(values | tensors))
    counts = (found.size, found.count, found.restarts, found.num_products, *checksums)
    if not all(type(number) is int and 0 <= number < _MOST_COUNT for number in counts):
        raise ValueError("its numbers must be whole and not negative")
    if not found.size <= found.count <= found.size + 1 or len(checksums) != found.count:
        raise ValueError(f"it has {found.count} vectors, {found.size} products of them and {len(checksums)} checksums")
    if not (_is_number(found.beta) and _is_number(found.scale)):
        raise ValueError("its lengths must be finite numbers")
    if not (isinstance(found.fresh, bool) and isinstance(found.symmetric, bool)):
        raise ValueError("fresh and symmetric must be true or false")
    held = found.size + 1
    for name, shape in (("projected", (held, held)), ("rounding", (held,))):
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != torch.float64:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and type {tensor.dtype}, expected {shape} float64"
            )
    torch.Generator().set_state(found.generator)
    if draws is not None:
        torch.Generator().set_state(draws)
    return found, checksums, draws


def _check(path: Path, identity: Mapping[str, Any]) -> None:
    """Raise MismatchError, with the differences, if a directory contains anything else."""
    if not path.exists():
        return
    # A process killed early leaves the lock file, and perhaps a partial hidden file.
    if path.is_dir() and all(item.name == "lock" or item.name.startswith(".") for item in path.iterdir()):
        return
    try:
        there = _read(path)["identity"]
    except MismatchError as error:
        if not (path / _STATE).exists():
            raise
        raise MismatchError(f"{error} Or remove {path} to start the fit again.") from None
    here = json.loads(json.dumps(identity))
    names = [name for name in (*here, *(there.keys() - here.keys())) if not _same(there.get(name), here.get(name))]
    # Losses differ for another model: report them only if nothing else differs.
    names = [name for name in names if name != "losses"] or names
    differ = [f"{name}: stored {short(there.get(name))}, got {short(here.get(name))}" for name in names]
    if differ:
        raise MismatchError(
            f"{path} contains the iteration of another fit: {'; '.join(differ)}. Pass another directory, or resume "
            "with the model, data and settings that it was created with."
        )


def _read(path: Path) -> dict[str, Any]:
    """Read the manifest of an iteration; raise MismatchError if an entry has another type than `begin` writes."""
    manifest = read_manifest(path, KIND)
    for name in ("identity", "chosen"):
        if not isinstance(manifest[name], dict):
            raise _wrong_entry(path, name, manifest[name], "an object")
    identity = manifest["identity"]
    losses = identity.get("losses", [])
    if not isinstance(losses, list) or not all(map(_is_number, losses)):
        raise _wrong_entry(path, "identity.losses", losses, "a list of finite numbers")
    for name, kind in _BASIS_TYPES.items():
        if not isinstance(identity.get(name), kind) or isinstance(identity.get(name), bool):
            raise _wrong_entry(path, f"identity.{name}", identity[name], "what Basis takes")
    compiled = manifest["chosen"].get("compile", False)
    if not isinstance(compiled, bool):
        raise _wrong_entry(path, "chosen.compile", compiled, "true or false")
    return manifest


def _wrong_entry(path: Path, name: str, found: Any, expected: str) -> MismatchError:
    return MismatchError(
        f"{path / MANIFEST} is damaged or was edited: {name} must be {expected}, got {short(found)}. Restore it, or "
        f"remove {path} to start the fit again."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _same(there: Any, here: Any) -> bool:
    """Return whether two identity values are equal: lists of numbers up to rounding, others exactly."""
    if not isinstance(there, list) or not isinstance(here, list) or len(there) != len(here):
        return there == here
    if not all(map(_is_number, (*there, *here))):
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


def _fill(stream: "BufferedReader[FileIO]", vector: Tensor) -> int:
    """Read one vector and return the checksum of its bytes, which differs if the file is truncated."""
    found = 0
    for piece in vector.split(_PIECE):
        buffer = torch.empty(len(piece), dtype=vector.dtype, device="cpu")
        data = buffer.view(torch.uint8).numpy().data
        found = zlib.crc32(data[: stream.readinto(data)], found)
        piece.copy_(buffer)
    return found
