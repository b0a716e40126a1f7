"""Fits that are killed and go on: by real signals in real processes, at the moments that matter, to the last bit.

One interpreter that has imported torch is kept as a server and forks for every job, and a job may be told to kill
itself at its n-th event. Events are what the file system and the matrix are asked for, as wrappers in this file count.
"""

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.curvature.operator import Curvature
from eigentrace.disk.lock import locked
from eigentrace.errors import InputError, MismatchError
from eigentrace.krylov import resume as iteration
from eigentrace.krylov.iterate import arnoldi, lanczos, ritz
from eigentrace.krylov.resume import opened
from eigentrace.krylov.vectors import Basis
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.places import ROOT
from tests.helpers.small import examples, table

pytestmark = pytest.mark.filterwarnings("ignore::eigentrace.errors.ConvergenceWarning")


def symmetric(values, dtype):
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (Q * torch.as_tensor(values, dtype=torch.float64) @ Q.T).to(dtype)


DECAYING = [(-1) ** (i % 3 == 0) * 0.8**i for i in range(40)]
# name: iteration, eigenvalues, type, steps, basis
ITERATIONS = {
    "lanczos with restarts": (lanczos, DECAYING, torch.float32, 9, Basis(max_vectors=5, restart_keep=3)),
    "arnoldi that draws, in bf16": (arnoldi, DECAYING, torch.float32, 6, Basis(dtype="bf16")),
    # Every copy of an eigenvalue beyond the first needs a fresh vector; in the end nothing is left to find.
    "fresh vectors": (lanczos, [5.0, 5.0, 5.0, 3.0, 3.0] + [0.0] * 15, torch.float64, 15, Basis()),
}
FITS = {
    "restarts": et.Arnoldi(steps=12, keep=3, sample=40, basis=Basis(max_vectors=6)),
    # Without a tail nothing is calibrated, so that a fit ends with its iteration.
    "bf16": et.Arnoldi(steps=8, keep=3, sample=40, basis=Basis(dtype="bf16"), tail=None),
    "spread": et.Arnoldi(steps=8, keep=3, sample=20, spread=True, tail=None),
}
METHOD = FITS["restarts"]


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"" if tensor is None else tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def task_of(on_call=lambda: None, seed=0, smoothing=0.0, **options):
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 3))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator)

    def output(model, batch):
        on_call()
        return model(batch[0])

    def loss(outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], reduction="none", label_smoothing=smoothing)

    return et.Task(model, outputs=output, output_loss=loss, **options)


def data_of(size=60):
    return et.Data(TensorDataset(*examples(size)), batch_size=32)


def eigenpairs(fitted):
    (block,) = fitted.blocks
    return digest(fitted.spectrum.eigenvalues, fitted.spectrum.residuals, block.directions.matrix, block.weights)


class Events:
    """Count what a job asks for, note its products where a kill cannot take them back, and die at the n-th event."""

    def __init__(self, log=None, die=None):
        self.count, self.die = 0, die
        self.log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def happen(self):
        if self.count == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def product(self):
        self.happen()
        if self.log is not None:
            os.write(self.log, b".")
        self.happen()

    def watch_files(self):
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, self._around(getattr(os, name)))

    def _around(self, function):
        def watched(*args, **options):
            self.happen()
            found = function(*args, **options)
            self.happen()
            return found

        return watched


def iterate(name, directory=None, log=None, die=None):
    """Job: run one of the iterations, on a matrix that counts its products."""
    iteration_of, values, dtype, steps, basis = ITERATIONS[name]
    A, events = symmetric(values, dtype), Events(log, die)
    draws = torch.Generator().manual_seed(3)
    start = torch.randn(len(A), generator=torch.Generator().manual_seed(1), dtype=dtype)

    def matvec(v):
        events.product()
        noise = torch.randn((), generator=draws, dtype=dtype) if iteration_of is arnoldi else 0.0
        return A @ v * (1 + 0.01 * noise)

    if directory is None:
        found = iteration_of(matvec, start, steps, basis=basis)
    else:
        events.watch_files()
        with opened(directory, {"matrix": name}, draws) as saved:
            saved.begin()
            found = iteration_of(matvec, start, steps, basis=basis, memory=saved)
    numbers = digest(found.projected, found.vectors.store[: found.size], *ritz(found))
    return {"digest": numbers, "events": events.count, "products": found.num_products, "ending": found.ending.name}


