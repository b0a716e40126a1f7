"""A small classifier with its data, and tables of cases, shared by the tests of bad input and of files."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eigentrace as et

CHEAP = et.RandProj(keep=2)  # a method whose fit does little besides the checks


def table(cases):
    """Convert {name: (*values)} to a parametrisation with the names as ids."""
    return [pytest.param(*case, id=name) for name, case in cases.items()]


def net(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return model


def examples(size=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def fit(task=None, data=None, method=CHEAP, **options):
    return method.fit(task or et.classification(net()), examples() if data is None else data, **options)
