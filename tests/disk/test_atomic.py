"""Files that appear whole or not at all, where the system does not even let go of what was begun."""

import errno
from pathlib import Path

import pytest

from eigentrace.disk.atomic import appearing, replacing
from eigentrace.errors import StorageError


@pytest.mark.parametrize("writing", [appearing, replacing])
def test_a_read_only_file_system_is_told_in_words(writing, tmp_path, monkeypatch):
    def refused(path, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(path))  # for a file that is not there, too

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(Path, "write_text", refused)
    with (
        pytest.raises(StorageError, match=r"kept\.csv could not be written .*Read-only file system.* Check the path"),
        writing(tmp_path / "kept.csv") as partial,
    ):
        partial.write_text("id,text\n")
