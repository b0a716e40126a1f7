"""Ground truth is trained once: what a cache holds is never trained again, and never mistaken for another's."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import eigentrace.evaluate.output_cache as store_module
from eigentrace.errors import InputError, MismatchError, NumericalError
from eigentrace.evaluate import Loop, Retrained, Subsets, retrain
from eigentrace.evaluate.subsets import model_seed
from tests.helpers.expecting import refused

N = 10
SUBSETS = Subsets.random(N, 4)


class Counting:
    """A training function that says which rows and seed it was given, and remembers the calls."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def __call__(self, rows, seed):
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append((tuple(rows.tolist()), seed))
        return np.array([rows.sum(), seed % 1000], dtype=float)

    def loop(self, **recipe):
        return Loop(self, recipe={"lr": 0.1, "data": torch.arange(3)} | recipe)


def parts(path):
    return sorted(path.glob("part-*"))


def test_outputs_belong_to_their_subset_seed_and_query():
    found = retrain(Counting(), SUBSETS, seeds=3, seed=5)
    assert found.outputs.shape == (4, 3, 2)
    for i, mask in enumerate(SUBSETS.masks):
        assert (found.outputs[i, :, 0] == np.flatnonzero(mask).sum()).all()
        assert found.outputs[i, :, 1].tolist() == [model_seed(5, j, i) % 1000 for j in range(3)]
    np.testing.assert_array_equal(found.mean, found.outputs.mean(axis=1))
    shared = retrain(Counting(), SUBSETS, seeds=3, seed=5, shared_seeds=True)
    assert (shared.outputs[:, :, 1] == [model_seed(5, j) % 1000 for j in range(3)]).all()


def test_a_second_time_costs_nothing(tmp_path):
    first = retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path / "cache")
    again = Counting()
    second = retrain(again.loop(), SUBSETS, seeds=2, cache=tmp_path / "cache")
    assert again.calls == []
    np.testing.assert_array_equal(second.outputs, first.outputs)
    assert second.recipe == first.recipe
    assert first.recipe["recipe"]["lr"] == 0.1


def test_more_subsets_and_seeds_train_only_what_is_new(tmp_path):
    retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path)
    more = Counting()
    found = retrain(more.loop(), Subsets.random(N, 6), seeds=3, cache=tmp_path)
    assert len(more.calls) == 6 * 3 - 4 * 2
    np.testing.assert_array_equal(found.outputs, retrain(Counting(), Subsets.random(N, 6), seeds=3).outputs)


def test_other_subsets_and_seeds_are_other_models(tmp_path):
    retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path)
    for options in (dict(seed=1), dict(shared_seeds=True)):
        other = Counting()
        retrain(other.loop(), SUBSETS, seeds=2, cache=tmp_path, **options)
        assert len(other.calls) == 2 * 4


def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    killed = Counting(fail_at=5)
    with pytest.raises(KeyboardInterrupt):
        retrain(killed.loop(), SUBSETS, seeds=2, cache=tmp_path)
    assert len(parts(tmp_path)) == 5
    rest = Counting()
    found = retrain(rest.loop(), SUBSETS, seeds=2, cache=tmp_path)
    assert len(rest.calls) == 3
    assert not set(rest.calls) & set(killed.calls)
    np.testing.assert_array_equal(found.outputs, retrain(Counting(), SUBSETS, seeds=2).outputs)


def test_killed_while_writing(tmp_path, monkeypatch):
    """A file that was not finished does not count, and nothing of it stays."""
    save = store_module.write_tensors

    def cut_short(tensors, path):
        save(tensors, path)
        path.write_bytes(path.read_bytes()[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "write_tensors", cut_short)
    with pytest.raises(KeyboardInterrupt):
        retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json"]
    monkeypatch.undo()
    # A machine that went down leaves the partial file behind: it is not read.
    (tmp_path / ".part-000000-abc.safetensors.1234.partial").write_bytes(b"half")
    retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path)
    assert len(parts(tmp_path)) == 8


def test_models_trained_twice_are_trained_once():
    counting = Counting()
    twice = Subsets(np.vstack([SUBSETS.masks[:1]] * 3))
    found = retrain(counting, twice, seeds=2, shared_seeds=True)
    assert len(counting.calls) == 2
    assert (found.outputs == found.outputs[:1]).all()


@pytest.mark.parametrize(
    ("other", "mentions"),
    [
        (dict(lr=0.2), ("recipe.lr", 0.1, 0.2)),
        (dict(data=torch.arange(4)), ("recipe.data", "sha256:")),
        (dict(epochs=3), ("recipe.epochs", 3)),
    ],
)
def test_a_cache_of_another_training_is_refused(tmp_path, other, mentions):
    retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    counting = Counting()
    with refused(MismatchError, tmp_path, *mentions):
        retrain(counting.loop(**other), SUBSETS, seeds=1, cache=tmp_path)
    assert counting.calls == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_cache_of_other_data_sizes_or_kinds_is_refused(tmp_path):
    retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path / "cache")
    with refused(MismatchError, tmp_path / "cache", "num_train", 10, 12):
        retrain(Counting().loop(), Subsets.random(12, 4), seeds=1, cache=tmp_path / "cache")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with refused(MismatchError, tmp_path / "other"):
        retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path / "other")
    with refused(MismatchError, tmp_path / "other" / "notes.txt"):
        retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path / "other" / "notes.txt")


