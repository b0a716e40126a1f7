"""Scores stand beside the loss and the gradient norm whenever there is a model to take them from."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.evaluate import baselines, compare, detection, retrieval
from tests.helpers.expecting import refused
from tests.helpers.small import examples, net

DATA = examples(20)
IS_NOISY = np.arange(20) % 4 == 0


def test_baselines_are_the_loss_and_the_gradient_norm():
    model = net().double()
    x, y = DATA[0].double(), DATA[1]
    found = baselines(et.classification(model), (x, y))
    assert list(found) == ["loss", "gradient norm"]
    for i in range(20):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert found["loss"][i] == pytest.approx(loss.item(), rel=1e-10)
        norm = torch.cat([g.flatten() for g in gradients]).norm().item()
        assert found["gradient norm"][i] == pytest.approx(norm, rel=1e-10)


def test_compares_all_by_name_with_the_baselines_last():
    task, mine = et.classification(net()), torch.arange(20.0)
    found = compare({"mine": mine, "other": list(range(20, 0, -1))}, IS_NOISY, task=task, data=DATA)
    assert list(found.retrieval) == list(found.detection) == ["mine", "other", "loss", "gradient norm"]
    assert found.retrieval["mine"] == retrieval(mine, IS_NOISY)
    assert found.detection["mine"].area == detection(mine, IS_NOISY).area
    assert found.retrieval["loss"] == retrieval(baselines(task, DATA)["loss"], IS_NOISY)
    lines = str(found).splitlines()
    assert len(lines) == 5
    assert f"{found.retrieval['mine'].auc:.1%}" in lines[1]


def test_without_a_model_there_are_no_baselines():
    assert list(compare({"mine": np.arange(20)}, IS_NOISY).retrieval) == ["mine"]
    assert list(compare({}, IS_NOISY, task=et.classification(net()), data=DATA).retrieval) == ["loss", "gradient norm"]


def test_refuses():
    task = et.classification(net())
    with refused(InputError, "task", "data"):
        compare({"mine": np.arange(20)}, IS_NOISY, task=task)
    with refused(InputError, "'loss'"):
        compare({"loss": np.arange(20)}, IS_NOISY, task=task, data=DATA)
    with refused(InputError, "scores"):
        compare({}, IS_NOISY)
    with refused(InputError, "(3,)", "(20,)"):
        compare({"mine": np.arange(3)}, IS_NOISY)
