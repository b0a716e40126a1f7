import torch

from eigentrace.demo.experiment import _spread, train_on_wrong_labels


def test_checkpoints_are_spread_over_training():
    assert _spread(10) == {3, 7, 10}
    assert _spread(1) == {1}
    assert _spread(2) == {1, 2}


def test_a_fifth_of_the_labels_is_wrong_and_known():
    messages = []
    trained = train_on_wrong_labels(seed=0, epochs=1, size=150, on_message=messages.append)
    assert len(trained.labels) == len(trained.images) == 150
    assert torch.equal(trained.is_wrong, trained.labels != trained.true_labels)
    assert int(trained.is_wrong.sum()) == 30
    assert len(trained.checkpoints) == 1
    assert messages[1].startswith("Training: epoch 1 of 1, loss ")


def test_the_same_seed_gives_the_same_network():
    first, second = (train_on_wrong_labels(0, 1, 100, lambda message: None) for _ in range(2))
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.model[0].weight, second.model[0].weight)
    assert first.accuracy == second.accuracy
