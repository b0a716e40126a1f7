"""Data without a stable order or form must be refused, mentioning what arrived and where."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import eigentrace as et
from eigentrace.errors import DataError, DeterminismError, TaskError
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table


class Augmented(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.randn(3), 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.randn(3), 0)])


class Unstable(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(np.random.permutation(12).tolist())


class Endless(Sampler):
    def __len__(self):
        return 12

    def __iter__(self):
        return itertools.repeat(0)


class Shrinking:
    """Batches that are one example shorter on every pass."""

    def __init__(self):
        self.size = 12

    def __len__(self):
        return 1

    def __getitem__(self, i):
        if i:
            raise IndexError
        self.size -= 1
        return examples(self.size)


def dataset():
    return TensorDataset(*examples())


DATA = {
    "empty dataset": (lambda: TensorDataset(torch.zeros(0, 3)), ("TensorDataset", "0 examples")),
    "empty list": (lambda: [], ("list", "[]")),
    "empty loader": (lambda: DataLoader(TensorDataset(torch.zeros(0, 3))), ("TensorDataset", "0 examples")),
    "empty batches": (lambda: [examples(0), examples(0)], ("list", "0 examples")),
    "shuffle": (lambda: DataLoader(dataset(), shuffle=True), ("DataLoader", "RandomSampler", "shuffle=False")),
    "RandomSampler": (lambda: DataLoader(dataset(), sampler=RandomSampler(dataset())), ("RandomSampler",)),
    "SubsetRandomSampler": (
        lambda: DataLoader(dataset(), sampler=SubsetRandomSampler(range(3))),
        ("SubsetRandomSampler",),
    ),
    "unstable sampler": (lambda: DataLoader(dataset(), sampler=Unstable()), ("Unstable", "shuffle=False")),
    "shuffling batch sampler": (
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(RandomSampler(dataset()), 4, drop_last=False)),
        ("BatchSampler", "shuffle=False"),
    ),
    "some rows, in another order": (
        lambda: DataLoader(dataset(), sampler=[2, 0, 1]),
        ("example 0", "example 2", 12, "torch.utils.data.Subset(dataset, indices)", "list(loader)"),
    ),
    "rows that come twice": (lambda: DataLoader(dataset(), sampler=[0, 1, 1, 2]), ("list", "example 2", "example 1")),
    "a sampler without end": (
        lambda: DataLoader(dataset(), sampler=Endless()),
        ("Endless", "example 1", "example 0"),
    ),
    "names in place of numbers": (
        lambda: DataLoader(dataset(), sampler=[("a", 1), ("b", 2)]),
        ("list", "Subset(dataset, indices)"),
    ),
    "batches of a dataset in another order": (
        lambda: DataLoader([dataset()[:2], dataset()[2:4]], batch_size=None, sampler=[1, 0]),
        ("example 0", "example 1", 2),
    ),
    "another order, and workers of its own": (
        lambda: DataLoader(dataset(), sampler=[*range(1, len(dataset())), 0], worker_init_fn=int),
        ("list", "example 0", "example 1", 12),
    ),
    "unstable batch sampler": (
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(Unstable(), 4, drop_last=False)),
        ("BatchSampler", "shuffle=False"),
    ),
    "stream": (Stream, ("Stream", "stream")),
    "loader of a stream": (lambda: DataLoader(Stream()), ("Stream", "stream")),
    "generator": (lambda: (b for b in [examples()]), ("generator", "Data.stream(dataset)")),
    "int": (lambda: 3, ("int", "eigentrace.Data")),
    "str": (lambda: "train.csv", ("str", "eigentrace.Data")),
    "tensor": (lambda: torch.zeros(12, 3), ("Tensor", "eigentrace.Data")),
    "model": (net, ("Sequential", "eigentrace.Data")),
    "bare tensors": (lambda: list(examples()), ("list", 2, "`[batch]`", "`Data.from_batches(batches)`")),
    "list of examples": (lambda: list(dataset()), ("list", "tuple", "eigentrace.Data(examples)")),
    "list of dict examples": (
        lambda: [{"x": torch.zeros(3), "labels": 1}],
        ("list", "dict", "eigentrace.Data(examples)"),
    ),
    "one example": (lambda: dataset()[0], ("tuple", "eigentrace.Data([example])")),
    "one dict example": (
        lambda: {"x": torch.zeros(3), "labels": torch.tensor(1)},
        ("dict", "eigentrace.Data.from_batches([batch])"),
    ),
    "tuple of batches": (lambda: (examples(), examples()), ("(tuple, tuple)",)),
    "tuple of arrays": (lambda: (np.zeros((2, 3)), np.zeros(2)), ("(ndarray, ndarray)",)),
    "batch without tensors": (lambda: [{"x": [1.0]}], ("type dict",)),
    "empty dict": (dict, ("type dict",)),
}


@pytest.mark.parametrize(("make", "mentions"), table(DATA))
def test_data_is_refused(make, mentions):
    with refused(DataError, *mentions):
        fit(data=make())


DATA_ARGUMENTS = {
    "too few ids": (lambda: et.Data(dataset(), ids=["a"]), ("1 ids", "12 examples")),
    "ids of batches": (lambda: et.Data.from_batches([examples()], ids=range(3)), ("3 ids", "12 examples")),
    "batch_size 0": (lambda: et.Data(dataset(), batch_size=0), ("batch_size", 1, 0)),
    "batch_size None": (lambda: et.Data(dataset(), batch_size=None), ("batch_size", 1, None)),
    "loader": (lambda: et.Data(DataLoader(dataset())), ("Data(...)", "DataLoader")),
    "dict": (lambda: et.Data({"x": torch.zeros(3)}), ("dict", "`list(loader)`")),
    "stream": (lambda: et.Data(Stream()), ("Stream", "Data.stream(dataset)")),
    "generator as a stream": (
        lambda: et.Data.stream(example for example in dataset()),
        ("generator", "IterableDataset"),
    ),
    "iterator as a stream": (lambda: et.Data.stream(iter(dataset())), ("iterator", "__iter__")),
    "loader as a stream": (lambda: et.Data.stream(DataLoader(Stream())), ("Data.stream", "DataLoader")),
    "int as a stream": (lambda: et.Data.stream(3), ("Data.stream", "int")),
    "length 0": (lambda: et.Data.stream(Stream(), length=0), ("length", 1, 0)),
    "ids of a stream": (lambda: et.Data.stream(Stream(), length=2, ids=["a"]), ("1 ids", "2 examples")),
    "generator of batches": (
        lambda: et.Data.from_batches(iter([examples()])),
        ("from_batches", "list_iterator", "`list(batches)`"),
    ),
}


@pytest.mark.parametrize(("make", "mentions"), table(DATA_ARGUMENTS))
def test_data_arguments_are_refused(make, mentions):
    with refused(DataError, *mentions):
        make()


def test_no_data_is_refused():
    with refused(DataError, "NoneType"):
        CHEAP.fit(et.classification(net()), None)


def test_random_augmentation_is_refused():
    with refused(DeterminismError, "float32 (8, 3)"):
        fit(data=Augmented())


@pytest.mark.parametrize(
    ("items", "mentions"),
    [([(torch.zeros(3), 0), (torch.zeros(4), 0)], ("[3]", "[4]")), ([(object(), 0)], ("object",))],
    ids=["ragged", "no tensors"],
)
def test_examples_that_cannot_be_stacked(items, mentions):
    with refused(DataError, "tuple", *mentions, "collate=..."):
        fit(data=et.Data(items))


def test_loader_that_changes_its_batches():
    loader = DataLoader(Shrinking(), batch_size=None, sampler=[0])
    with refused(DataError, "row 0", "10 examples", 11):
        fit(data=loader)


class Items(Dataset):
    """Gives what a function makes of each row of a few examples."""

    def __init__(self, make):
        self.make, (self.x, self.y) = make, examples()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.make(self.x[row], self.y[row])


class Flowing(IterableDataset):
    def __iter__(self):
        return zip(*examples(), strict=True)


SINGLES = {  # a dataset of examples, and how the error describes one of them
    "tensors": (TensorDataset(*examples()), "list(float32 (3,), int64 ())"),
    "numbers": (Items(lambda x, y: (x, int(y))), "list(float32 (3,), int)"),
    "arrays": (Items(lambda x, y: (x.numpy(), y.numpy())), "list(float32 (3,), int64 ())"),
    "dicts": (Items(lambda x, y: {"input": x, "labels": int(y)}), "{'input': float32 (3,), 'labels': int}"),
    "pictures": (Items(lambda x, y: (x.view(1, 3, 1), int(y))), "list(float32 (1, 3, 1), int)"),
    "lengths": (Items(lambda x, y: (x, y[None])), "list(float32 (3,), int64 (1,))"),
    "only numbers": (Items(lambda x, y: (float(x[0]), int(y))), "list(float, int)"),
    "a stream": (Flowing(), "list(float32 (3,), int64 ())"),
}


@pytest.mark.parametrize(("dataset", "example"), table(SINGLES))
def test_a_loader_without_a_batch_size_that_gives_single_examples_is_refused(dataset, example):
    loader = DataLoader(dataset, batch_size=None)
    mentions = ("DataLoader", "batch_size=None", example)
    with refused(DataError, *mentions):
        fit(data=loader)
    for fitted in (fit(), fit(method=et.TracIn()), fit(method=et.Loss())):
        with refused(DataError, *mentions):
            fitted.self_influence(loader)
    with refused(DataError, *mentions):
        fit(method=et.TracIn()).influence(examples(), loader)


def test_a_loader_without_a_batch_size_is_noted_where_its_items_may_be_batches():
    loader = DataLoader(Items(lambda x, y: x), batch_size=None)
    with refused(TaskError, "Data(examples)") as caught:
        fit(et.Task(net(), lambda m, b: (m(b) - b).square()), loader)
    expect_mentions(caught.value.__notes__[0], ["DataLoader", "batch_size=None", "float32 (3,)"])


@pytest.mark.parametrize("extra", [(), (3,), (torch.tensor(0.5),), (torch.ones(1, 3),), ("name",)], ids=str)
def test_a_loader_without_a_batch_size_that_gives_batches_is_read(extra):
    x, y = examples()
    batches = [(x[i : i + 4], y[i : i + 4], *extra) for i in (0, 4, 8)]
    task = et.Task(net(), lambda m, b: cross_entropy(m, b[:2]))
    scores = fit(task, DataLoader(batches, batch_size=None)).self_influence(DataLoader(batches, batch_size=None))
    torch.testing.assert_close(scores, fit(task, (x, y)).self_influence((x, y)))
