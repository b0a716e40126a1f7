"""What `repr` says of everything that a user gets: short, what it is, and no tensors or addresses."""

import re
from dataclasses import fields, is_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace import evaluate, rendering
from eigentrace.loading import Inputs
from eigentrace.projection.engine import Compute

LONGEST = 240
ROWS = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A task, data, fits and a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    task = et.classification(model, l2=0.01)
    data = et.Data([(torch.randn(4), row % 3) for row in range(ROWS)], ids=[f"r{row}" for row in range(ROWS)])
    fitted = et.Arnoldi(steps=12, keep=3, sample=20).fit(task, data)
    run = et.score(fitted, data, tmp_path_factory.mktemp("reprs") / "run")
    states = [{name: value + shift for name, value in model.state_dict().items()} for shift in (0.0, 0.5, 1.0, 1.5)]
    return SimpleNamespace(model=model, task=task, data=data, fitted=fitted, run=run, states=states)


def retrained():
    masks = evaluate.Subsets.random(ROWS, 4).masks
    return evaluate.Retrained(masks, np.zeros((4, 2, 5)))


def tracked(made):
    tracker = et.LossTracker(made.task, made.data)
    tracker.record(), tracker.record()
    return tracker


def recorded(made):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.001)
    record = et.TrainingRecord(optimizer)
    optimizer.step(), optimizer.step()
    return record


def many(made):
    pair = (torch.randn(ROWS, 4), torch.arange(ROWS) % 3)
    return evaluate.ManyModels(made.model, pair, pair, evaluate.SGD(epochs=1), at_once=2)


