"""Detection of damaged data files: what pyarrow raises on them, and what it reads without noticing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from eigentrace.errors import EigentraceError, InputError

# The last bytes of an Arrow stream. Without them, a file cut between two batches looks complete.
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raise InputError with the path for whatever reading a damaged file raises, except errors of the Arrow parsers."""
    try:
        yield
    except (EigentraceError, FileNotFoundError, PermissionError):
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged or not UTF-8: {error}. Convert it to UTF-8, or create it again.") from None
    except OSError as error:
        raise damaged_data(path, error) from None


def damaged_data(path: Path | str, what: object) -> InputError:
    """Return the error for a data file that is damaged."""
    return InputError(f"{path} is damaged: {what}. Restore it from a copy, or create it again.")


def check_values(values: pa.Array | pa.ChunkedArray, column: str, path: Path | str) -> None:
    """Raise InputError unless the lengths, offsets and texts of a column are valid; other values can crash pyarrow."""
    try:
        values.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        if "UTF8" in str(error):
            raise InputError(
                f"Column {column!r} of {path} contains text that is not UTF-8 ({error}). Convert the file (iconv -f "
                "latin1 -t utf-8), or create it again."
            ) from None
        raise damaged_data(path, f"column {column!r} is not valid ({error})") from None


def read_stream(path: Path) -> pa.Table:
    """Return the table of a file with an Arrow stream, memory-mapped; its values are not checked yet."""
    with reading(path):
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_stream(source).read_all()
                rest, size = source.size() - source.tell(), source.size()
            with path.open("rb") as file:
                file.seek(max(0, size - len(_STREAM_END)))
                end = file.read()
        except pa.ArrowException as error:
            raise damaged_data(path, error) from None
    if rest or end != _STREAM_END:
        raise damaged_data(path, f"{rest:,} bytes follow its end" if rest else "it ends before the end of its data")
    return table
