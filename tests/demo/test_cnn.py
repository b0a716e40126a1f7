import pytest
import torch
from torch import nn

from eigentrace.demo.cnn import accuracy, make_cnn, train
from eigentrace.errors import InputError
from tests.helpers.expecting import refused


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def blobs():
    """Two kinds of image a line can tell apart."""
    labels = torch.arange(60) % 2
    images = torch.randn(60, 1, 28, 28, generator=generator()) * 0.1 + labels[:, None, None, None]
    return images, labels


def test_parameters_and_outputs():
    model = make_cnn(0)
    assert sum(p.numel() for p in model.parameters()) == 824_458
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again, other = (make_cnn(seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_training_learns_and_repeats_itself(blobs):
    images, labels = blobs
    losses, results = [], []
    for _ in range(2):
        model = make_cnn(0)
        last = train(
            model,
            images,
            labels,
            epochs=3,
            batch_size=20,
            generator=generator(),
            on_epoch=lambda epoch, loss: losses.append((epoch, loss)),
        )
        results.append(last[-1]["0.weight"])
    assert accuracy(model, images, labels) == 100.0
    assert [epoch for epoch, _ in losses] == [1, 2, 3, 1, 2, 3]
    assert losses[:3] == losses[3:]
    assert losses[2][1] < losses[0][1]
    assert torch.equal(*results)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_checkpoints_are_copies_after_the_listed_epochs_and_the_last(blobs):
    model = make_cnn(0)
    checkpoints = train(model, *blobs, epochs=3, generator=generator(), checkpoint_epochs=(1, 2))
    weights = [checkpoint["0.weight"] for checkpoint in checkpoints]
    assert len(weights) == 3
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], model[0].weight)
    with torch.no_grad():
        model[0].weight.zero_()
    assert weights[2].any()
    assert not any(value.requires_grad for value in checkpoints[0].values())


def test_the_last_epoch_is_not_listed_twice(blobs):
    assert len(train(make_cnn(0), *blobs, epochs=2, generator=generator(), checkpoint_epochs=(2,))) == 1


@pytest.mark.parametrize(("epochs", "wanted"), [(2, (3,)), (2, (0,)), (0, ())])
def test_refuses_checkpoints_that_never_come(blobs, epochs, wanted):
    with refused(InputError, epochs, *wanted):
        train(make_cnn(0), *blobs, epochs=epochs, generator=generator(), checkpoint_epochs=wanted)


def test_accuracy_is_a_percentage_over_all_batches():
    model = nn.Flatten()  # the image is its own logits
    images = torch.eye(4).repeat(600, 1)[:, None, None, :]
    labels = torch.arange(4).repeat(600)
    labels[::4] = 3
    assert accuracy(model, images, labels) == pytest.approx(75.0)
