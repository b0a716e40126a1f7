"""A digest is the example's content: the same in whatever form it is read, another as soon as anything differs."""

import hashlib
from collections import OrderedDict, UserDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eigentrace.data import Data, as_data
from eigentrace.data.digest import digest, digest_rows, digests
from eigentrace.errors import DataError
from tests.helpers.expecting import refused
from tests.helpers.small import examples, table

X, Y = examples(10)
Pair = namedtuple("Pair", "x y")


class Colour(IntEnum):
    RED = 1


def image(mode="RGB", size=(4, 3), fill=0, palette=None):
    made = Image.new(mode, size, fill)
    if palette is not None:
        made.putpalette(palette)
    return made


SAME = {
    "ints": [1, np.int64(1), np.int32(1), np.uint8(1), torch.tensor(1), torch.tensor(1, dtype=torch.int16), Colour.RED],
    "negative ints": [-3, np.int8(-3), torch.tensor(-3, dtype=torch.int32)],
    "floats": [0.5, np.float64(0.5), torch.tensor(0.5, dtype=torch.float64), np.array(0.5)],
    "float32": [np.float32(0.1), torch.tensor(0.1), np.array(0.1, dtype=np.float32), torch.tensor([0.1])[0]],
    "bools": [True, np.bool_(True), torch.tensor(True), np.array(True)],
    "text": ["héllo", np.str_("héllo")],
    "bytes": [b"ab", bytearray(b"ab"), memoryview(b"ab"), np.bytes_(b"ab")],
    "arrays": [X, X.numpy(), X.clone().requires_grad_(), X.T.contiguous().T, np.asfortranarray(X.numpy())],
    "byte orders": [np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4"), torch.arange(3, dtype=torch.int32)],
    "strides": [X[::2], X[[0, 2, 4, 6, 8]]],
    "bfloat16": [X.bfloat16(), X.bfloat16().T.contiguous().T],
    "conjugates": [
        torch.tensor([1j]).conj(),
        torch.tensor([complex(0, -1)]),
        np.array([1j], dtype=np.complex64).conj(),
    ],
    "tuples": [(1, "a"), [1, "a"], Pair(1, "a")],
    "dicts": [{"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(b=2, a=1), UserDict(a=1, b=2)],
    "long lists": [list(range(20)), tuple(range(20)), [torch.tensor(i) for i in range(20)], list(np.arange(20))],
    "lists of floats": [[0.5] * 20, [np.float64(0.5)] * 20],
    "texts": [np.array(["a", "bc"]), ["a", "bc"], np.array(["a", "bc"], dtype=object)],
    "images": [image(), image(), Image.fromarray(np.zeros((3, 4, 3), dtype=np.uint8))],
    "nested": [{"x": (X[0], {"y": Y[0]})}, {"x": [X[0].numpy(), {"y": int(Y[0])}]}],
}
DIFFERENT = {
    "numbers of other kinds": [1, 1.0, True, "1", b"1", None, [1], (1, 1), {1: 1}, 2, -1, 2**63, -(2**70), 2**70, ""],
    "types": [
        torch.ones(2, dtype=t) for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
    ]
    + [torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.uint16)],
    "shapes": [torch.zeros(4), torch.zeros(2, 2), torch.zeros(1, 4), torch.zeros(5), torch.zeros(0), torch.zeros(0, 2)],
    "single numbers": [torch.tensor(1), torch.tensor([1]), np.ones((1, 1), dtype=np.int64)],
    "nesting": [[1, [2, 3]], [[1, 2], 3], [1, 2, 3], [[1, 2, 3]], [], [[]], {}, [[], []]],
    "places of text": [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""]],
    "keys": [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"a": 1, "c": 2}, {1: 1, "b": 2}],
    "images": [
        image(),
        image(fill=1),
        image(size=(3, 4)),
        image("L", (12, 3)),
        image("P"),
        image("P", palette=[9] * 6),
    ],
    "signs of zero": [0.0, -0.0],
    "long lists": [[0] * 20, [0] * 21, [0.0] * 20, [0] * 19 + [2**64], [False] * 20],
    "dates": [np.datetime64("2020-01-01"), np.datetime64("2020-01-02"), np.int64(18262)],
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_content_in_other_forms(kind):
    assert len({digest(value) for value in SAME[kind]}) == 1


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_content(kind):
    assert len({digest(value) for value in DIFFERENT[kind]}) == len(DIFFERENT[kind])


def test_a_digest_is_the_hash_of_its_parts():
    """What is stored with a run must not change: these bytes are the format."""
    parts = (
        b"(3:" + b"afloat32,2:" + np.array([1, 2], dtype="<f4").tobytes() + b"i" + (7).to_bytes(8, "little") + b"s1:a"
    )
    expected = int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little")
    assert digest((torch.tensor([1.0, 2.0]), 7, "a")) == expected


REFUSED = {  # an example, and what the error mentions of it
    "object": (object(), "type object"),
    "set": ({1}, "type set"),
    "sparse tensor": (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "record array": (np.zeros(2, dtype=[("a", "i4")]), "[('a', '<i4')]"),
    "long double": (np.zeros(2, dtype=np.longdouble), np.dtype(np.longdouble).name),
    "meta tensor": (torch.zeros(2, device="meta"), "meta"),
    "inside": ({"x": [1, object()]}, "type object"),
}


@pytest.mark.parametrize(("example", "mention"), table(REFUSED))
def test_what_has_no_digest(example, mention):
    with refused(DataError, mention, "digest"):
        digest(example)
    assert digests([1, example]) is None


def test_no_examples_have_no_digests():
    assert digests([]).shape == (0,)


# --- rows of a batch --------------------------------------------------------------------------------------------------

BATCHES = {
    "pair": ((X, Y), lambda i: (X[i], Y[i])),
    "list": ([X, Y], lambda i: (X[i], int(Y[i]))),
    "bare": (X, lambda i: X[i].numpy()),
    "dict": ({"y": Y.int(), "x": X.double()}, lambda i: {"x": X[i].double(), "y": int(Y[i])}),
    "nested": (({"x": X}, [Y > 1, Y]), lambda i: ({"x": X[i]}, (bool(Y[i] > 1), Y[i]))),
    "strided": ((X.T.contiguous().T, Y), lambda i: (X[i], Y[i])),
    "bfloat16": ((X.bfloat16(), Y.bfloat16()), lambda i: (X[i].bfloat16(), Y[i].bfloat16())),
    "empty slices": ((X[:, :0], Y), lambda i: (X[i, :0], Y[i])),
    "with shared things": ({"x": X, "mask": torch.ones(3), "name": "train", "l": [None]}, lambda i: {"x": X[i]}),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_rows_of_a_batch_are_examples(kind):
    batch, example = BATCHES[kind]
    expected = [digest(example(i)) for i in range(10)]
    assert digest_rows(batch, 10).tolist() == expected
    assert digest_rows(batch, 10, slice(2, 5)).tolist() == expected[2:5]
    assert digest_rows(batch, 10, np.array([1, 7])).tolist() == [expected[1], expected[7]]
    assert digest_rows(batch, 10).dtype == np.uint64


def test_batches_without_rows_have_no_digests():
    assert digest_rows({"x": torch.ones(3)}, 10) is None
    assert digest_rows([torch.eye(10).to_sparse()], 10) is None


# --- digests of data --------------------------------------------------------------------------------------------------


class Plain(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return X[i].numpy(), int(Y[i])


FORMS = {
    "tensors": lambda: Data(TensorDataset(X, Y), batch_size=4),
    "dataset": lambda: Data(Plain(), batch_size=3),
    "workers": lambda: Data(Plain(), batch_size=4, workers=1),
    "loader": lambda: DataLoader(Plain(), batch_size=4),
    "loader of batches": lambda: DataLoader([(X[:7], Y[:7]), (X[7:], Y[7:])], batch_size=None),
    "loader with a sampler": lambda: DataLoader(Plain(), batch_size=4, sampler=list(range(10))),
    "batches": lambda: [(X[:7], Y[:7]), [X[7:], Y[7:]]],
    "stream": lambda: Data.stream(list(Plain()), batch_size=4),
    "stream in a worker": lambda: Data.stream(list(Plain()), batch_size=4, workers=1),
    "taken": lambda: Data(TensorDataset(X.repeat(2, 1), Y.repeat(2))).take(range(10, 20)),
}
EXPECTED = digests(list(TensorDataset(X, Y)))


@pytest.mark.parametrize("form", FORMS)
def test_digests_do_not_depend_on_the_form(form):
    data = as_data(FORMS[form]())
    for rows, expected in ((None, EXPECTED), (range(3, 9), EXPECTED[3:9]), (np.array([0, 2, 8]), EXPECTED[[0, 2, 8]])):
        found = [batch.digests for batch in data.batches(rows, digests=True)]
        assert np.concatenate(found).tolist() == expected.tolist()
    assert next(data.batches()).digests is None


def padded(texts):
    width = max(map(len, texts))
    return torch.tensor([[*map(ord, text), *[0] * (width - len(text))] for text in texts])


def test_padding_and_company_have_no_say():
    texts = ["a", "bcd", "ef", "g"]
    for size in (1, 2, 4):
        found = [batch.digests for batch in Data(texts, collate=padded, batch_size=size).batches(digests=True)]
        assert np.concatenate(found).tolist() == [digest(text) for text in texts]


class Odd:
    """Something without a digest."""

    def __init__(self, number):
        self.number = number


def unpacked(odd):
    return (torch.tensor([float(getattr(item, "number", item)) for item in odd]),)


def test_without_digests_from_the_first_example_that_has_none_on():
    data = Data([1, 2, Odd(3), 4, 5, 6], collate=unpacked, batch_size=2)
    assert [batch.digests is None for batch in data.batches(digests=True)] == [False, True, True]
    assert all(batch.digests is None for batch in Data.stream([Odd(1)] * 3, collate=unpacked).batches(digests=True))


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprints_do_not_depend_on_form_or_batch_size():
    forms = ("tensors", "dataset", "workers", "loader", "batches", "taken")
    found = {as_data(FORMS[form]()).fingerprint() for form in forms}
    found |= {Data(Plain(), batch_size=size).fingerprint() for size in (1, 100)}
    assert len(found) == 1
    assert len({Data.stream(list(Plain()), batch_size=size).fingerprint() for size in (1, 3, 100)}) == 1


def test_fingerprints_tell_data_apart():
    def fingerprint(change, make=lambda x, y: Data(TensorDataset(x, y))):
        x, y = torch.arange(2000.0)[:, None], torch.arange(2000)
        return make(*change(x, y)).fingerprint()

    def edited(row):
        return lambda x, y: (x.index_fill(0, torch.tensor([row]), -1.0), y)

    changes = [lambda x, y: (x, y), edited(0), edited(1999), lambda x, y: (x[:-1], y[:-1]), lambda x, y: (x.flip(0), y)]
    assert len({fingerprint(change) for change in changes}) == len(changes)
    loaders = [fingerprint(change, lambda x, y: as_data(DataLoader([(x, y)], batch_size=None))) for change in changes]
    # Of a loader with its own batches only the beginning and the number of examples count.
    assert len(set(loaders)) == 4
    assert loaders[2] == loaders[0]


def test_fingerprints_of_examples_without_digests():
    def fingerprint(numbers, size, make=Data):
        return make([Odd(n) for n in numbers], collate=unpacked, batch_size=size).fingerprint()

    for make in (Data, Data.stream):
        assert fingerprint([1, 2, 3], 2, make) == fingerprint([1, 2, 3], 3, make)
        assert fingerprint([1, 2, 3], 2, make) != fingerprint([1, 2, 4], 2, make)


def test_fingerprints_are_the_same_everywhere():
    """A run on disk is continued by another process: what it stored must be found again."""
    data = Data([{"y": i, "text": "a", "x": torch.ones(3)} for i in range(100)], batch_size=7)
    assert data.fingerprint() == "b7d282e0335f46c43bb2f66c1b3205b2d8417727f804f4010ee741f6b8ccbd13"


def test_fingerprints_draw_nothing_from_the_global_random_state():
    before = torch.get_rng_state()
    for form in ("dataset", "loader with a sampler", "stream", "tensors"):
        as_data(FORMS[form]()).fingerprint()
    assert torch.equal(torch.get_rng_state(), before)