def fit(name, directory=None, log=None, die=None, limit=None, seconds=0.0, steps=None):
    """Job: fit one of the methods, on a model that counts its calls."""
    events, method = Events(log, die), FITS[name]
    method = dataclasses.replace(method, steps=steps or method.steps)
    iteration.SECONDS_BETWEEN_SAVES = seconds
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    events.watch_files()
    fitted = method.fit(task_of(events.product), data_of(), resume=directory)
    return {"digest": eigenpairs(fitted), "events": events.count}


def serve():
    """Fork for every line of jobs, and say how each ended."""
    torch.set_num_threads(1)
    iteration.SECONDS_BETWEEN_SAVES = 0
    METHOD.fit(task_of(), data_of())  # what torch sets up at first use is inherited by every job
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                answer = {"iterate": iterate, "fit": fit}[job["function"]](**job["options"])
            except Exception as error:
                answer = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
            Path(job["out"]).write_text(json.dumps(answer))
            os._exit(0)
        sys.stdout.write(f"{os.waitpid(pid, 0)[1]}\n")
        sys.stdout.flush()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a job in a process of its own; None if it was killed, which happens only to those told to die."""
    out = tmp_path_factory.mktemp("out") / "answer.json"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # backward threads do not survive a fork
    command = [sys.executable, "-m", "tests.krylov.test_resume"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as server:

        def job(function, *args, **options):
            names = function.__code__.co_varnames
            options |= {key: str(value) for key, value in options.items() if isinstance(value, Path)}
            options |= dict(zip(names, args, strict=False))
            out.unlink(missing_ok=True)
            server.stdin.write(json.dumps({"function": function.__name__, "options": options, "out": str(out)}) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            if os.WIFSIGNALED(status):
                assert os.WTERMSIG(status) == signal.SIGKILL
                assert options["die"] is not None
                return None
            return json.loads(out.read_text())

        yield job
        server.stdin.close()


def vectors(directory):
    return {file.name: file.read_bytes() for file in directory.glob("vectors-*")}


def killed_and_continued(run, name, moments, tmp_path):
    """Kill an iteration at each of these events in turn, each time from the beginning, and let it end."""
    whole, uninterrupted = run(iterate, name), tmp_path / "uninterrupted"
    run(iterate, name, directory=uninterrupted)
    for moment in moments:
        directory, log = tmp_path / f"at-{moment}", tmp_path / f"log-{moment}"
        assert run(iterate, name, directory=directory, log=log, die=moment) is None
        found = run(iterate, name, directory=directory, log=log)
        assert found["digest"] == whole["digest"], moment
        assert found["ending"] == whole["ending"]
        assert len(log.read_bytes()) <= whole["products"] + 1, moment
        assert vectors(directory) == vectors(uninterrupted)
        assert not list(directory.glob(".*"))


def number_of_events(run, name, tmp_path):
    return run(iterate, name, directory=tmp_path / "counted")["events"]


@pytest.mark.parametrize("name", ITERATIONS)
def test_killed_at_many_moments_it_ends_with_the_same_bits(run, name, tmp_path):
    events = number_of_events(run, name, tmp_path)
    assert events > 40
    killed_and_continued(run, name, range(0, events, 11), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ITERATIONS)
def test_killed_at_every_moment_it_ends_with_the_same_bits(run, name, tmp_path):
    killed_and_continued(run, name, range(number_of_events(run, name, tmp_path)), tmp_path)


def calls_of(run, name, tmp_path, **options):
    """How often a fit calls the model."""
    path = tmp_path / f"counted-{len(list(tmp_path.iterdir()))}"
    path.mkdir()
    run(fit, name, log=path / "log", directory=path / "krylov", **options)
    return len((path / "log").read_bytes())


@pytest.mark.parametrize("name", FITS)
def test_a_fit_killed_again_and_again_ends_with_the_same_bits(run, name, tmp_path):
    steps = FITS[name].steps
    calls = calls_of(run, name, tmp_path)
    per_product = calls - calls_of(run, name, tmp_path, steps=steps - 1)
    before = calls - steps * per_product
    directory, log, kills, found = tmp_path / "krylov", tmp_path / "log", 0, None
    while found is None:
        # Two events to a call, and a dozen to what is kept of a product: each time some products are done, not all.
        die = 2 * before + 2 * (2 * per_product + 12) + 5 * kills
        found = run(fit, name, directory=directory, log=log, die=die)
        kills += found is None
    assert kills >= 2
    assert found["digest"] == run(fit, name)["digest"]
    assert len(log.read_bytes()) <= (kills + 1) * before + (steps + kills) * per_product


def test_quick_products_are_not_all_kept_and_nothing_changes(run, tmp_path):
    directory, log = tmp_path / "krylov", tmp_path / "log"
    events = run(fit, "spread", directory=tmp_path / "other", seconds=1e9)["events"]
    assert events < run(fit, "spread", directory=tmp_path / "often")["events"]
    assert run(fit, "spread", directory=directory, log=log, die=events - 20, seconds=1e9) is None
    assert run(fit, "spread", directory=directory)["digest"] == run(fit, "spread")["digest"]


def test_no_room_left(run, tmp_path):
    directory, log = tmp_path / "krylov", tmp_path / "log"
    # The seventh vector does not fit.
    found = run(fit, "spread", directory=directory, log=log, limit=7 * 703 * 4 - 1000)
    assert found["error"] == "StorageError"
    expect_mentions(found["message"], [directory / "vectors-00000.bin"])
    assert run(fit, "spread", directory=directory, log=log)["digest"] == run(fit, "spread")["digest"]
    calls = calls_of(run, "spread", tmp_path)
    per_product = calls - calls_of(run, "spread", tmp_path, steps=7)
    assert len(log.read_bytes()) == 2 * calls - 7 * per_product  # six were done and five of them kept: three were left


def test_two_processes_at_once(run, tmp_path):
    with locked(tmp_path):
        found = run(fit, "bf16", directory=tmp_path)
    assert found["error"] == "BusyError"
    expect_mentions(found["message"], [tmp_path, os.getpid()])
    assert [item.name for item in tmp_path.iterdir()] == ["lock"]
    assert run(fit, "bf16", directory=tmp_path)["digest"] == run(fit, "bf16")["digest"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished fit and its directory; tests work on copies."""
    path = tmp_path_factory.mktemp("done") / "krylov"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration, "SECONDS_BETWEEN_SAVES", 0)
        return METHOD.fit(task_of(), data_of(), resume=path), path


