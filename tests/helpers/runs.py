"""A small trained classifier and a run of it, shared by the tests of runs."""

import torch
from torch import nn
from torch.utils.data import Dataset

import eigentrace as et

CLASSES, WIDTH = 3, 5


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    for parameter in net.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
    return net


class Points(Dataset):
    """A dataset of any length whose examples are computed from their row."""

    def __init__(self, size=60):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        generator = torch.Generator().manual_seed(row)
        x = torch.randn(WIDTH, generator=generator)
        wrong = row % 7 == 0
        return x, (int(x[:CLASSES].argmax()) + wrong) % CLASSES


def task(seed=0):
    return et.classification(model(seed))


def data(size=60, batch_size=8, **options):
    return et.Data(Points(size), batch_size=batch_size, **options)


def fit(size=60, method=None, seed=0):
    return (method or et.Arnoldi(steps=20, keep=6)).fit(task(seed), data(size))
