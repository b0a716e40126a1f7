"""Trusted runs: the function that loads a run's model and data is only called if the user created or trusts the run.

A run may come from somebody else, so the function that it names is imported and called only if one of these holds:

- the user passed the function to a command on this machine, which recorded this outside of the run,
- the user passed `trust=True` or `--trust` for this run, which is recorded in the same way,
- the function is part of eigentrace and known to be harmless.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eigentrace.disk.atomic import replacing
from eigentrace.errors import StorageError, UntrustedError
from eigentrace.numeric.hashing import hash_text

HARMLESS = ("eigentrace.demo.inputs:digits",)
"""Functions in the runs of eigentrace's own demo: they read tensors from the run and call no code that it names."""


def check_trusted(asked: Mapping[str, Any], home: Path | str | None, function: str) -> None:
    """Raise UntrustedError unless the function of a request may be called.

    Args:
        asked: The "input" section of the request.
        home: The directory of the run that stores the request.
        function: The function that would be called: the request's own, or the one at the recorded absolute path.
    """
    if function in HARMLESS or (home is not None and is_trusted(asked, home)):
        return
    place = "The settings" if home is None else f"The run at {home}"
    raise UntrustedError(
        f"{place} would import and call {called(asked, function)}, and nothing on this machine records that you "
        "created the run or trust it. Read that code first. If you trust it, pass --trust (in Python trust=True); "
        "without it, stored scores can still be read."
    )


def is_trusted(asked: Mapping[str, Any], home: Path | str) -> bool:
    """Return whether the user's configuration records that the function named by this run may be called."""
    try:
        held = json.loads(_record(home).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return held == _content(asked, home)


def trust_run(asked: Mapping[str, Any], home: Path | str) -> None:
    """Record in the user's configuration that the function named by the run at `home` may be called.

    If the configuration cannot be written, nothing is recorded, and the run needs `--trust` each time.
    """
    if "function" not in asked:
        return
    file = _record(home)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file) as partial:
            partial.write_text(json.dumps(_content(asked, home), indent=2) + "\n", encoding="utf-8")
    except (OSError, StorageError):
        return


def called(asked: Mapping[str, Any], function: str) -> str:
    """Return the call of a function with a request's arguments as Python code, with long values shortened."""
    args = asked.get("args") or {}
    words = ", ".join(f"{key}={_short(value)}" for key, value in args.items()) if isinstance(args, Mapping) else "…"
    return f"{_short(function, str)}({words})"


def config_folder() -> Path:
    """Return the folder of the user's configuration of eigentrace, which may not exist."""
    if os.name == "nt":
        home = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "eigentrace"


def _record(home: Path | str) -> Path:
    return config_folder() / "trusted_runs" / f"{hash_text(str(Path(home).resolve()))}.json"


def _content(asked: Mapping[str, Any], home: Path | str) -> dict[str, str]:
    resolved = dict(asked.get("resolved") or {}).get("function")
    what = {key: asked.get(key) for key in ("function", "args")} | {"resolved": resolved}
    return {
        "run": str(Path(home).resolve()),
        "call": called(asked, str(asked["function"] if resolved is None else resolved)),
        "sha256": hash_text(json.dumps(what, sort_keys=True)),
    }


def _short(value: Any, write: Any = repr) -> str:
    text = write(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
