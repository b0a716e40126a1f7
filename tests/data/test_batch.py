"""Batches are nested containers of tensors, taken apart and put together without a change of structure."""

from collections import UserDict, namedtuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eigentrace.data.batch import length_of, map_tensors, select, split, tensors_of, to_device, to_double
from eigentrace.errors import DataError
from tests.helpers.expecting import refused

Pair = namedtuple("Pair", ["x", "y"])


def batch(size=4):
    """One of every container: per-example tensors, a shared mask, a scalar, and things that are no tensors."""
    return {
        "pair": Pair(torch.arange(size), torch.randn(size, 2)),
        "list": [torch.ones(size, 1), (torch.zeros(size, dtype=torch.bool),)],
        "mask": torch.eye(size + 3),
        "scalar": torch.tensor(2.0),
        "text": "unchanged",
        "none": None,
    }


def test_mapping_keeps_the_structure():
    found = map_tensors(lambda t: t + 1, batch())
    assert list(found) == list(batch())
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["list"], list)
    assert isinstance(found["list"][1], tuple)
    assert torch.equal(found["pair"].x, torch.arange(4) + 1)
    assert (found["text"], found["none"]) == ("unchanged", None)


def test_other_mappings_become_dicts():
    # A Hugging Face BatchEncoding is a UserDict, which torch's transforms do not look into.
    assert map_tensors(lambda t: t, UserDict({"x": torch.zeros(2)})).__class__ is dict


def test_tensors_come_in_order():
    assert [tuple(t.shape) for t in tensors_of(batch())] == [(4,), (4, 2), (4, 1), (4,), (7, 7), ()]


def test_length_is_that_of_the_first_tensor_with_one():
    assert length_of(batch(5)) == 5
    assert length_of((torch.tensor(1.0), torch.zeros(3, 2))) == 3
    with refused(DataError, "dict"):
        length_of({"x": torch.tensor(1.0), "y": [1, 2, 3]})


@given(st.integers(1, 6).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(0, size - 1)))))
@settings(max_examples=25, deadline=None)
def test_selecting_takes_examples_and_leaves_shared_tensors_whole(case):
    size, wanted = case
    whole, index = batch(size), torch.tensor(wanted, dtype=torch.long)
    part = select(whole, index, size)
    assert torch.equal(part["pair"].y, whole["pair"].y[index])
    assert torch.equal(part["list"][1][0], whole["list"][1][0][index])
    assert torch.equal(part["mask"], whole["mask"])
    assert part["scalar"] == 2


def test_splitting_and_rebuilding_is_the_identity():
    whole = batch()
    taken, rebuild = split(whole, 4)
    assert [len(t) for t in taken] == [4, 4, 4, 4]
    for ours, theirs in zip(tensors_of(rebuild(taken)), tensors_of(whole), strict=True):
        assert torch.equal(ours, theirs)
    one = rebuild([t[:1] for t in taken])
    assert one["pair"].y.shape == (1, 2)
    assert one["mask"].shape == (7, 7)
    assert one["text"] == "unchanged"


def test_double_casts_floating_tensors_only():
    found = to_double(batch())
    assert found["pair"].y.dtype == found["scalar"].dtype == torch.float64
    assert found["pair"].x.dtype == torch.int64
    assert found["list"][1][0].dtype == torch.bool


def test_moving_to_the_same_device_copies_nothing():
    whole = batch()
    assert to_device(whole, torch.device("cpu"))["pair"].y is whole["pair"].y
    assert to_device(whole, torch.device("meta"))["pair"].y.device.type == "meta"
