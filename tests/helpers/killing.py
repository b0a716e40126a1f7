"""A process that fits and scores and is killed at chosen moments; each attempt is forked, so that torch loads once.

Run as `python -m tests.helpers.killing folder`. It prints what happened as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import eigentrace as et
from eigentrace.krylov import resume as iteration
from tests.helpers.runs import Points, model

STEPS, ROWS, SHARD, BATCH = 20, 240, 16, 8
# Moments of a kill by phase: the process is killed at the n-th event of a kind. A product syncs three files to disk and
# takes 30 batches; a shard syncs four and takes 2.
MOMENTS = {
    "fit": [("fsync", 5), ("forward", 100), ("fsync", 6), ("replace", 2), ("forward", 120),
            ("fsync", 7), ("replace", 3), ("forward", 160), ("fsync", 8), ("replace", 4)],
    "score": [("fsync", 6), ("forward", 16), ("replace", 4), ("fsync", 7), ("replace", 3),
              ("forward", 25), ("fsync", 8), ("replace", 5), ("fsync", 9), ("replace", 1)],
}  # fmt: skip


class Watched:
    """Counts events of the process, and kills it at the chosen moment."""

    def __init__(self, folder: Path, phase: str | None, kind: str, count: int) -> None:
        self.folder, self.victim, self.kind, self.left = folder, phase, kind, count
        self.phase = "fit"
        for name in ("fsync", "replace"):
            setattr(os, name, self.counting(name, getattr(os, name)))

    def counting(self, kind, function):
        def call(*args, **kwargs):
            self.saw(kind)
            return function(*args, **kwargs)

        return call

    def saw(self, kind: str) -> None:
        if (kind, self.phase) == (self.kind, self.victim):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def evaluated(self, examples: int) -> None:
        """Record, in a file that survives a kill, how many examples the model evaluated."""
        with (self.folder / f"{self.phase}.count").open("ab", buffering=0) as file:
            file.write(examples.to_bytes(4, "little"))
        self.saw("forward")


class Model(nn.Module):
    """The small classifier, which records how many examples it evaluates."""

    def __init__(self, watched):
        super().__init__()
        self.net = model()
        self.tell = watched.evaluated

    def forward(self, x):
        self.tell(len(x))
        return self.net(x)


def work(folder: Path, watched: Watched, rows: int = ROWS, steps: int = STEPS) -> None:
    """Fit and score into a run, resuming from existing files."""
    torch.set_num_threads(1)
    iteration.SECONDS_BETWEEN_SAVES = 0.0
    data = et.Data(Points(rows), batch_size=BATCH)
    fitted = et.Arnoldi(steps=steps, keep=4).fit(et.classification(Model(watched)), data, resume=folder / "krylov")
    watched.phase = "score"
    et.score(fitted, data, folder, shard_rows=SHARD)


def attempt(folder: Path, counts: Path, victim: str | None = None, kind: str = "", count: int = 0, **options) -> int:
    """Do the work in a separate process; return the signal that ended it, or 0."""
    counts.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(folder, Watched(counts, victim, kind, count), **options)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"The work failed with {os.WEXITSTATUS(status)} ({victim}, {kind}, {count}).")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def evaluated(counts: Path, phase: str) -> int:
    file = counts / f"{phase}.count"
    content = file.read_bytes() if file.exists() else b""
    return sum(int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4))


def main(base: Path) -> None:
    """Work once without kills, once killed at every moment, and twice on little data to measure the cost of a start."""
    attempt(base / "whole", base / "whole-counts")
    killed = {
        phase: [attempt(base / "killed", base / "killed-counts", phase, *moment) for moment in moments]
        for phase, moments in MOMENTS.items()
    }
    last = attempt(base / "killed", base / "killed-counts")
    attempt(base / "short", base / "short-counts", steps=4)
    attempt(base / "small", base / "small-counts", rows=SHARD, steps=4)
    names = ("whole", "killed", "short", "small")
    counts = {name: {p: evaluated(base / f"{name}-counts", p) for p in MOMENTS} for name in names}
    print(json.dumps({"killed": killed, "last": last, "counts": counts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
