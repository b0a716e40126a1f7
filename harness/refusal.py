"""Ends a command before it does harm, in words that say what is wrong and what to do."""

import ast
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

WRONG = 2
"""What a command returns that was asked for something that cannot be done, as after options it does not know."""
_ABSENT = "nothing"


def refuse(message: str) -> NoReturn:
    """Say why nothing is done, and end."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(WRONG)


def check_place(out: Path) -> None:
    """Refuse a folder that results cannot be written to, before anything is measured for it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        refuse(f"--out {out} cannot be written to ({error.strerror}). Give another folder; it is made if need be.")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say which settings of two are not the same, each in a line with both values."""
    old, new = _flat(json.loads(json.dumps(there))), _flat(json.loads(json.dumps(here)))
    names = [name for name in old | new if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    return [f"  {name}: {old.get(name, _ABSENT)} there, {new.get(name, _ABSENT)} here" for name in names]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Take settings apart down to single values, those written as `Name(key=value)` too."""
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
    """Return the named arguments of a call that is written out."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return {}
    if not isinstance(tree, ast.Call):
        return {}
    return {word.arg: ast.unparse(word.value) for word in tree.keywords if word.arg}