@pytest.fixture
def directory(done, tmp_path):
    copy = tmp_path / "krylov"
    shutil.copytree(done[1], copy)
    return copy


def test_a_fit_that_is_done_needs_no_product(done, directory, monkeypatch):
    assert eigenpairs(done[0]) == eigenpairs(METHOD.fit(task_of(), data_of()))

    def refuse(*args):
        raise AssertionError("a product")

    monkeypatch.setattr(Curvature, "matvec", refuse)
    again = METHOD.fit(task_of(), data_of(), resume=directory)
    assert eigenpairs(again) == eigenpairs(done[0])
    assert again.calibration == done[0].calibration
    assert again.spectrum.num_products == METHOD.steps
    assert again.spectrum.ending is done[0].spectrum.ending
    with refused(AssertionError, "a product"):
        METHOD.fit(task_of(), data_of())


def test_what_is_made_of_an_iteration_may_change(directory):
    other = dataclasses.replace(METHOD, keep=2, tail=None)
    found = other.fit(task_of(), data_of(), resume=str(directory))
    assert eigenpairs(found) == eigenpairs(other.fit(task_of(), data_of()))


def contents(directory):
    return {item.name: (item.read_bytes(), item.stat().st_mtime_ns) for item in directory.iterdir()}


OTHER = {
    "seed": ({"seed": 1}, {}, ("seed", 0, 1)),
    "steps": ({"steps": 13}, {}, ("steps", 12, 13)),
    "sample": ({"sample": None}, {}, ("sample", 40, None)),
    "curvature": ({"curvature": "hessian"}, {}, ("curvature", "gauss-newton", "hessian")),
    "basis": ({"basis": Basis(max_vectors=7)}, {}, ("basis max_vectors", 6, 7)),
    "several": ({"seed": 1, "precision": "bf16"}, {}, ("seed", 0, 1, "precision", "fp32", "bf16")),
    "weights": ({}, {"seed": 1}, ("model:",)),
    "selection": ({}, {"params": ["2.weight"]}, ("model:",)),
    "penalty": ({}, {"l2": 0.1}, ("l2", "{}", "{'0.weight': 0.1")),
    "loss": ({}, {"smoothing": 0.1}, ("losses",)),
}


