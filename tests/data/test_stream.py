"""Streams: rows are numbered by order, whoever reads, and passes that differ are noticed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import eigentrace as et
from eigentrace.data import Data, as_data
from eigentrace.errors import DataError
from tests.helpers.expecting import refused
from tests.helpers.small import cross_entropy, examples, fit, net

X, Y = examples(10)


class Stream(IterableDataset):
    """Gives the examples of a table, remembering how many passes were begun and how far they went."""

    def __init__(self, count=10):
        self.count, self.passes, self.read = count, 0, 0

    def __iter__(self):
        self.passes += 1
        for i in range(self.count):
            self.read += 1
            yield X[i], Y[i]


class Sharded(IterableDataset):
    """Every worker gives its share, as torch's documentation recommends."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return ((X[i], Y[i]) for i in range(first, 10, step))


class Batched(IterableDataset):
    """Gives whole batches."""

    def __iter__(self):
        yield X[:7], Y[:7]
        yield X[7:], Y[7:]


class Changing:
    """Gives what a list of passes says, one after the other."""

    def __init__(self, *passes):
        self.passes = iter(passes)

    def __iter__(self):
        return iter(next(self.passes))


def pairs(batch):
    return (torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]))


def check(data):
    batches = list(data.batches())
    assert np.concatenate([batch.rows for batch in batches]).tolist() == list(range(10))
    assert torch.equal(torch.cat([batch.values[0] for batch in batches]), X)
    assert torch.equal(torch.cat([batch.values[1] for batch in batches]), Y)
    assert len(data) == 10
    return [len(batch) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("make", [Stream, Sharded, lambda: list(TensorDataset(X, Y))], ids=["all", "shared", "object"])
def test_order_does_not_depend_on_workers(make, workers):
    assert check(Data.stream(make(), batch_size=4, workers=workers)) == [4, 4, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_streams(workers):
    assert check(as_data(Stream())) == [10]
    loader = DataLoader(Sharded(), batch_size=3, num_workers=workers, collate_fn=pairs, drop_last=True)
    assert check(as_data(loader)) == [3, 3, 3, 1]
    assert check(as_data(DataLoader(Batched(), batch_size=None, num_workers=workers))) == [7, 3]


def test_examples_are_counted_once_and_only_when_asked():
    stream = Stream()
    data = Data.stream(stream, batch_size=4)
    assert data.rebatched(2).first(8).rows.tolist() == [0, 1]
    assert data.boundary(9) == 12  # the end is not known yet
    stream.passes = stream.read = 0
    assert len(data) == 10
    assert len(data.rebatched(3)) == len(data) == 10
    assert data.sample(3, torch.Generator().manual_seed(0)).max() < 10
    assert (stream.passes, stream.read) == (1, 10)
    assert data.boundary(9) == 10


def test_a_full_pass_counts():
    stream = Stream()
    data = Data.stream(stream)
    list(data.batches())
    assert len(data) == 10
    assert stream.passes == 1


@pytest.mark.parametrize("given", [{"length": 10}, {"ids": list("abcdefghij")}], ids=["length", "ids"])
def test_a_given_length_is_believed_until_a_pass_ends(given):
    stream = Stream()
    assert len(Data.stream(stream, **given)) == 10
    assert stream.passes == 0
    for count in (9, 8):
        with refused(DataError, f"{count} examples", 10):
            list(Data.stream(Stream(count), batch_size=4, **given).batches())
    with refused(DataError, "more than 6 examples", "`length`"):
        list(Data.stream(stream, length=6, batch_size=2).batches())


def test_rows_that_are_not_wanted_are_read_and_dropped():
    stream = Stream()
    data = Data.stream(stream, length=10, batch_size=2)
    (batch,) = data.batches(np.array([2, 5]))
    assert torch.equal(batch.values[0], X[[2, 5]])
    found = list(data.batches(slice(7, None)))
    assert [batch.rows.tolist() for batch in found] == [[7], [8, 9]]
    assert torch.equal(found[-1].values[0], X[8:])


def test_a_pass_ends_with_the_last_wanted_row():
    long = [torch.tensor([float(i)]) for i in range(1000)]

    class Watched:
        read = 0

        def __iter__(self):
            for item in long:
                self.read += 1
                yield item

    stream = Watched()
    data = Data.stream(stream, batch_size=4)
    list(data.batches(range(80, 90)))
    assert stream.read == 90
    data.fingerprint()
    assert stream.read == 90 + 64


def test_rows_beyond_the_end():
    with refused(DataError, "Row 12", "10 examples"):
        list(Data.stream(Stream()).batches(np.array([3, 12])))
    assert list(Data.stream(Stream()).batches(range(20, 30))) == []


def test_taken_rows_of_a_stream():
    data = Data.stream(Stream(), batch_size=2, ids=range(10)).take([1, 4, 5, 9])
    assert [batch.rows.tolist() for batch in data.batches()] == [[0, 1], [2, 3]]
    assert torch.equal(torch.cat([batch.values[0] for batch in data.batches()]), X[[1, 4, 5, 9]])
    assert list(data.ids) == [1, 4, 5, 9]
    assert data.can_rebatch


LIST = list(TensorDataset(X, Y))


@pytest.mark.parametrize("second", [LIST[::-1], LIST[1:], []], ids=["other order", "one gone", "used up"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_begins_otherwise_is_noticed(second, workers):
    data = Data.stream(Changing(LIST, second), batch_size=4, workers=workers)
    assert len(data) == 10
    with refused(DataError, "Changing", "stream"):
        next(data.rebatched(2).batches())


def test_a_pass_of_another_length_is_noticed():
    numbers = [torch.tensor([float(i)]) for i in range(100)]
    data = Data.stream(Changing(numbers, numbers[:90], [*numbers, torch.zeros(1)]), batch_size=10)
    assert len(data) == 100
    with refused(DataError, "90 examples", 100):
        list(data.batches())
    with refused(DataError, "more than 100 examples", "`length`"):
        list(data.batches())


def test_an_empty_stream_is_refused():
    with refused(DataError, "list", 0):
        len(Data.stream([]))
    with refused(DataError, "Stream", 0):
        fit(data=Stream(0))


def test_examples_that_cannot_be_stacked():
    with refused(DataError, "Tensor", "[2]", "[3]", "collate=..."):
        list(Data.stream([torch.zeros(2), torch.zeros(3)]).batches())


def test_counting_and_reading_draw_nothing_from_the_global_random_state():
    before = torch.get_rng_state()
    data = Data.stream(Stream())
    assert len(data) == 10
    list(data.batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_of_a_stream_are_those_of_its_examples():
    task = et.Task(net(), cross_entropy)
    fitted = fit(task, Stream())
    expected = fit(task, (X, Y)).self_influence((X, Y))
    # float32 rounding of sums in another order
    torch.testing.assert_close(
        fitted.self_influence(Data.stream(Stream(), batch_size=3)), expected, rtol=1e-5, atol=1e-7
    )


def test_streams_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")
    data = as_data(table.to_iterable_dataset(num_shards=3))
    batches = list(data.rebatched(4).batches())
    assert torch.equal(torch.cat([batch.values["x"] for batch in batches]), X)
    assert torch.equal(torch.cat([batch.values["y"] for batch in batches]), Y)
