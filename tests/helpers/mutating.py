"""Damage files in random but repeatable ways, and tell what reading them does."""

import json
import os
import random
import signal
import traceback

from safetensors import safe_open
from safetensors.torch import save

from eigentrace.disk.manifest import MANIFEST, manifest_text
from eigentrace.errors import EigentraceError
from eigentrace.krylov import resume as iteration

WEIRD = (
    None, -1, 0, 10**30, 1e308, "", "x", "/dev/zero", "../../etc/passwd", [], {}, [1], {"a": 1}, True, "\0", 3.5,
    [[[[]]]], 2**63, "NaN",
)  # fmt: skip
# How the description of a change begins whose checksum fits.
FORGED = "forged"
# A reader that takes longer than this many seconds counts as one that does not end.
LONGEST = 30


def mutate(path, rng):
    """Change a file, and return how: its bytes, or for JSON also one value of it, with a checksum that fits."""
    if path.suffix in (".json", ".jsonl") and rng.random() < 0.6:
        return _mutate_json(path, rng)
    if path.name == iteration._STATE and rng.random() < 0.5:
        return _forge_state(path, rng)
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "cut", "noise", "empty", "twice", "zeros", "latin"])
    at = rng.randrange(len(content) or 1)
    if kind == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "noise":
        content[at : at + 16] = rng.randbytes(min(16, len(content) - at))
    elif kind == "empty":
        content.clear()
    elif kind == "twice":
        content[at:at] = content[max(0, at - 20) : at]
    elif kind == "zeros":
        long = min(rng.randrange(1, 600), len(content) - at)
        content[at : at + long] = bytes(long)
    elif kind == "latin":
        content[at:at] = b"\xe9\xff"
    path.write_bytes(content)
    return kind


def _mutate_json(path, rng):
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    entries = json.loads(lines[number])
    keys = rng.choice(list(_places(entries)) or [()])
    owner, value = entries, rng.choice([*WEIRD, "gone"])
    for key in keys[:-1]:
        owner = owner[key]
    if not keys:
        entries = value
    elif value == "gone":
        owner.pop(keys[-1])
    else:
        owner[keys[-1]] = value
    forged = path.name == MANIFEST and isinstance(entries, dict) and rng.random() < 0.8
    if forged:
        entries.pop("sha256", None)
        lines[number] = manifest_text(entries)
    else:
        lines[number] = json.dumps(entries)
    path.write_text("\n".join(lines) + "\n")
    return f"{FORGED if forged else 'changed'} {keys} = {value!r:.30}"


def _forge_state(path, rng):
    """Change one entry of the state of an iteration, with a checksum that fits."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        entries = json.loads(file.metadata()["record"])
    name, value = rng.choice(list(entries)), rng.choice(WEIRD)
    record = json.dumps(entries | {name: value})
    path.write_bytes(save(tensors, {"record": record, "checksum": iteration._hash(record, tensors)}))
    return f"{FORGED} {name} = {value!r:.30}"


def _places(value, before=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*before, key)
        yield from _places(child, (*before, key))


def outcomes(count, attempt, first=0):
    """Call `attempt(rng)` for `count` seeds in a child process, and return what went wrong, by seed.

    An attempt returns None if all is well, or what is wrong; EigentraceError is well too. A crash of the process is
    wrong, and the seeds after it are tried in another child.
    """
    wrong, seed = {}, first
    while seed < first + count:
        lines, status = _child(range(seed, first + count), attempt)
        for line in lines:
            done, found = json.loads(line)
            seed = done + 1
            if found is not None:
                wrong[done] = found
        if status:
            wrong[seed] = f"the process ended with status {status}"
            seed += 1
    return wrong


def _child(seeds, attempt):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            signal.signal(signal.SIGALRM, _too_long)
            for seed in seeds:
                signal.alarm(LONGEST)
                os.write(write, (json.dumps([seed, _told(attempt, random.Random(seed))]) + "\n").encode())
                signal.alarm(0)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        lines = stream.read().decode().splitlines()
    return lines, os.waitpid(child, 0)[1]


def _too_long(*_):
    raise TimeoutError(f"no end after {LONGEST} seconds")


def _told(attempt, rng):
    try:
        return attempt(rng)
    except EigentraceError:
        return None
    except BaseException as error:
        places = [f for f in traceback.extract_tb(error.__traceback__) if "/eigentrace/" in f.filename]
        where = f"{places[-1].filename.split('/eigentrace/')[-1]}:{places[-1].lineno}" if places else ""
        return f"{type(error).__name__}: {str(error)[:100]} {where}"
