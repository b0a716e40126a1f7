"""A seed that people use for their own draws must not pick the same examples here."""

import numpy as np
import pytest
import torch

import eigentrace as et
from eigentrace.demo.digits import relabel
from eigentrace.numeric.seeding import generator_of


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_it_follows_from_the_seed_and_is_not_torchs(seed):
    ours, again = (torch.rand(8, generator=generator_of(seed)) for _ in range(2))
    assert torch.equal(ours, again)
    assert not torch.equal(ours, torch.rand(8, generator=torch.Generator().manual_seed(seed)))
    assert not torch.equal(ours, torch.rand(8, generator=generator_of(seed + 1)))


def test_a_fit_does_not_sample_just_the_examples_that_were_relabeled_with_its_seed(monkeypatch):
    labels = torch.arange(1000) % 10
    is_wrong = relabel(labels, 0.2, 10, torch.Generator().manual_seed(0)).is_wrong.numpy()
    drawn = []
    sample = et.Data.sample
    monkeypatch.setattr(et.Data, "sample", lambda self, *args: drawn.append(sample(self, *args)) or drawn[-1])
    data = et.Data(torch.utils.data.TensorDataset(torch.randn(1000, 3), labels))
    et.Arnoldi(steps=30, keep=1, sample=100, seed=0).fit(et.classification(torch.nn.Linear(3, 10)), data)
    sample, *again = (rows for rows in drawn if len(rows) == 100)
    assert 0.05 < is_wrong[sample].mean() < 0.4
    np.testing.assert_array_equal(again[0], sample)  # the calibration is of the same examples
