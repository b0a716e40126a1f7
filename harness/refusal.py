"""Stop a command with an error message before it overwrites or measures anything."""

import ast
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

WRONG = 2
"""Exit code of a rejected command, the same as for unknown options."""
_ABSENT = "nothing"


def refuse(message: str) -> NoReturn:
    """Print the reason and exit."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(WRONG)


def check_place(out: Path) -> None:
    """Exit if results cannot be written to a folder, before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        refuse(
            f"--out {out} cannot be written to ({error.strerror}). Choose another folder; it is created if necessary."
        )


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the settings that differ, one per line with both values."""
    old, new = _flat(json.loads(json.dumps(there))), _flat(json.loads(json.dumps(here)))
    names = [name for name in old | new if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    return [f"  {name}: {old.get(name, _ABSENT)} there, {new.get(name, _ABSENT)} here" for name in names]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Flatten nested settings, including strings of the form `Name(key=value)`, to single values."""
    if value == {} and not name:
        return {}
    inner = value if isinstance(value, dict) else _called(value) if isinstance(value, str) else {}
    if not inner:
        return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
    found: dict[str, str] = {}
    for key, each in inner.items():
        found |= _flat(each, f"{name}.{key}" if name else str(key))
    return found


def _called(text: str) -> dict[str, str]:
    """Parse the keyword arguments of a call in a string."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return {}
    if not isinstance(tree, ast.Call):
        return {}
    return {word.arg: ast.unparse(word.value) for word in tree.keywords if word.arg}
