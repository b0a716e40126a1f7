"""Download public data once, with checksums."""

import hashlib
import shutil
import urllib.request
from pathlib import Path

from eigentrace.disk.atomic import replacing
from eigentrace.errors import InputError
from harness.command import say
from harness.files import made_once


def fetch(url: str, md5: str, target: Path) -> Path:
    """Download a file unless it exists; a file with another digest than expected is removed again.

    Raises:
        InputError: If the download fails, or the digest is not the expected one.
    """
    made_once(target, lambda: _fetch(url, md5, target))
    return target


def _fetch(url: str, md5: str, target: Path) -> None:
    say(f"downloading {url}")
    with replacing(target) as unfinished:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer, unfinished.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise InputError(
                f"{url} could not be downloaded ({error}). Put the file at {target} by other means."
            ) from error
        found = hashlib.md5(unfinished.read_bytes(), usedforsecurity=False).hexdigest()
        if found != md5:
            raise InputError(
                f"{url} has the MD5 digest {found}, expected {md5}: it was changed, or cut off on the way."
            )
