"""Every form that data comes in gives the same examples, in the same order, under the same rows."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

import eigentrace as et
from eigentrace.batch import tensors_of
from eigentrace.data import Data, as_data
from eigentrace.errors import DataError
from small import cross_entropy, examples, fit, net

X, Y = examples(10)


class Plain(Dataset):
    """A dataset that is no TensorDataset, so that it is read by a loader."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return X[i], Y[i]


class Reading(Dataset):
    """Knows which process read an example."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        return torch.tensor([0 if worker is None else worker.num_workers])


def pairs(batch):
    return (torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]))


FORMS = {
    "Data": lambda: Data(Plain(), batch_size=4),
    "Data of tensors": lambda: Data(TensorDataset(X, Y), batch_size=4),
    "Data with collate": lambda: Data(TensorDataset(X, Y), collate=pairs, batch_size=3),
    "Data of a list": lambda: Data(list(Plain()), batch_size=np.int64(3)),
    "dataset": Plain,
    "tensors": lambda: TensorDataset(X, Y),
    "subset": lambda: Subset(Plain(), range(10)),
    "loader": lambda: DataLoader(Plain(), batch_size=4),
    "loader of tensors": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "loader with collate": lambda: DataLoader(Plain(), batch_size=4, collate_fn=pairs),
    "loader that drops": lambda: DataLoader(Plain(), batch_size=4, drop_last=True),
    "loader of batches": lambda: DataLoader([(X[:7], Y[:7]), (X[7:], Y[7:])], batch_size=None),
    "loader with a batch sampler": lambda: DataLoader(
        Plain(), batch_sampler=BatchSampler(SequentialSampler(Plain()), 3, drop_last=False)
    ),
    "loader with a sampler": lambda: DataLoader(Plain(), batch_size=3, sampler=list(range(10))),
    "loader with its own workers": lambda: DataLoader(Plain(), batch_size=4, num_workers=1, worker_init_fn=int),
    "batches": lambda: [(X[:7], Y[:7]), (X[7:], Y[7:])],
    "batches as lists": lambda: [[X[:7], Y[:7]], [X[7:], Y[7:]]],
    "batches with an empty one": lambda: [(X[:7], Y[:7]), (X[:0], Y[:0]), (X[7:], Y[7:])],
    "one batch": lambda: (X, Y),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_in_order(form):
    data = as_data(FORMS[form]())
    batches = list(data.batches())
    assert len(data) == 10
    assert np.concatenate([batch.rows for batch in batches]).tolist() == list(range(10))
    assert torch.equal(torch.cat([batch.values[0] for batch in batches]), X)
    assert torch.equal(torch.cat([batch.values[1] for batch in batches]), Y)
    assert all(len(batch) == len(batch.values[0]) for batch in batches)


@pytest.mark.parametrize("form", FORMS)
def test_some_rows(form):
    rows = np.array([0, 2, 3, 8])
    batches = list(as_data(FORMS[form]()).batches(rows))
    assert np.concatenate([batch.rows for batch in batches]).tolist() == rows.tolist()
    assert torch.equal(torch.cat([batch.values[0] for batch in batches]), X[rows])


def test_dicts_are_one_batch():
    data = as_data({"x": X, "labels": Y, "name": "train"})
    (batch,) = data.batches()
    assert torch.equal(batch.values["x"], X)
    assert batch.values["name"] == "train"


def test_a_batch_may_begin_with_a_dict_or_a_tuple():
    assert len(as_data(({"x": X}, Y))) == 10
    assert len(as_data(((X, X), Y))) == 10


def test_data_is_taken_as_it_is():
    data = Data(Plain())
    assert as_data(data) is data


def test_scores_do_not_depend_on_the_form():
    task = et.Task(net(), cross_entropy)
    fitted = fit(task, (X, Y))
    scores = [fitted.self_influence(FORMS[form]()) for form in ("one batch", "batches", "loader", "Data with collate")]
    for other in scores[1:]:
        # float32 rounding of sums in another order
        torch.testing.assert_close(other, scores[0], rtol=1e-5, atol=1e-7)


def test_examples_of_dicts_and_numbers_are_stacked():
    (batch,) = Data([{"x": X[i], "labels": int(Y[i])} for i in range(10)]).batches()
    assert torch.equal(batch.values["x"], X)
    assert torch.equal(batch.values["labels"], Y)


def test_ids_are_kept():
    assert Data(Plain(), ids=list("abcdefghij")).ids == list("abcdefghij")
    assert Data(Plain()).ids is None
    assert Data.from_batches([(X, Y)], ids=range(10)).ids == range(10)


@pytest.mark.parametrize(("workers", "expected"), [(0, 0), (2, 2)])
def test_workers(workers, expected):
    values = [t for batch in Data(Reading(), workers=workers).batches() for t in tensors_of(batch.values)]
    assert torch.cat(values).unique().tolist() == [expected]


def test_workers_of_a_loader_are_kept():
    values = [t for batch in as_data(DataLoader(Reading(), num_workers=1)).batches() for t in tensors_of(batch.values)]
    assert torch.cat(values).unique().tolist() == [1]


def test_samples_are_ascending_different_and_repeatable():
    data = Data(TensorDataset(torch.zeros(100, 1)))
    first, again, other = (data.sample(30, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert len(np.unique(first)) == 30
    assert (np.diff(first) > 0).all()
    assert (first == again).all()
    assert (first != other).any()
    assert (data.sample(100, torch.Generator()) == np.arange(100)).all()
    assert len(data.sample(1000, torch.Generator())) == 100


@pytest.mark.parametrize("form", FORMS)
def test_taken_rows_are_numbered_anew(form):
    whole, rows = as_data(FORMS[form]()), [1, 3, 4, 8]
    some = whole.take(rows)
    assert len(some) == 4
    for wanted, expected in ((None, [0, 1, 2, 3]), (np.array([1, 3]), [1, 3])):
        found = list(some.batches(wanted))
        assert np.concatenate([batch.rows for batch in found]).tolist() == expected
        assert torch.equal(torch.cat([batch.values[0] for batch in found]), X[np.array(rows)[expected]])
    again = some.rebatched(2)
    assert len(again) == 4
    assert some.can_rebatch == whole.can_rebatch
    assert max(map(len, again.batches())) <= (2 if some.can_rebatch else 4)


@pytest.mark.parametrize("rows", [[3, 1], [1, 1], [-1, 2], [5, 100], [[1, 2]]])
def test_rows_that_cannot_be_taken(rows):
    with pytest.raises(DataError, match="take needs different rows of 0 to 9 in ascending order"):
        Data(TensorDataset(torch.zeros(10, 1))).take(rows)


def test_ids_go_with_the_rows_that_are_taken():
    data = Data(TensorDataset(torch.zeros(4, 1)), ids=["a", "b", "c", "d"]).take([1, 3])
    assert data.ids == ["b", "d"]
    assert data.rebatched(1).ids == ["b", "d"]


def test_reading_draws_nothing_from_the_global_random_state():
    before = torch.get_rng_state()
    for form in ("dataset", "loader", "loader with a sampler", "loader with a batch sampler"):
        as_data(FORMS[form]())
    list(Data(Plain()).batches())
    assert torch.equal(torch.get_rng_state(), before)