NOISY = [True, False] * (ROWS // 2)
SCORES = np.linspace(0, 1, ROWS)

# What makes an object, by what its `repr` must mention.
MADE = {
    ("Task", "Sequential", 51, "l2=0.01"): lambda m: m.task,
    ("Coverage", 51): lambda m: m.task.coverage,
    ("Layout", 51): lambda m: m.task.layout,
    ("Data", ROWS, "ids"): lambda m: m.data,
    ("Data", "stream"): lambda m: et.Data.stream(Uncounted()),
    ("Batch", ROWS): lambda m: m.data.first(ROWS),
    ("Fit", "Arnoldi", 3, 51, "δ", 20, ROWS): lambda m: m.fitted,
    ("Fit", "no tail", 2): lambda m: m.fitted.distill(keep=2, tail=None),
    ("Fit", "shaped", 4): lambda m: et.Arnoldi(12, 3, tail="shaped", coordinates=4).fit(m.task, m.data),
    ("Fit", "Lissa", 51): lambda m: et.Lissa(depth=5).fit(m.task, m.data),
    ("Fit", "EKFAC", 51, "δ", ROWS): lambda m: et.EKFAC().fit(m.task, m.data),
    ("Fit", "Arnoldi", 3, 51, "EK-FAC", ROWS): lambda m: et.Arnoldi(12, 3, tail="ekfac").fit(
        et.classification(m.model, training=et.Training(30.0)), m.data
    ),
    ("KroneckerMetric", 51): lambda m: et.EKFAC().fit(m.task, m.data).metric,
    ("EKFAC", "damping=0.1"): lambda m: et.EKFAC(damping=0.1),
    ("Fit", "TracIn", 4): lambda m: et.TracIn(m.states).fit(m.task, m.data),
    ("Fit", "RandSelect", 5): lambda m: et.RandSelect(keep=5).fit(m.task, m.data),
    ("Fit", "Loss", ROWS): lambda m: et.Loss().fit(m.task, m.data),
    ("Fit", "Support", ROWS): lambda m: et.Support().fit(m.task, m.data),
    ("Fit", "TangentRidge", ROWS): lambda m: et.TangentRidge(keep=4).fit(m.task, m.data),
    ("Ensemble", 2, "Arnoldi"): lambda m: et.Ensemble([m.fitted, m.fitted]),
    ("Spectrum", 3, 12): lambda m: m.fitted.spectrum,
    ("Eigenpairs", 3, 51): lambda m: m.fitted.eigenpairs,
    ("Block", 3): lambda m: m.fitted.blocks[0],
    ("Coordinates", 4): lambda m: m.fitted.with_coordinates(m.data, 4).coordinates,
    ("Reliability",): lambda m: et.rank_agreement(et.Arnoldi(8, 2), m.task, m.data, examples=8, queries=2),
    ("Ranked", 3, ROWS): lambda m: m.fitted.stored(m.data, 4).influence_topk(m.data, m.data, 3),
    ("Arnoldi", "steps=400", "keep=9"): lambda m: et.Arnoldi(
        400, 9, "hessian", 0.5, positive_only=True, sample=None, basis=et.Basis(dtype="bf16"), compile=False
    ),
    ("Basis", "bf16"): lambda m: et.Basis(dtype="bf16"),
    ("Refine", "rounds=5"): lambda m: et.Refine(5),
    ("Training", "lr_sum=2.5"): lambda m: et.Training(2.5, second_moments={"0.weight": torch.ones(9)}),
    ("TrainingRecord", "SGD", "0 steps"): lambda m: et.TrainingRecord(torch.optim.SGD(m.model.parameters())),
    ("TrainingRecord", "AdamW", "2 steps", "lr_sum=0.002"): recorded,
    ("Refined", ROWS, "residual"): lambda m: (
        et.EKFAC().fit(m.task, m.data).refined(m.data, m.data, et.Refine(20, damping=0.1))
    ),
    ("Compute", "forward"): lambda m: Compute(engine="forward"),
    ("TracIn", 4): lambda m: et.TracIn(m.states),
    ("MeanLoss", 4): lambda m: et.MeanLoss(m.states),
    ("AugmentedLoss", "retrained"): lambda m: et.AugmentedLoss(retrained, draws=3),
    ("FlipsAndShifts",): lambda m: et.FlipsAndShifts(),
    ("InverseArnoldi", "Lissa", "depth=7"): lambda m: et.InverseArnoldi(solver=et.Lissa(depth=7)),
    ("LossTracker", 2, ROWS): tracked,
    ("LossHistory", 2, ROWS): lambda m: tracked(m).history,
    ("Run", "Arnoldi", ROWS, 3): lambda m: m.run,
    ("Explanation", 2, 4, "exact"): lambda m: m.run.explain([1, 2], 4),
    ("Side", 2, 4): lambda m: m.run.explain([1, 2], 4).proponents,
    ("Ranking", ROWS): lambda m: m.run.self_influence(),
    ("Top", 7): lambda m: m.run.self_influence().top(7),
    ("Decisions", ROWS, 5, "self_influence"): lambda m: et.clean(m.run, drop=5),
    ("Health", ROWS): lambda m: et.check(m.run.path),
    ("Inputs", "Task", "Data"): lambda m: Inputs(m.task, m.data),
    ("Subsets", 4, ROWS): lambda m: evaluate.Subsets.random(ROWS, 4),
    ("Retrained", 4, 2, 5): lambda m: retrained(),
    ("LDS", 0.4): lambda m: evaluate.LDS(0.4, (0.3, 0.5), np.zeros(9), "both", 0.95),
    ("Memorization", 5): lambda m: evaluate.Memorization(*np.ones((6, 5))),
    ("LeftOut", 5, 2): lambda m: evaluate.LeftOut(np.zeros((5, 2)), np.zeros((5, 2)), np.zeros((5, 2))),
    ("Counterfactual", 5, 3, 2): lambda m: evaluate.Counterfactual(
        np.zeros((5, 3), int), np.zeros(5), np.zeros(5), np.zeros(5), np.zeros((5, 2)), np.zeros((5, 2))
    ),
    ("RetrainingCurves", "mine", "random", 9): lambda m: evaluate.RetrainingCurves(
        np.linspace(0, 1, 9), {"mine": np.zeros((9, 2)), "random": np.zeros((9, 2))}, "top"
    ),
    ("Retrieval",): lambda m: evaluate.retrieval(SCORES, NOISY),
    ("Detection",): lambda m: evaluate.detection(SCORES, NOISY),
    ("Comparison", 2, "mine"): lambda m: evaluate.compare({"mine": SCORES, "yours": -SCORES}, NOISY),
    ("Loop", "retrained"): lambda m: evaluate.Loop(retrained),
    ("ManyModels", ROWS, 2): many,
    ("SGD", "epochs=3"): lambda m: evaluate.SGD(epochs=3),
    ("Texts", 2): lambda m: rendering.Texts(["long " * 500, "b"]),
    ("Shown", "text"): lambda m: rendering.Texts(["long " * 500, "b"])([0])[0],
    ("Shown", "image"): lambda m: rendering.Tensors(torch.rand(2, 1, 8, 8))([0])[0],
    ("Tensors", 2): lambda m: rendering.Tensors(torch.rand(2, 1, 8, 8)),
}
# Classes without instances of their own.
ABSTRACT = {"Fitted", "Trainer"}


def _is_plain(one):
    """Whether it is a method whose settings are numbers and words with defaults."""
    if not (isinstance(one, type) and is_dataclass(one) and hasattr(one, "fit")):
        return False
    return all(isinstance(field.default, str | int | float | None) for field in fields(one))


PLAIN = {name for name in et.__all__ if _is_plain(getattr(et, name))}


class Uncounted(torch.utils.data.IterableDataset):
    def __iter__(self):
        raise AssertionError("repr reads no examples")


@pytest.mark.parametrize("mentions", MADE, ids=lambda mentions: " ".join(map(str, mentions)))
def test_repr_is_short_and_says_what_it_is(made, mentions):
    words = repr(MADE[mentions](made))
    assert len(words) <= LONGEST
    assert words.count("\n") <= 1
    assert not re.search(r"tensor\(|array\(| at 0x|object at", words)
    for mention in mentions:
        assert str(mention) in words


def test_every_public_class_is_tried():
    public = {name for home in (et, evaluate) for name in home.__all__ if isinstance(getattr(home, name), type)}
    assert public - ABSTRACT - PLAIN <= {mentions[0] for mentions in MADE}


def test_repr_of_a_method_is_the_call_that_makes_it():
    for name in sorted(PLAIN):
        method = getattr(et, name)()
        assert eval(repr(method), vars(et)) == method
        assert len(repr(method)) <= LONGEST
    assert repr(et.Lissa(depth=7, damping=0.5)) == "Lissa(depth=7, damping=0.5)"
    assert repr(et.Arnoldi(tail=None, sample=None)) == "Arnoldi(tail=None, sample=None)"
