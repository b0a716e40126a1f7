"""Every form that data comes in gives the same examples, in the same order, under the same rows."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

import eigentrace as et
import eigentrace.data.row_numbers
from eigentrace.data import Data, as_data
from eigentrace.data.batch import tensors_of
from eigentrace.errors import DataError
from tests.helpers.expecting import refused
from tests.helpers.small import cross_entropy, examples, fit, net

X, Y = examples(10)
MANY = 100_000_000


class Plain(Dataset):
    """A dataset that is no TensorDataset, so that it is read by a loader."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return X[i], Y[i]


class Corpus(Dataset):
    """As many rows as a large corpus has, each made when it is read."""

    def __len__(self):
        return MANY

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i % 7


class Reading(Dataset):
    """Knows which process read an example."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        return torch.tensor([0 if worker is None else worker.num_workers])


def pairs(batch):
    return (torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]))


ORDER = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]

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
    "loader in another order": lambda: DataLoader(Plain(), batch_size=4, sampler=ORDER),
    "loader in another order that drops": lambda: DataLoader(Plain(), batch_size=4, sampler=ORDER, drop_last=True),
    "loader with buckets": lambda: DataLoader(Plain(), batch_sampler=[ORDER[:3], ORDER[3:]]),
    "loader with buckets of tensors": lambda: DataLoader(
        Plain(), batch_sampler=[torch.tensor(ORDER[:3]), torch.tensor(ORDER[3:])]
    ),
    "loader with its own workers": lambda: DataLoader(Plain(), batch_size=4, num_workers=1, worker_init_fn=int),
    "batches": lambda: [(X[:7], Y[:7]), (X[7:], Y[7:])],
    "batches as lists": lambda: [[X[:7], Y[:7]], [X[7:], Y[7:]]],
    "batches with an empty one": lambda: [(X[:7], Y[:7]), (X[:0], Y[:0]), (X[7:], Y[7:])],
    "one batch": lambda: (X, Y),
    "stream": lambda: Data.stream(list(Plain()), batch_size=4),
    "taken": lambda: Data(TensorDataset(X.repeat(2, 1), Y.repeat(2)), batch_size=4).take(range(10, 20)),
    "taken from batches": lambda: as_data([(X[:2], Y[:2]), (X[:6], Y[:6]), (X[6:], Y[6:])]).take(range(2, 12)),
    "some taken twice": lambda: (
        Data(TensorDataset(X.repeat_interleave(4, 0), Y.repeat_interleave(4)), batch_size=4)
        .take(np.arange(0, 40, 2))
        .take(np.arange(0, 20, 2))
    ),
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


def same(found, expected):
    """Batches of the same rows with the same examples, grouped the same way."""
    assert [batch.rows.tolist() for batch in found] == [batch.rows.tolist() for batch in expected]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_range_from_a_boundary_on_gives_the_batches_of_a_full_pass(form):
    data = as_data(FORMS[form]())
    whole = list(data.batches())
    starts = [int(batch.rows[0]) for batch in whole] + [10]
    for row in range(11):
        boundary = data.boundary(row)
        assert boundary == next(start for start in starts if start >= row)
        later = [batch for batch in whole if batch.rows[0] >= boundary]
        for rows in (range(boundary, 10), range(boundary, 1000), slice(boundary, None)):
            same(list(data.batches(rows)), later)
    assert data.boundary(11) == 10


@pytest.mark.parametrize("form", FORMS)
def test_a_range_is_cut_where_a_full_pass_is_cut(form):
    data = as_data(FORMS[form]())
    ends = {data.boundary(row) for row in range(11)}
    for start, stop in ((1, 9), (3, 5), (5, 5), (7, 10), (0, 1), (10, 20)):
        found = list(data.batches(range(start, stop)))
        rows = [row for batch in found for row in batch.rows.tolist()]
        assert rows == list(range(start, min(stop, 10)))
        assert all(int(batch.rows[-1]) + 1 in ends | {stop} for batch in found)
        assert all(int(batch.rows[0]) in ends | {start} for batch in found)
        assert all(torch.equal(batch.values[0], X[batch.rows]) for batch in found)


def test_rows_before_the_first_are_refused():
    with refused(DataError, -3, "len(data) - 1"):
        Data(Plain()).batches(slice(-3, None))
    with refused(DataError, "step", 1, 2):
        Data(Plain()).batches(slice(0, None, 2))


def test_ranges_with_steps_are_rows_like_others():
    (batch,) = Data(Plain()).batches(range(1, 10, 4))
    assert batch.rows.tolist() == [1, 5, 9]


def test_a_list_of_batches_is_entered_where_the_rows_begin():
    class Watched(list):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    data, read = Data.from_batches(Watched((X[i : i + 1], Y[i : i + 1]) for i in range(10))), []
    assert len(list(data.batches(range(6, 8)))) == 2
    assert read == [6, 7]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hundred_million_rows_take_no_memory(workers):
    names = np.broadcast_to(np.array("a"), MANY)  # no copy of anything
    tracemalloc.start()
    try:
        data = as_data(Data(Corpus(), batch_size=128, ids=names, workers=workers))
        begin = next(data.batches())
        middle = next(data.batches(slice(data.boundary(MANY // 2 - 5), None)))
        end = list(data.batches(range(MANY - 200, MANY)))
        half = data.take(range(MANY // 2, MANY))
        rows = data.sample(1000, torch.Generator().manual_seed(0))
        data.fingerprint()
        assert next(half.batches()).rows.tolist() == list(range(128))
        assert half.rebatched(64).first(100).values[0][0] == MANY // 2
        assert len(half.ids) == MANY // 2
        assert tracemalloc.get_traced_memory()[1] < 5e6  # all rows as int64 are 800 MB
    finally:
        tracemalloc.stop()
    assert begin.rows.tolist() == list(range(128))
    assert (middle.rows[0], len(middle)) == (MANY // 2, 128)
    assert [len(batch) for batch in end] == [72, 128]
    assert end[-1].values[0][-1] == torch.tensor(float(MANY - 1))
    assert len(np.unique(rows)) == 1000
    assert (np.diff(rows) > 0).all()


def test_samples_of_very_many_rows_favour_none(monkeypatch):
    monkeypatch.setattr(eigentrace.data.row_numbers, "_PERMUTED", 10)
    data = Data(TensorDataset(torch.zeros(40, 1)))
    draws = np.stack([data.sample(10, torch.Generator().manual_seed(seed)) for seed in range(2000)])
    assert (np.diff(draws) > 0).all()
    assert draws.min() == 0
    assert draws.max() == 39
    # Each row is drawn 500 times of 2000 on average, with a deviation of 19: five of them either way.
    assert np.abs(np.bincount(draws.ravel(), minlength=40) - 500).max() < 97
    assert (data.sample(10, torch.Generator().manual_seed(3)) == draws[3]).all()
    assert len(data.sample(20, torch.Generator())) == 20


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
    with refused(DataError, "take", 0, 9, rows):
        Data(TensorDataset(torch.zeros(10, 1))).take(rows)


def test_no_rows_cannot_be_taken():
    with refused(DataError, "take", 0, 1):
        Data(TensorDataset(torch.zeros(10, 1))).take([])


def test_ids_go_with_the_rows_that_are_taken():
    data = Data(TensorDataset(torch.zeros(4, 1)), ids=["a", "b", "c", "d"]).take([1, 3])
    assert data.ids == ["b", "d"]
    assert data.rebatched(1).ids == ["b", "d"]


class Lazy:
    """Names made when they are asked for."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return f"name {row}"


