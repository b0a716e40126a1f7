"""The mean loss over checkpoints: an average of losses at states, nothing more."""

import copy

import pytest
import torch

import eigentrace as et
from eigentrace.errors import InputError, MismatchError, UnsupportedError
from tests.helpers.expecting import refused
from tests.helpers.small import cross_entropy, examples, net


@pytest.fixture
def states():
    return [copy.deepcopy(net(seed).state_dict()) for seed in (1, 2, 3)]


def losses_at(state, batch):
    model = net()
    model.load_state_dict(state)
    with torch.no_grad():
        return cross_entropy(model, batch)


def test_it_is_the_mean_of_the_losses_at_the_checkpoints(states):
    fitted = et.MeanLoss(states).fit(et.classification(net()), examples())
    expected = torch.stack([losses_at(state, examples()) for state in states]).mean(dim=0)
    assert torch.allclose(fitted.self_influence(examples()), expected, rtol=1e-6)


def test_one_checkpoint_is_the_loss_there(states):
    model = net()
    model.load_state_dict(states[0])
    plain = et.Loss().fit(et.classification(model), examples()).self_influence(examples())
    mean = et.MeanLoss(states[0]).fit(et.classification(net()), examples()).self_influence(examples())
    assert torch.allclose(mean, plain, rtol=1e-6)


def test_the_order_and_the_model_itself_do_not_matter(states):
    first = et.MeanLoss(states).fit(et.classification(net(7)), examples()).self_influence(examples())
    second = et.MeanLoss(states[::-1]).fit(et.classification(net(8)), examples()).self_influence(examples())
    assert torch.allclose(first, second, rtol=1e-6)


def test_files_are_read(states, tmp_path):
    for number, state in enumerate(states):
        torch.save(state, tmp_path / f"step_{number}.pt")
    task = et.classification(net())
    from_files = et.MeanLoss(tmp_path).fit(task, examples()).self_influence(examples())
    assert torch.equal(from_files, et.MeanLoss(states).fit(task, examples()).self_influence(examples()))


def test_what_it_refuses(states):
    task = et.classification(net())
    fitted = et.MeanLoss(states).fit(task, examples())
    with refused(UnsupportedError, "MeanLoss", "pairs"):
        fitted.influence(examples(), examples())
    with refused(UnsupportedError, "MeanLoss", "normalize='gradient'"):
        fitted.self_influence(examples(), normalize="gradient")
    with refused(UnsupportedError, "MeanLoss", "unit='nats'"):
        fitted.self_influence(examples(), unit="nats")
    with refused(InputError, "checkpoints"):
        et.MeanLoss([]).fit(task, examples())
    with refused(MismatchError, "'0.bias'", 3, 4):
        et.MeanLoss({"0.weight": torch.zeros(4, 3)}).fit(task, examples())