@pytest.mark.parametrize(("settings", "options", "mentions"), table(OTHER))
def test_another_fit_is_refused_and_nothing_touched(directory, settings, options, mentions):
    before = contents(directory)
    with refused(MismatchError, directory, *mentions):
        dataclasses.replace(METHOD, **settings).fit(task_of(**options), data_of(), resume=directory)
    assert contents(directory) == before


def test_other_data_is_refused(directory):
    with refused(MismatchError, directory, "examples", "num_train", 60, 59):
        METHOD.fit(task_of(), data_of(59), resume=directory)
    x, y = examples(60)
    with refused(MismatchError, directory, "losses"):
        METHOD.fit(task_of(), TensorDataset(x, (y + 1) % 3), resume=directory)
    with refused(MismatchError, directory, "num_train", 60, 100):
        METHOD.fit(task_of(), data_of(), num_train=100, resume=directory)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with refused(MismatchError, tmp_path, "manifest.json"):
        METHOD.fit(task_of(), data_of(), resume=tmp_path)
    with refused(MismatchError, tmp_path / "notes.txt"):
        METHOD.fit(task_of(), data_of(), resume=tmp_path / "notes.txt")
    fitted = METHOD.fit(task_of(), data_of())
    fitted.save(tmp_path / "fit")
    before = contents(tmp_path / "fit")
    with refused(MismatchError, tmp_path / "fit" / "manifest.json", "'fit'", "'Krylov iteration'"):
        METHOD.fit(task_of(), data_of(), resume=tmp_path / "fit")
    assert contents(tmp_path / "fit") == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["fit", "notes.txt"]
    with refused(InputError, "resume", "int"):
        METHOD.fit(task_of(), data_of(), resume=3)


def flip(position):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)

    return damage


DAMAGE = {
    "vector": ("vectors-*", flip(2 * 703 * 4 + 5), ("vector 3",)),
    "short": ("vectors-*", lambda file: os.truncate(file, 703 * 4 - 1), ("vector 1",)),
    "gone": ("vectors-*", Path.unlink, ()),
    "state": ("state*", flip(-1), ("checksum",)),
    "header": ("state*", flip(3), ()),
    "empty": ("state*", lambda file: os.truncate(file, 0), ()),
    "manifest": ("manifest*", lambda file: file.write_text("{"), ()),
    "result": ("result*", flip(-1), ("checksums",)),
}


