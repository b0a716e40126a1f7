"""Which files a dataset is made of, and in which format."""

import json
import re
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

from eigentrace.errors import InputError

Format = Literal["csv", "tsv", "jsonl", "parquet", "arrow"]

# A row of CSV or a line of JSON longer than a block is an error in pyarrow, whose own default is 1 MiB.
BLOCK = 64 * 2**20

FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_KNOWN = "CSV, TSV, JSON lines, Parquet (a file, a folder or a pattern such as 'data/*.parquet'), or a folder that "
_KNOWN += "Dataset.save_to_disk wrote"
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
# Shards as the Hugging Face hub names them: train-00000-of-00004.parquet
_SHARD = re.compile(r"^(?P<split>.+?)-\d+-of-\d+(?:-[0-9a-f]+)?$")


@dataclass(frozen=True)
class Files:
    """The files of a dataset, in the order of its rows."""

    format: Format
    paths: tuple[Path, ...]
    source: Path
    """What the user named, or the part of it that the split is."""

    @property
    def folder(self) -> Path:
        """Where relative paths in the dataset begin."""
        return self.paths[0].parent


def find_files(dataset: Path | str, split: str | None = None) -> Files:
    """Find the files of a dataset; those of a folder or pattern are in the order of their names.

    Args:
        dataset: A file, a pattern, a folder of Parquet files, or one that `datasets` saved.
        split: Which part of a folder that holds several.
    """
    path = Path(dataset)
    if path.is_dir():
        return _in_folder(path, split)
    if split is not None:
        raise InputError(f"split={split!r} chooses a part of a folder, and {path} is none. Leave it out.")
    if path.is_file():
        return Files(_format_of(path), (path,), path)
    if has_magic(str(path)):
        found = tuple(Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file())
        if not found:
            raise InputError(f"No file matches {str(path)!r}.")
        return Files(_one_format(found), found, path)
    raise InputError(f"There is no dataset at {path}: give a file or folder of {_KNOWN}.")


def _in_folder(folder: Path, split: str | None) -> Files:
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        if split is None or split not in splits:
            wanted = "Say which with split" if split is None else f"There is no {split!r} among them"
            raise InputError(f"{folder} holds several datasets: {', '.join(splits)}. {wanted}.")
        return _saved(folder / split)
    if (folder / "state.json").is_file():
        if split is not None:
            raise InputError(f"{folder} holds one dataset, and no split {split!r}. Leave split out.")
        return _saved(folder)
    found = tuple(sorted(folder.glob("*.parquet"))) or tuple(sorted(folder.rglob("*.parquet")))
    if not found:
        raise InputError(f"The folder {folder} holds no Parquet file and no saved dataset: give {_KNOWN}.")
    return Files("parquet", _of_split(folder, found, split), folder)


def _saved(folder: Path) -> Files:
    """Read which files a folder that `Dataset.save_to_disk` wrote consists of, and in which order."""
    if not (folder / "state.json").is_file():
        raise InputError(f"{folder} has no state.json, so it is no dataset that Dataset.save_to_disk wrote.")
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder} holds a selection of rows beside its data, as old releases of `datasets` wrote them. Load it "
            "with datasets.load_from_disk and save it again."
        )
    paths = tuple(folder / file["filename"] for file in state.get("_data_files", []))
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise InputError(f"{folder} lacks {missing[0].name if missing else 'its data files'}: save the dataset again.")
    return Files("arrow", paths, folder)


def _of_split(folder: Path, found: tuple[Path, ...], split: str | None) -> tuple[Path, ...]:
    """Take the files of one split; files of several are never read as one dataset by mistake."""
    names = [_split_of(folder, path) for path in found]
    several = sorted({name for name in names if name is not None})
    if split is None and len(several) > 1:
        raise InputError(f"{folder} holds several datasets: {', '.join(several)}. Say which with split.")
    chosen = tuple(path for path, name in zip(found, names, strict=True) if split in (None, name))
    if not chosen:
        raise InputError(f"{folder} has no files of a split {split!r}, only of: {', '.join(several) or 'no split'}.")
    return chosen


def _split_of(folder: Path, path: Path) -> str | None:
    shard = _SHARD.match(path.stem)
    if shard:
        return shard["split"]
    inner = path.relative_to(folder).parts[:-1]
    return inner[0] if inner else path.stem if path.stem in ("train", "test", "validation", "dev") else None


def _format_of(path: Path) -> Format:
    if path.suffix.lower() in _PACKED:
        raise InputError(f"{path} is packed. Unpack it first: rows are copied as they stand in the file.")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} ends in {path.suffix or 'no suffix'!r}, which is not known: give {_KNOWN}.")
    return FORMATS[path.suffix.lower()]


def _one_format(paths: tuple[Path, ...]) -> Format:
    formats = {_format_of(path) for path in paths}
    if len(formats) > 1:
        raise InputError(f"The files are in several formats ({', '.join(sorted(formats))}): give files of one.")
    return formats.pop()


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}. Save the dataset again.") from None
