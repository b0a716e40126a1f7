"""Every reader of damaged runs and fits gives the right numbers or raises EigentraceError."""

import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch

import eigentrace as et
from eigentrace.krylov import resume as iteration
from eigentrace.krylov.vectors import Basis
from eigentrace.page.journal import Journal
from tests.helpers.mutating import FORGED, mutate, outcomes
from tests.helpers.runs import data, fit, task

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZE = 40
IDS = [f"n{row}" for row in range(SIZE)]
METHOD = et.Arnoldi(steps=10, keep=4)


def examples():
    return data(SIZE, ids=IDS)


def numbers(values):
    return np.ascontiguousarray(values).tobytes()


def journal(path):
    run = et.open_run(path)
    held = Journal(path, run.num_rows, run.manifest["data"]["fingerprint"])
    try:
        return held.counts(), [(line["decision"], line["rows"]) for line in held.log()]
    finally:
        held.close()


RUN_READERS = {
    "loss": lambda path: numbers(et.open_run(path).column("loss")),
    "self_influence": lambda path: numbers(et.open_run(path).column("self_influence")),
    "source": lambda path: et.open_run(path).column("source").tolist(),
    "ids": lambda path: list(et.open_run(path).ids),
    "groups": lambda path: str(et.open_run(path).groups("source")),
    "explain": lambda path: et.open_run(path).explain([3, 7], k=4).table().to_pylist(),
    "table": lambda path: str(et.open_run(path).table().to_pylist()),
    "clean": lambda path: et.clean(et.open_run(path), drop="10%").mask.tobytes(),
    "features": lambda path: numbers(et.open_run(path).features_of(np.arange(SIZE)).numpy()),
    "load": lambda path: numbers(et.load(path / "fit", task()).self_influence(data(SIZE)).numpy()),
}
# Their result says what is damaged, or decisions up to a damaged line: they only must not fail in another way.
LOOSE_READERS = {
    "info": lambda path: repr(et.open_run(path)),
    "check": et.check,
    "journal": journal,
}


def make_run(folder):
    columns = {"source": ["a", "b"] * (SIZE // 2)}
    run = et.score(METHOD.fit(task(), data(SIZE)), examples(), folder / "x", shard_rows=16, columns=columns)
    held = Journal(run.path, SIZE, run.manifest["data"]["fingerprint"])
    held.decide(np.array([1, 2, 3]), "drop")
    held.decide(np.array([5]), "relabel", 2)
    held.close()
    return RUN_READERS, LOOSE_READERS


def score_of(method, make_task=task):
    return {"load": lambda path: et.load(path, make_task()).self_influence(data(SIZE)).numpy()}


def make_fit(folder):
    method = et.Arnoldi(steps=10, keep=4, tail="shaped", coordinates=6)
    method.fit(task(), data(SIZE)).save(folder / "x")
    return score_of(method), {}


def make_blocks(folder):
    et.RandProj(keep=3).fit(task(), data(SIZE)).save(folder / "x")
    return score_of(et.RandProj), {}


def make_ensemble(folder):
    et.Ensemble([fit(SIZE, METHOD), fit(SIZE, METHOD, seed=1)]).save(folder / "x")
    return score_of(METHOD, lambda: [task(), task(1)]), {}


def make_unfinished(folder):
    METHOD.fit(task(), data(SIZE), resume=folder / "x")
    for result in (folder / "x").glob("result-*"):
        result.unlink()
    return {"fit": lambda path: METHOD.fit(task(), data(SIZE), resume=path).self_influence(data(SIZE)).numpy()}, {}


class Stop(BaseException):
    """Ends a fit as a signal does."""


RESTARTING = et.Arnoldi(steps=14, keep=3, basis=Basis(max_vectors=6), tail=None)


def make_halfway(folder):
    """A fit that was ended after its second restart, with three products to go."""
    keep = iteration.SavedIteration.keep

    def keep_until(memory, store, snapshot):
        keep(memory, store, snapshot)
        if snapshot.num_products >= 11 and snapshot.restarts > 1:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration, "SECONDS_BETWEEN_SAVES", 0)
        patch.setattr(iteration.SavedIteration, "keep", keep_until)
        with pytest.raises(Stop):
            RESTARTING.fit(task(), data(SIZE), resume=folder / "x")
    assert iteration.progress_of(folder / "x") == (11, 14)

    def resumed(path):
        return RESTARTING.fit(task(), data(SIZE), resume=path).self_influence(data(SIZE)).numpy()

    return {"fit": resumed}, {"progress": iteration.progress_of}


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock" and path.stat().st_size)


def is_right(found, expected):
    if isinstance(expected, np.ndarray):
        return np.allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    return found == expected


MAKERS = {make_run: 300, make_fit: 300, make_blocks: 300, make_ensemble: 300, make_unfinished: 300, make_halfway: 150}


@pytest.mark.parametrize("make", MAKERS)
def test_damage_is_refused_or_changes_nothing(make, tmp_path):
    torch.set_num_threads(1)
    good, bad = tmp_path / "good", tmp_path / "bad"
    exact, loose = make(good)
    shutil.copytree(good, bad)  # reading may go on with what is there
    expected = {name: reader(bad / "x") for name, reader in exact.items()}
    names = [path.relative_to(good) for path in files_of(good)]

    def attempt(rng):
        name, wrong = rng.choice(names), []
        state = rng.getstate()
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        how = mutate(bad / name, rng)
        for reader, read in (exact | loose).items():
            rng.setstate(state)
            try:
                found = read(bad / "x")
            except et.errors.EigentraceError:
                continue
            except Exception as error:
                wrong.append(f"{reader}: {type(error).__name__}: {error}"[:150])
                continue
            # Nothing can tell a value with a checksum that fits from the one that was written.
            if reader in exact and not how.startswith(FORGED) and not is_right(found, expected[reader]):
                wrong.append(f"{reader} differs")
        return f"{name}, {how}: {wrong}" if wrong else None

    assert outcomes(MAKERS[make], attempt) == {}


def test_errors_and_crashes_are_noticed():
    def attempt(rng):
        number = rng.randrange(5)
        if not number:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1:
            raise KeyError(number)
        if number == 2:
            raise et.errors.InputError("refused")

    wrong = outcomes(30, attempt)
    drawn = {seed: random.Random(seed).randrange(5) for seed in range(30)}
    assert wrong.keys() == {seed for seed, number in drawn.items() if number < 2}
    assert all(("KeyError" if drawn[seed] else "status 9") in what for seed, what in wrong.items())