IDS = {
    "list": (lambda: list("abcd"), list),
    "lazy": (Lazy, None),
    "range": (lambda: range(4), None),
    "numpy": (lambda: np.array(list("abcd")), np.ndarray),
    "torch": (lambda: torch.arange(4), torch.Tensor),
    "pyarrow": (lambda: pa.array(list("abcd")), pa.Array),
    "chunked": (lambda: pa.chunked_array([["a"], ["b", "c", "d"]]), pa.ChunkedArray),
}


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("rows", [[1, 3], range(1, 3)], ids=["rows", "range"])
def test_ids_of_taken_rows_stay_in_their_form(kind, rows):
    make, form = IDS[kind]
    ids = make()
    data = Data(TensorDataset(torch.zeros(4, 1)), ids=ids)
    assert data.ids is ids
    some = data.take(rows)
    assert len(some.ids) == 2
    assert [some.ids[0], some.ids[1]] == [ids[row] for row in rows]
    assert some.take([1]).ids[0] == ids[rows[1]]
    if form not in (None, list):
        assert isinstance(some.ids, form)


def test_ids_that_are_looked_up_are_a_sequence():
    ids = Data(TensorDataset(torch.zeros(4, 1)), ids=list("abcd")).take([0, 1, 3]).ids
    assert list(ids) == ["a", "b", "d"]
    assert ids[1:] == ["b", "d"]
    assert ids[-1] == "d"
    assert "c" not in ids
    assert ids != ["a", "b"]
    assert ids != 3
    assert repr(ids) == "Chosen(3 of 4 items)"


def test_reading_draws_nothing_from_the_global_random_state():
    before = torch.get_rng_state()
    for form in ("dataset", "loader", "loader with a sampler", "loader with a batch sampler"):
        as_data(FORMS[form]())
    list(Data(Plain()).batches())
    assert torch.equal(torch.get_rng_state(), before)
