"""The flat vector and its views: each the other's inverse, with or without leading dimensions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eigentrace.task.layout import Layout

SHAPES = {"matrix": (2, 3), "scalar": (), "empty": (0, 4), "vector": (5,), "kernel": (2, 1, 2, 2)}


def tensors(dtype=torch.float32):
    return {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}


def test_layout_counts():
    layout = Layout.of(tensors())
    assert layout.names == tuple(SHAPES)
    assert layout.sizes == [6, 1, 0, 5, 8]
    assert layout.numel == 20
    assert layout.device == torch.device("cpu")


def test_flat_vector_is_the_parameters_in_order():
    values = tensors()
    flat = Layout.of(values).flatten(values)
    assert torch.equal(flat, torch.cat([t.flatten() for t in values.values()]))


@given(st.lists(st.integers(1, 3), max_size=2))
@settings(max_examples=10)
def test_unflatten_inverts_flatten_under_leading_dimensions(leading):
    layout = Layout.of(tensors())
    flat = torch.randn(*leading, layout.numel)
    views = layout.unflatten(flat)
    assert all(views[name].shape == (*leading, *shape) for name, shape in SHAPES.items())
    assert torch.equal(layout.flatten(views, batch_dims=len(leading)), flat)


def test_order_of_the_mapping_does_not_matter():
    values = tensors()
    layout = Layout.of(values)
    assert torch.equal(layout.flatten(dict(reversed(values.items()))), layout.flatten(values))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float32, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.bfloat16, torch.bfloat16], torch.float32),  # sums never run in half precision
        ([torch.bfloat16, torch.float64], torch.float64),
    ],
)
def test_type_of_the_vector_and_of_its_views(dtypes, expected):
    values = {str(i): torch.ones(2, dtype=dtype) for i, dtype in enumerate(dtypes)}
    layout = Layout.of(values)
    flat = layout.flatten(values)
    assert layout.dtype == flat.dtype == expected
    assert [t.dtype for t in layout.unflatten(flat).values()] == dtypes
