"""Load saved fits for the tasks that they were made with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eigentrace.disk.manifest import MANIFEST, read_manifest
from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import EigentraceError, InputError, MismatchError
from eigentrace.fits.cut import Cut
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.ekfac_fit import EKFACFit
from eigentrace.fits.ensemble import ENSEMBLE, Ensemble
from eigentrace.fits.file_names import METRIC, member_folder, state_file
from eigentrace.fits.fitted import Fitted
from eigentrace.fits.kronecker_metric import KroneckerMetric
from eigentrace.fits.on_disk import read_block, read_coordinates, read_eigenpairs, read_moments, read_relative_pairs
from eigentrace.fits.projected_fit import DirectionsFit
from eigentrace.settings import short
from eigentrace.task.checkpoints import Checkpoint
from eigentrace.task.identity import LossFingerprint
from eigentrace.task.task import Task

# Types of the entries of the manifest of a fit, of its method, blocks and cut.
_TYPES = {"method": dict, "num_train": int, "has_curvature": bool, "double": bool}
_METHOD_TYPES: dict[str, Any] = {
    "name": str,
    "agreement": dict | None,
    "basis": dict | None,
    "sample": int | None,
    "seed": int | None,
}
_BLOCK_TYPES = {"identity": int | float, "state": bool}
# An ensemble has a fit per checkpoint or model.
_MOST_MEMBERS = 1 << 20
_CUT_TYPES: dict[str, Any] = {"positive_only": bool, "stored": bool, "is_complete": bool, "coordinates": int | None}


def load(path: str | Path, task: Task | Sequence[Task]) -> Fitted:
    """Load a saved fit or ensemble for the task that it was made with.

    Args:
        path: The directory written by `save`.
        task: The task, with the same model and parameters. For an ensemble of separate fits, their tasks in order.
    """
    path = Path(path)
    return _load_ensemble(path, task) if (path / member_folder(0)).is_dir() else _load_directions(path, task)


def _load_ensemble(path: Path, task: Task | Sequence[Task]) -> Ensemble:
    manifest = read_manifest(path, ENSEMBLE)
    try:
        count, has_states = int(manifest["members"]), bool(manifest["states"])
        if not 0 < count <= _MOST_MEMBERS:
            raise ValueError(f"it would have {count} members")
    except EigentraceError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise MismatchError(f"{path} is incomplete or was edited ({error!r}). Save the ensemble again.") from None
    if has_states:
        if not isinstance(task, Task):
            raise InputError(
                f"This ensemble contains checkpoints of one model: pass the Task it was made with, got "
                f"{type(task).__name__}."
            )
        states = [Checkpoint(read_tensors(path / state_file(number))) for number in range(count)]
        tasks = [task.at(state.load()) for state in states]
    else:
        tasks = [task] * count if isinstance(task, Task) else list(task)
    if len(tasks) != count:
        raise InputError(
            f"The ensemble at {path} has {count} members, got {len(tasks)} tasks: pass one task per member."
        )
    members = [load(path / member_folder(number), member) for number, member in enumerate(tasks)]
    return Ensemble(tuple(members), tuple(states) if has_states else None)


def _load_directions(path: str | Path, task: Any) -> Fitted:
    """Load a saved fit that is not an ensemble."""
    if not isinstance(task, Task):
        raise InputError(f"load takes the Task that the fit was made with, got {type(task).__name__}.")
    path = Path(path)
    manifest = read_manifest(path, "fit")
    _check_types(path, manifest)
    try:
        if manifest["double"]:
            task = task.double()
        if manifest["fingerprint"] != task.fingerprint():
            raise MismatchError(
                f"The fit at {path} was made for another model, other weights or other parameters: it covers "
                f"{manifest['coverage']}, and this task {task.coverage}. Load the same checkpoint and pass the same "
                "`params`."
            )
        return _assemble(path, manifest, task.pinned(LossFingerprint.read(manifest.get("trial"))))
    except EigentraceError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise MismatchError(f"{path} is incomplete or was edited ({error!r}). Save the fit again.") from None


def _check_types(path: Path, manifest: dict[str, Any]) -> None:
    """Raise MismatchError if an entry of the manifest of a fit has another type than `save` writes."""
    method = manifest["method"] if isinstance(manifest["method"], dict) else {}
    checked: list[tuple[str, Any, Any]] = [(name, manifest[name], kind) for name, kind in _TYPES.items()]
    checked += [("trial", manifest.get("trial"), dict | None)]  # fits of earlier versions have none
    checked += [(f"method.{name}", method.get(name), kind) for name, kind in _METHOD_TYPES.items()]
    blocks = manifest.get("blocks", [])
    checked += [("blocks", blocks, list)]
    for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
        entries = block if isinstance(block, dict) else {}
        checked += [(f"blocks[{number}].{name}", entries.get(name), kind) for name, kind in _BLOCK_TYPES.items()]
    if "metric" in manifest:
        checked += [("metric", manifest["metric"], dict), ("damping", manifest["damping"], int | float)]
        joined = manifest["metric"] if isinstance(manifest["metric"], dict) else {}
        checked += [(f"metric.{name}", one, dict) for name, one in joined.items()]
        checked += [("relative", manifest.get("relative"), dict | None)]
    if "cut" in manifest:
        cut = manifest["cut"] if isinstance(manifest["cut"], dict) else {}
        checked += [("cut", manifest["cut"], dict), ("num_products", manifest["num_products"], int)]
        checked += [(f"cut.{name}", cut[name], kind) for name, kind in _CUT_TYPES.items() if name in cut]
    for name, value, kind in checked:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MismatchError(
                f"{path / MANIFEST} is damaged or was edited: {name} is {short(value)}, which is not what `save` "
                "writes. Restore it, or save the fit again."
            )


def _assemble(path: Path, manifest: dict[str, Any], task: Task) -> Fitted:
    shared = {key: manifest[key] for key in ("method", "num_train", "has_curvature")}
    if "metric" in manifest:
        metric = KroneckerMetric.of_tensors(read_tensors(path / METRIC), manifest["metric"], task.layout)
        pairs = read_relative_pairs(path, manifest, task.layout) if "relative" in manifest else None
        return EKFACFit(task, metric, float(manifest["damping"]), **shared, pairs=pairs)
    if "cut" in manifest:
        eigenpairs = read_eigenpairs(path, manifest, task.layout)
        count = len(eigenpairs.spectrum.eigenvalues)
        coordinates = read_coordinates(path, manifest, count, task.layout)
        moments = read_moments(path, count)
        return EigenFit(task, eigenpairs, Cut(**manifest["cut"]), **shared, coordinates=coordinates, moments=moments)
    blocks = [read_block(path, number, record, task.layout) for number, record in enumerate(manifest["blocks"])]
    return DirectionsFit(task, tuple(blocks), **shared)
