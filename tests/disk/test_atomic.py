"""Files that appear whole or not at all, where the system does not even let go of what was begun."""

import errno
from pathlib import Path

import pytest

from eigentrace.disk.atomic import appearing, replacing
from eigentrace.errors import StorageError
from tests.helpers.expecting import refused


@pytest.mark.parametrize("writing", [appearing, replacing])
def test_an_error_on_a_read_only_file_system_mentions_the_file(writing, tmp_path, monkeypatch):
    def no_write(path, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(path))  # for a file that is not there, too

    monkeypatch.setattr(Path, "unlink", no_write)
    monkeypatch.setattr(Path, "write_text", no_write)
    with (
        refused(StorageError, tmp_path / "kept.csv", f"[Errno {errno.EROFS}]"),
        writing(tmp_path / "kept.csv") as partial,
    ):
        partial.write_text("id,text\n")
