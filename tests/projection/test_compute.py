"""Settings of a computation: wrong ones are refused by name, right ones mean what they say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.projection import Job, project
from eigentrace.projection.engine import Compute
from tests.helpers.expecting import refused

CPU = torch.device("cpu")


EXPECTED = {  # what a setting may be, as the error lists it
    "engine": ("'auto'", "'layerwise'", "'forward'", "'reverse'"),
    "precision": ("'fp32'", "'bf16'"),
    "batch": (1,),
    "compile": (True, False),
    "memory": (0, 1),
}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("engine", "fast"),
        ("engine", None),
        ("precision", "fp16"),
        ("precision", torch.bfloat16),
        ("batch", 0),
        ("batch", -3),
        ("batch", 2.5),
        ("batch", True),
        ("batch", "many"),
        ("batch", None),
        ("compile", 1),
        ("compile", "yes"),
        ("memory", 0),
        ("memory", -1),
        ("memory", 1.0),
        ("memory", 0.0),
        ("memory", 2.5),
        ("memory", True),
        ("memory", "1 gig"),
        ("memory", float("nan")),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(setting, value):
    with refused(InputError, setting, *EXPECTED[setting], repr(value)):
        Compute(**{setting: value})


def test_settings_are_given_by_name():
    with pytest.raises(TypeError):
        Compute("layerwise")


@pytest.mark.parametrize("memory", [1, 10**12, np.int64(7)])
def test_bytes_are_taken_as_given(memory):
    assert Compute(memory=memory).budget(CPU) == memory


@pytest.mark.parametrize("share", [0.5, np.float32(0.25), 1e-6])
def test_a_share_is_of_what_is_free(share, monkeypatch):
    monkeypatch.setattr(Compute, "free", staticmethod(lambda device: 1_000_000))
    assert Compute(memory=share).budget(CPU) == int(float(share) * 1_000_000)


@pytest.mark.parametrize(("text", "expected"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("512kB", 512_000)])
def test_bytes_can_be_text(text, expected):
    assert Compute(memory=text).budget(CPU) == expected


def test_the_default_is_small_enough_for_a_laptop():
    assert 2**20 <= Compute().budget(CPU) <= 2**30
    assert Compute.free(CPU) > 0


@pytest.mark.parametrize("batch", [1, 3, np.int64(3), 100, "data", "auto"], ids=str)
def test_examples_per_pass_are_as_asked_for(batch):
    sizes = []

    def loss(model, values):
        sizes.append(len(values[0]))
        return model(values[0]).square().sum(dim=1)

    task = et.Task(nn.Linear(3, 2), loss)
    data = et.Data(TensorDataset(torch.randn(10, 3), torch.zeros(10)), batch_size=5)
    with task.session():
        found = list(project(Job.of(task, "losses", norms=True, compute=Compute(batch=batch)), data))
    given = 5 if isinstance(batch, str) else min(int(batch), 10)
    assert max(len(b) for b, _ in found) == given
    assert sum(len(p.losses) for _, p in found) == 10
    assert max(sizes) <= max(given, 6)  # planning looks at a few examples twice


def test_a_batch_that_came_whole_is_cut_as_asked_for():
    sizes = []

    def loss(model, values):
        sizes.append(len(values[0]))
        return model(values[0]).square().sum(dim=1)

    task = et.Task(nn.Linear(3, 2), loss)
    with task.session():
        ((_, found),) = project(
            Job.of(task, "losses", norms=True, compute=Compute(batch=8)), et.data.as_data((torch.randn(20, 3),))
        )
    assert len(found.losses) == 20
    assert [n for n in sizes if n > 6] == [8, 8, 20]  # the last is the check of the losses against the whole batch


def test_forward_mode_says_what_it_cannot_count():
    torch.manual_seed(0)
    task = et.classification(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    data, forward = (torch.randn(20, 3).double(), torch.randint(0, 3, (20,))), Compute(engine="forward")
    fitted = et.Arnoldi(steps=8, keep=3).fit(task, data)
    for ask in (
        lambda: fitted.self_influence(data, compute=forward),
        lambda: fitted.influence(data, data, normalize="metric", compute=forward),
    ):
        with refused(UnsupportedError, "tail", "Compute(engine='auto')", "fitted.stored(data)"):
            ask()
    for ask in (
        lambda: fitted.distill(tail=None).self_influence(data, normalize="gradient", compute=forward),
        lambda: fitted.influence(data, data, normalize="gradient", compute=forward),
        lambda: et.TracIn().fit(task, data).self_influence(data, compute=forward),
    ):
        with refused(UnsupportedError, "normalize='gradient'", "Compute(engine='auto')"):
            ask()
    for cut in (fitted.distill(tail=None), fitted.stored(data)):
        torch.testing.assert_close(cut.self_influence(data, compute=forward), cut.self_influence(data))
    torch.testing.assert_close(fitted.influence(data, data, compute=forward), fitted.influence(data, data))
