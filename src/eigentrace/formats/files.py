"""Search for the files of a dataset, and detection of their format."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.errors import InputError, MismatchError
from eigentrace.settings import short

Format = Literal["csv", "tsv", "jsonl", "parquet", "arrow"]

# Block size in bytes for pyarrow, which cannot read a CSV row or a JSON line longer than a block (default: 1 MiB).
BLOCK = 64 * 2**20

FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_KNOWN = "a CSV, TSV, JSON lines or Parquet file, a folder of Parquet files, a pattern such as 'data/*.parquet', or a "
_KNOWN += "folder written by Dataset.save_to_disk"
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
# Files and folders that a search looks at: a run of somebody else may name the whole disk. Those below a link that a
# pattern matches count as several: links can multiply folders without end, and long chains of them are slow to follow.
_MOST_SEEN, _BELOW_LINK = 1 << 20, 16
# Shards as the Hugging Face hub names them: train-00000-of-00004.parquet
_SHARD = re.compile(r"^(?P<split>.+?)-\d+-of-\d+(?:-[0-9a-f]+)?$")


@dataclass(frozen=True)
class Files:
    """The files of a dataset in row order, and their format."""

    format: Format
    paths: tuple[Path, ...]
    source: Path
    """The path that the user passed, or the folder of the split in it."""

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the dataset are relative to."""
        return self.paths[0].parent


def find_files(dataset: Path | str, split: str | None = None, most: int = _MOST_SEEN) -> Files:
    """Return the files of a dataset; those of a folder or pattern are sorted by name.

    Args:
        dataset: A file, a pattern, a folder of Parquet files, or a folder written by `Dataset.save_to_disk`.
        split: The split to read from a folder that contains several.
        most: Maximum number of files and folders that are looked at, also of those that are not part of the dataset.
    """
    found = _found(Path(dataset), split, most)
    for path in found.paths:
        try:
            check_regular(path)
        except MismatchError as error:
            raise InputError(str(error)) from None
    return found


def _found(path: Path, split: str | None, most: int) -> Files:
    if path.is_dir():
        return _in_folder(path, split, most)
    if split is not None:
        raise InputError(f"split={split!r} can only be used with a folder, but {path} is not a folder. Omit split.")
    if path.is_file():
        return Files(_format_of(path), (path,), path)
    if has_magic(str(path)):
        parts = path.parts[1:] if path.is_absolute() else path.parts
        names = _matching(path.anchor, parts, most)
        found = tuple(Path(name) for name in sorted(names) if Path(name).is_file())
        if not found:
            raise InputError(f"No file matches {str(path)!r}. Check the pattern and the current directory.")
        return Files(_one_format(found), found, path)
    raise InputError(f"There is no dataset at {path}. Pass {_KNOWN}.")


def _matching(base: str, parts: tuple[str, ...], most: int) -> set[str]:
    """Return the paths below a folder that match a pattern, as `glob` does; raise InputError if it looks at too many.

    Args:
        base: The folder; empty for the current one.
        parts: The parts of the pattern.
        most: Maximum number of files and folders to look at.
    """
    todo, found, seen = [(base, parts, 1)], set(), 0
    while todo:
        folder, (part, *others), cost = todo.pop()
        rest = tuple(others)
        if not has_magic(part):
            full = os.path.join(folder, part)
            if rest:
                todo.append((full, rest, cost))
            elif os.path.lexists(full):
                found.add(full)
            continue
        if part == "**" and rest:
            todo.append((folder, rest, cost))
        for entry in _entries(folder):
            seen += cost
            if seen > most:
                raise _too_many(os.path.join(base, *parts), most)
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            full = os.path.join(folder, entry.name)
            if not rest and (part == "**" or fnmatch(entry.name, part)):
                found.add(full)
            deeper = (part, *rest) if part == "**" else rest if fnmatch(entry.name, part) else ()
            if deeper and _is_folder(entry):
                todo.append((full, deeper, _BELOW_LINK if entry.is_symlink() else cost))
    return found


