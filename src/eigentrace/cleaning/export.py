"""Export of the kept rows of a dataset in its own format: rows are copied, not parsed and rewritten."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eigentrace.cleaning.decisions import Decisions
from eigentrace.cleaning.match import matched
from eigentrace.disk.atomic import appearing
from eigentrace.disk.bounded import read_json
from eigentrace.errors import DataError, InputError, MismatchError
from eigentrace.formats.files import FORMATS, Files, find_files
from eigentrace.formats.quoting import IsOpen, has_quoting, lines_of, open_after, separator
from eigentrace.formats.records import without_views

# Rows of a Parquet file that are read at a time, and bytes in memory before a row group is written.
_ROWS_AT_ONCE = 65_536
_GROUP_BYTES = 1 << 27
_STATE = "state.json"


class Masked(Protocol):
    """An object with a mask of rows to drop, such as `eigentrace.Decisions`."""

    @property
    def mask(self) -> np.ndarray:
        """One boolean per row, True for rows to drop."""


def export(
    decisions: Masked | np.ndarray | Sequence[bool],
    source: str | Path,
    out: str | Path,
    *,
    delimiter: str | None = None,
    header: bool = True,
    split: str | None = None,
    id: str | None = None,
    label: str | None = None,
) -> Path:
    """Write the rows of a dataset that are not dropped, in their order and in the format of the dataset.

    Rows of CSV, TSV and JSONL files are copied byte for byte, including line breaks inside quotes, encoding and header;
    empty lines are not rows and are copied. In a TSV file without quoting, every line is a row. Parquet files keep
    their schema, metadata and compression. Little more than a line or a row group is in memory at a time. The output
    is created by an atomic rename, and an existing path is never overwritten.

    If the decisions have ids, rows are matched by id: the dataset must have the same ids, in any order. Without ids,
    rows are matched by position, and rows with the same label in the dataset must have the same class in the decisions.
    Booleans are matched by position, without checks of content.

    Args:
        decisions: The result of `eigentrace.clean`, or one boolean per row, True for rows to drop.
        source: A CSV, TSV, JSONL or Parquet file, a pattern or folder of them (sorted by name), or a folder written by
            `Dataset.save_to_disk`.
        out: A new path: a file if `source` is a file, else a folder.
        delimiter: The delimiter of CSV fields; the most frequent of , ; | and tab in the first line if not given.
        header: Whether the first record of a CSV or TSV file contains column names.
        split: The split of a folder that contains several; only this split is written.
        id: The dataset's column of ids; "id" if not given.
        label: The dataset's column of labels, compared if there are no ids; "label", if it exists, if not given.

    Returns:
        The path of the output.
    """
    flags = _Flags(getattr(decisions, "mask", decisions), source)
    files, out = find_files(source, split), Path(out)
    is_file = files.paths == (Path(source),)
    if is_file and FORMATS.get(out.suffix.lower()) != files.format:
        raise InputError(
            f"The output must have the format of the dataset, {files.format}, but {out.name} has a suffix of another "
            "format."
        )
    if isinstance(decisions, Decisions):
        mark = separator(files.paths[0], delimiter).decode() if files.format == "csv" else None
        has_names = header or files.format not in ("csv", "tsv")
        flags = _Flags(matched(decisions, files, id, label, mark, has_names), source)
    elif id is not None or label is not None:
        raise InputError("id and label can only be used with Decisions, got booleans. Pass Decisions, or omit both.")
    with appearing(out) as partial:
        for path, target in zip(files.paths, [partial] if is_file else _targets(files, partial), strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(files.format, path, target, flags, delimiter, header)
        flags.check_used_up()
        if files.format == "arrow":
            _write_state(files, partial, flags)
    return out


def _write(kind: str, source: Path, out: Path, flags: "_Flags", delimiter: str | None, header: bool) -> None:
    """Write the kept rows of one file."""
    if kind == "parquet":
        _write_parquet(source, out, flags)
    elif kind == "arrow":
        _write_arrow(source, out, flags)
    elif kind == "jsonl":
        _write_lines(source, out, flags, None, header=False)
    else:
        _write_lines(source, out, flags, _reader(source, kind, delimiter, header), header=header)


class _Flags:
    """One flag per row of the dataset, consumed in row order."""

    def __init__(self, drop: Any, source: str | Path) -> None:
        drop = np.asarray(drop)
        if drop.ndim != 1 or drop.dtype != np.bool_:
            raise InputError(
                f"Expected one boolean per row, True for rows to drop, got {drop.dtype} of shape {drop.shape}. "
                "Pass the result of eigentrace.clean, or its .mask."
            )
        self.drop, self.source, self.used = drop, source, 0
        self.bytes = drop.tobytes()  # indexing single items is much faster than in an array

    def take(self, count: int) -> pa.Array:
        """Return which of the next `count` rows are kept."""
        start, self.used = self.used, self.used + count
        if self.used > len(self.drop):
            raise self.mismatch("more")
        return pa.array(~self.drop[start : self.used])

    def mismatch(self, found: str) -> MismatchError:
        """Return the error for a dataset whose number of rows differs from the number of flags."""
        return MismatchError(
            f"{self.source} has {found} rows than the {len(self.drop):,} of the decisions. Pass the dataset that was "
            "scored, unchanged; nothing was written."
        )

    def check_used_up(self) -> None:
        """Raise MismatchError if the dataset has fewer rows than flags."""
        if self.used < len(self.drop):
            raise self.mismatch(f"{len(self.drop) - self.used:,} fewer")


def _targets(files: Files, out: Path) -> list[Path]:
    """Return the output path of each file: its path relative to the common folder of all files, in `out`."""
    common = Path(os.path.commonpath([path.parent for path in files.paths]))
    return [out / path.relative_to(common) for path in files.paths]


def _reader(source: Path, form: str, delimiter: str | None, header: bool) -> IsOpen:
    """Return the function that determines whether a quoted field is open after a line; see `IsOpen`."""
    mark = separator(source, "\t" if form == "tsv" else delimiter)
    if form == "tsv" and not has_quoting(source, header=header):
        return lambda line, inside: False
    return open_after(mark)


def _write_lines(source: Path, out: Path, flags: _Flags, is_open: IsOpen | None, *, header: bool) -> None:
    """Copy the lines of kept rows, the header and empty lines."""
    drop, total, row = flags.bytes, len(flags.bytes), flags.used - 1
    in_header, inside, keep = header, False, True
    is_empty = bytes.isspace if is_open is None else (b"\n", b"\r\n", b"\r").__contains__
    with source.open("rb") as read, out.open("wb") as file:
        for line in read if is_open is None else lines_of(read):
            if not inside and is_empty(line):
                file.write(line)
                continue
            if not inside and not in_header:
                row += 1
                if row >= total:
                    raise flags.mismatch("more")
                keep = not drop[row]
            if is_open is not None:
                inside = is_open(line, inside)
            in_header = False
            if keep:
                file.write(line)
    if inside:
        raise DataError(f"{source}: quotes in row {row} are never closed. Close them; nothing was written.")
    flags.used = row + 1


def _write_parquet(source: Path, out: Path, flags: _Flags) -> None:
    try:
        file = pq.ParquetFile(source, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{source} cannot be read as Parquet ({error}). Restore it.") from None
    with file, pq.ParquetWriter(out, file.schema_arrow, compression=_codecs(file)) as writer:
        for group in range(file.num_row_groups):
            held: list[pa.RecordBatch] = []
            for batch in _guarded(source, file.iter_batches(_ROWS_AT_ONCE, row_groups=[group])):
                held += _kept(batch, flags)
                if sum(part.nbytes for part in held) > _GROUP_BYTES:
                    held = _flush(writer, held)
            _flush(writer, held)


def _kept(batch: pa.RecordBatch, flags: _Flags) -> list[pa.RecordBatch]:
    """Return the kept rows of a batch, with unchanged types."""
    whole, keep = pa.Table.from_batches([batch]), flags.take(len(batch))
    plain = without_views(whole)
    if plain is whole:
        return [batch.filter(keep)]
    return plain.filter(keep).cast(batch.schema).combine_chunks().to_batches()


def _flush(writer: pq.ParquetWriter, held: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Write the batches in memory as one row group, and return an empty list."""
    rows = sum(len(part) for part in held)
    if rows:
        writer.write_table(pa.Table.from_batches(held), row_group_size=rows)
    return []