@pytest.mark.parametrize(("pattern", "damage", "mentions"), table(DAMAGE))
def test_damage_is_refused_naming_the_file_and_the_directory(directory, pattern, damage, mentions):
    (file,) = directory.glob(pattern)
    damage(file)
    with refused(MismatchError, file, *mentions) as caught:
        METHOD.fit(task_of(), data_of(), resume=directory)
    expect_mentions(str(caught.value).replace(str(file), ""), [directory])


@pytest.mark.parametrize("pattern", ["vectors-*", "state*", "result*", "manifest*"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused_without_waiting(directory, pattern, kind):
    (file,) = directory.glob(pattern)
    file.unlink()
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}[kind](file)
    with refused(MismatchError, file):
        METHOD.fit(task_of(), data_of(), resume=directory)
    done = iteration.progress_of(directory)
    assert (done is None) == (pattern in ("state*", "manifest*"))


def forge(file, change):
    """Change the state as somebody who can write it, with a checksum that fits."""
    with safe_open(file, "pt") as held:
        tensors = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
        record = json.loads(held.metadata()["record"])
    change(record, tensors)
    text = json.dumps(record)
    file.write_bytes(save(tensors, {"record": text, "checksum": iteration._hash(text, tensors)}))


FORGED = {
    "count of text": lambda record, _: record.update(count="6"),
    "a large count": lambda record, _: record.update(count=10**30),
    "a negative size": lambda record, _: record.update(size=-1),
    "a large size": lambda record, _: record.update(size=10**9, count=10**9),
    "no count": lambda record, _: record.pop("count"),
    "one more entry": lambda record, _: record.update(more=1),
    "an unknown ending": lambda record, _: record.update(ending="never"),
    "an ending of a list": lambda record, _: record.update(ending=[1]),
    "restarts of text": lambda record, _: record.update(restarts="../../x"),
    "beta of text": lambda record, _: record.update(beta="x"),
    "checksums of a number": lambda record, _: record.update(checksums=3),
    "checksums of texts": lambda record, _: record.update(checksums=["a"] * len(record["checksums"])),
    "no projected": lambda _, tensors: tensors.pop("projected"),
    "projected of one number": lambda _, tensors: tensors.update(projected=torch.zeros(1)),
    "a wrong generator": lambda _, tensors: tensors.update(generator=torch.zeros(3)),
    "zeros as generator": lambda _, tensors: tensors.update(generator=torch.zeros_like(tensors["generator"])),
    "one more tensor": lambda _, tensors: tensors.update(more=torch.zeros(3)),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused(directory, name):
    (file,) = directory.glob("state*")
    forge(file, FORGED[name])
    with refused(MismatchError, file):
        METHOD.fit(task_of(), data_of(), resume=directory)


def test_part_of_a_vector_beyond_those_that_count_is_written_over(run, tmp_path):
    directory = tmp_path / "krylov"
    events = run(fit, "bf16", directory=tmp_path / "whole")["events"]
    assert run(fit, "bf16", directory=directory, die=events - 40) is None
    (file,) = directory.glob("vectors-*")
    with file.open("ab") as stream:
        stream.write(b"torn" * 100)
    assert run(fit, "bf16", directory=directory)["digest"] == run(fit, "bf16")["digest"]
    assert vectors(directory) == vectors(tmp_path / "whole")


def test_what_was_chosen_when_it_began_holds(directory, tmp_path):
    with opened(tmp_path / "new", {"a": 1}) as saved:
        assert saved.chosen("compile", "auto") == "auto"
        saved.begin(compile=True)
        saved.begin(compile=False)
    with opened(tmp_path / "new", {"a": 1}) as saved:
        assert saved.chosen("compile", "auto") is True
        assert not saved.is_finished()
    assert json.loads((directory / "manifest.json").read_text())["chosen"] == {"compile": False}


if __name__ == "__main__":
    serve()