def test_damaged_parts_are_refused(tmp_path):
    retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path)
    part = parts(tmp_path)[0]
    part.write_bytes(part.read_bytes()[:30])
    with refused(MismatchError, part):
        retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path)
    save_file({"keys": torch.zeros(2, 32, dtype=torch.uint8)}, part)
    with refused(MismatchError, part):
        retrain(Counting().loop(), SUBSETS, seeds=1, cache=tmp_path)
    part.unlink()
    again = Counting()
    retrain(again.loop(), SUBSETS, seeds=1, cache=tmp_path)
    assert len(again.calls) == 1


def test_results_are_saved_and_read_back(tmp_path):
    found = retrain(Counting().loop(), SUBSETS, seeds=2, cache=tmp_path / "cache")
    found.save(tmp_path / "saved")
    back = Retrained.load(tmp_path / "saved")
    np.testing.assert_array_equal(back.masks, found.masks)
    np.testing.assert_array_equal(back.outputs, found.outputs)
    assert (back.recipe, back.higher_is_worse) == (found.recipe, True)
    with refused(InputError, tmp_path / "saved"):
        found.save(tmp_path / "saved")
    with refused(MismatchError, tmp_path / "cache"):
        Retrained.load(tmp_path / "cache")
    save_file({"masks": torch.zeros(1)}, tmp_path / "saved" / "retrained.safetensors")
    with refused(MismatchError, tmp_path / "saved", "['masks']", "outputs"):
        Retrained.load(tmp_path / "saved")


def test_the_manifest_says_what_was_trained(tmp_path):
    loop = Loop(Counting(), recipe={"model": nn.Linear, "sizes": (1, np.int64(2)), "none": None})
    retrain(loop, SUBSETS, seeds=1, cache=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    recipe = manifest["recipe"]
    assert recipe["recipe"] == {"model": "torch.nn.modules.linear.Linear", "sizes": [1, 2], "none": None}
    assert (manifest["format"], recipe["num_train"]) == (1, N)


def test_models_are_measured_by_the_loop():
    model = nn.Linear(2, 1)
    loop = Loop(lambda rows, seed: model, lambda model: model.weight[0], higher_is_worse=False)
    found = retrain(loop, SUBSETS, seeds=1)
    np.testing.assert_allclose(found.outputs[0, 0], model.weight[0].detach().numpy())
    assert not found.higher_is_worse


def test_functions_cannot_change_what_others_are_given():
    def spoil(rows, seed):
        total = rows.sum()
        rows[:] = 0
        return [float(total)]

    found = retrain(spoil, SUBSETS, seeds=2)
    assert (found.outputs[:, 0] == found.outputs[:, 1]).all()


@pytest.mark.parametrize(
    ("train", "mentions"),
    [
        (lambda rows, seed: nn.Linear(1, 1), ("Loop(train, measure=...)", "Linear")),
        (lambda rows, seed: 1.0, ("(Q,)", "()")),
        (lambda rows, seed: [], ("(Q,)", "(0,)")),
        (lambda rows, seed: "good", ("str",)),
        (lambda rows, seed: [0.0] * len(str(seed)) if 0 in rows else [0.0], ("queries", 1)),
        (5, ("trainer", 5)),
        (Loop, ("trainer", "Loop")),
    ],
)
def test_refuses_trainers(train, mentions):
    with refused(InputError, *mentions):
        retrain(train, SUBSETS, seeds=1)


def test_divergence_is_said_and_not_kept(tmp_path):
    def diverge(rows, seed):
        return [1.0, float("nan") if 0 in rows else 1.0]

    with refused(NumericalError, "5 examples", f"seed {model_seed(0, 0, 0)}"):
        retrain(Loop(diverge, recipe="r"), Subsets.without(6, [1, 0]), seeds=1, cache=tmp_path)
    assert parts(tmp_path) == []


def test_refuses_settings(tmp_path):
    with refused(InputError, "cache", "recipe"):
        retrain(Loop(Counting()), SUBSETS, cache=tmp_path / "cache")
    with refused(InputError, "recipe", "set"):
        retrain(Loop(Counting(), recipe={"a": {1}}), SUBSETS, cache=tmp_path / "cache")
    with refused(InputError, "seeds", 0):
        retrain(Counting(), SUBSETS, seeds=0)
    with refused(InputError, "train", "int"):
        Loop(5)
    with refused(InputError, "measure", "str"):
        Loop(Counting(), "loss")


def test_results_check_themselves():
    masks, outputs = SUBSETS.masks, np.zeros((4, 1, 2))
    with refused(InputError, "masks", "(4, 10)", "outputs", "(3, 1, 2)"):
        Retrained(masks, outputs[:3])
    with refused(InputError, "1 of 8", "outputs"):
        Retrained(masks, np.where(np.arange(8).reshape(4, 1, 2) == 3, np.inf, outputs))