def _parquet_in(folder: Path, most: int) -> tuple[Path, ...]:
    """Return the Parquet files in a folder, or if there are none, those in its subfolders, without following links."""
    todo, found, seen = [str(folder)], [], 0
    while todo:
        here = todo.pop()
        for entry in _entries(here):
            seen += 1
            if seen > most:
                raise _too_many(str(folder), most)
            if entry.name.endswith(".parquet"):
                found.append(Path(here, entry.name))
            if entry.is_dir(follow_symlinks=False):
                todo.append(os.path.join(here, entry.name))
        if here == str(folder) and found:
            break
    return tuple(sorted(found))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder; nothing if it cannot be read."""
    with suppress(OSError), os.scandir(folder or os.curdir) as entries:
        yield from entries


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link to itself
        return entry.is_dir()
    return False


def _too_many(path: str, most: int) -> InputError:
    return InputError(
        f"The search for the files of {path!r} ended after {most:,} files and folders, the most that it looks at. Name "
        "a folder or a pattern with fewer."
    )


def _in_folder(folder: Path, split: str | None, most: int) -> Files:
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise InputError(
                f"{folder / 'dataset_dict.json'} is damaged: splits must be a list of names, got {short(splits)}. Save "
                "the dataset again."
            )
        if split is None or split not in splits:
            wanted = "Choose one with split" if split is None else f"There is no split {split!r}"
            raise InputError(f"{folder} contains several splits: {', '.join(splits)}. {wanted}.")
        return _saved(folder / split)
    if (folder / "state.json").is_file():
        if split is not None:
            raise InputError(f"{folder} contains one dataset without splits, got split={split!r}. Omit split.")
        return _saved(folder)
    found = _parquet_in(folder, most)
    if not found:
        raise InputError(f"The folder {folder} contains no Parquet file and no saved dataset. Pass {_KNOWN}.")
    return Files("parquet", _of_split(folder, found, split), folder)


def _saved(folder: Path) -> Files:
    """Return the data files of a folder written by `Dataset.save_to_disk`, in row order."""
    if not (folder / "state.json").is_file():
        raise InputError(f"{folder} has no state.json, so it was not written by Dataset.save_to_disk.")
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder} contains an index of selected rows, as written by old releases of `datasets`. Load it with "
            "datasets.load_from_disk and save it again."
        )
    paths = tuple(folder / name for name in _listed_files(folder, state.get("_data_files", [])))
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        lost = f"lacks {missing[0].name}" if missing else "names no _data_files in its state.json"
        raise InputError(f"{folder} {lost}. Save the dataset again.")
    return Files("arrow", paths, folder)


def _listed_files(folder: Path, listed: Any) -> list[str]:
    """Return the names of the data files that the state.json of a saved dataset lists."""
    entries = listed if isinstance(listed, list) else [listed]
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong:
        raise InputError(
            f"{folder / 'state.json'} is damaged: _data_files must list files of the folder, got {short(wrong[0])}. "
            "Save the dataset again."
        )
    return names


def _of_split(folder: Path, found: tuple[Path, ...], split: str | None) -> tuple[Path, ...]:
    """Return the files of one split; raise InputError if there are several splits and none is chosen."""
    names = [_split_of(folder, path) for path in found]
    several = sorted({name for name in names if name is not None})
    if split is None and len(several) > 1:
        raise InputError(f"{folder} contains several splits: {', '.join(several)}. Choose one with split.")
    chosen = tuple(path for path, name in zip(found, names, strict=True) if split in (None, name))
    if not chosen:
        raise InputError(f"{folder} has no files of split {split!r}, only of: {', '.join(several) or 'no split'}.")
    return chosen


def _split_of(folder: Path, path: Path) -> str | None:
    shard = _SHARD.match(path.stem)
    if shard:
        return shard["split"]
    inner = path.relative_to(folder).parts[:-1]
    return inner[0] if inner else path.stem if path.stem in ("train", "test", "validation", "dev") else None


def _format_of(path: Path) -> Format:
    if path.suffix.lower() in _PACKED:
        raise InputError(f"{path} is compressed. Decompress it first, because rows are copied byte for byte.")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} has an unknown file suffix, {path.suffix or 'no suffix'!r}. Pass {_KNOWN}.")
    return FORMATS[path.suffix.lower()]


def _one_format(paths: tuple[Path, ...]) -> Format:
    formats = {_format_of(path) for path in paths}
    if len(formats) > 1:
        raise InputError(f"The files have several formats ({', '.join(sorted(formats))}). Pass files of one format.")
    return formats.pop()


def _json(path: Path) -> dict:
    try:
        found = read_json(path)
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}. Save the dataset again.") from None
    if not isinstance(found, dict):
        raise InputError(
            f"{path} is damaged: it must contain a JSON object, got {short(found)}. Save the dataset again."
        )
    return found