def _codecs(file: pq.ParquetFile) -> dict[str, str] | str:
    """Return the compression of each column in the first row group."""
    if not file.num_row_groups:
        return "snappy"
    group = file.metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return {c.path_in_schema: "none" if c.compression == "UNCOMPRESSED" else c.compression for c in columns}


def _guarded(source: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches, and raise read errors as DataError, so that they differ from write errors."""
    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{source} is damaged ({error}). Restore it; nothing was written.") from None


def _write_arrow(source: Path, out: Path, flags: _Flags) -> None:
    try:
        stream = pa.ipc.open_stream(pa.memory_map(str(source)))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{source} cannot be read as an Arrow stream ({error}). Restore it.") from None
    with stream, pa.OSFile(str(out), "wb") as file, pa.ipc.new_stream(file, stream.schema) as writer:
        for batch in _guarded(source, iter(stream)):
            for part in _kept(batch, flags):
                writer.write_batch(part)


def _write_state(files: Files, out: Path, flags: _Flags) -> None:
    """Copy the JSON files of a saved dataset, with a new fingerprint, because `datasets` caches results by it."""
    for path in files.folder.glob("*.json"):
        try:
            described = read_json(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}). Restore it; nothing was written.") from None
        if path.name == _STATE:
            whole = f"{described.get('_fingerprint')} without ".encode() + np.packbits(flags.drop).tobytes()
            described["_fingerprint"] = hashlib.sha256(whole).hexdigest()[:16]
        (out / path.name).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
