"""Search in pieces is a stable sort of all scores, whatever the pieces, the ties, the restrictions and the type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eigentrace.errors import InputError, NumericalError
from eigentrace.numeric import top_k as room
from eigentrace.numeric.top_k import search, shortlist_rows
from tests.helpers.expecting import refused


def chunked(features, size, first=0):
    for start in range(0, len(features), size):
        yield first + start, features[start : start + size]


def ranked_by_sorting(scores, k, there=None):
    """Rows and scores of a stable sort of everything, on both sides."""
    sides = []
    for sign in (-1, 1):
        rows, values = [], []
        for query, line in enumerate(scores.tolist()):
            open_to = [
                j for j, score in enumerate(line) if abs(score) < torch.inf and (there is None or there[query, j])
            ]
            best = sorted(open_to, key=lambda j: sign * line[j])[:k]
            rows.append(best + [-1] * (k - len(best)))
            values.append([line[j] for j in best] + [torch.nan] * (k - len(best)))
        sides += [torch.tensor(rows), torch.tensor(values, dtype=scores.dtype)]
    return sides


def parts(found):
    return [found.proponents, found.proponent_scores, found.opponents, found.opponent_scores]


def assert_is(found, expected, **tolerance):
    for ours, theirs in zip(parts(found), expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours), equal_nan=True, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Blocks of 32 rows in groups of four, so that a few rows go through everything."""
    monkeypatch.setattr(room, "_SCORES", 1)
    monkeypatch.setattr(room, "_LEAST_ROWS", 32)
    monkeypatch.setattr(room, "_GROUP", 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_a_stable_sort_of_everything(data):
    """Small whole numbers: ties everywhere, and products are exact in any order."""
    seed, num, size, k, num_queries = (
        data.draw(st.integers(low, high)) for low, high in ((0, 10**6), (0, 90), (1, 40), (1, 12), (1, 4))
    )
    generator = torch.Generator().manual_seed(seed)
    features, asked = (torch.randint(-2, 3, (n, 3), generator=generator).float() for n in (num, num_queries))
    there = torch.rand(num_queries, num, generator=generator) < data.draw(st.sampled_from([0.05, 0.6, 1.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_SCORES", 1)
        patch.setattr(room, "_LEAST_ROWS", data.draw(st.sampled_from([4, 16, 64])))
        patch.setattr(room, "_GROUP", 4)
        found = search(chunked(features, size), asked, k, allowed=lambda first, n: there[:, first : first + n])
    assert_is(found, ranked_by_sorting(asked @ features.T, k, there))


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_large_pieces_in_any_order(order):
    """Rising scores make every piece better than all before it, on one side."""
    features = torch.randn(50_000, 5, generator=torch.Generator().manual_seed(1))
    asked = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
    asked[1] = -asked[0]
    if order != "mixed":
        features = features[(asked[0] @ features.T).argsort(descending=order == "falling")]
    found = search(chunked(features, 7_000), asked, 30)
    scores = asked @ features.T
    high, low = scores.topk(30), scores.topk(30, largest=False)
    expected = [high.indices, high.values, low.indices, low.values]
    assert_is(found, expected, rtol=1e-5, atol=1e-6)


def test_the_answer_does_not_depend_on_the_cuts(in_small_pieces):
    """A product of one vector has other last bits at the edge of a matrix: chunks must not decide where that is."""
    generator = torch.Generator().manual_seed(3)
    features, asked = torch.randn(301, 33, generator=generator), torch.randn(1, 33, generator=generator)
    whole = search([(0, features)], asked, 301)
    for size in (1, 3, 32, 45, 300):
        assert_is(search(chunked(features, size), asked, 301), parts(whole))


def test_equal_scores_come_in_the_order_of_rows():
    for features in (torch.zeros(20_000, 2), torch.ones(20_000, 2)):
        found = search(chunked(features, 1_234), torch.ones(2, 2), 100)
        assert found.proponents.tolist() == found.opponents.tolist() == [list(range(100))] * 2


def test_rows_may_begin_anywhere_and_be_left_out(in_small_pieces):
    features = torch.tensor([1.0, 5.0, 3.0, -2.0, 4.0])[:, None]
    far = 32 * 10**9 + 27
    found = search([(far, features[:2]), (far + 3, features[2:])], torch.ones(1, 1), 5)
    assert found.proponents.tolist() == [[far + 1, far + 5, far + 3, far, far + 4]]
    assert found.opponents.tolist() == [[far + 4, far, far + 3, far + 5, far + 1]]


def test_fewer_than_k(in_small_pieces):
    """Queries of a class with one other member, without any, and with all: rows -1 and NaN fill up."""
    labels, own = torch.tensor([0, 1, 0, 2] + [2] * 20), torch.tensor([0, 1, 3])
    features = torch.arange(24.0)[:, None]

    def same_class_but_not_itself(first, n):
        rows = torch.arange(first, first + n)
        return (labels[own][:, None] == labels[rows]) & (own[:, None] != rows)

    found = search(chunked(features, 5), torch.ones(3, 1), 3, allowed=same_class_but_not_itself)
    assert found.proponents.tolist() == [[2, -1, -1], [-1, -1, -1], [23, 22, 21]]
    assert found.opponents.tolist() == [[2, -1, -1], [-1, -1, -1], [4, 5, 6]]
    assert found.proponent_scores.isnan().tolist() == [[False, True, True], [True] * 3, [False] * 3]
    assert found.opponent_scores.isnan().tolist() == found.proponent_scores.isnan().tolist()
    for chunks in ([], [(0, features[:0])]):
        assert search(chunks, torch.ones(2, 1), 2).proponents.tolist() == [[-1, -1]] * 2
    assert search([(0, features)], torch.ones(0, 1), 2).proponents.shape == (0, 2)


def test_one_restriction_for_all_queries_or_none(in_small_pieces):
    features = torch.arange(100.0)[:, None]

    def even_in_the_first_blocks(first, n):
        return torch.arange(first, first + n) % 2 == 0 if first < 64 else None

    found = search([(0, features)], torch.tensor([[1.0], [-1.0]]), 50, allowed=even_in_the_first_blocks)
    left = [*range(0, 64, 2), *range(64, 100)]
    assert found.opponents.tolist() == [left[:50], left[::-1][:50]]


def test_a_scale_divides_each_examples_scores(in_small_pieces):
    generator = torch.Generator().manual_seed(4)
    features, asked = (torch.randn(n, 6, generator=generator).double() for n in (50, 3))
    norms = features.norm(dim=1)
    norms[7] = 0.0  # a score divided by nothing is no score
    found = search(chunked(features, 9), asked, 50, scale=lambda first, n: norms[first : first + n])
    assert_is(found, ranked_by_sorting(asked @ features.T / norms, 50), rtol=1e-12, atol=1e-12)
    assert found.proponents[:, -1].tolist() == [-1] * 3


@pytest.mark.parametrize("num", [20, 400, 20_000])
def test_nan_and_infinity_are_never_found_nor_hide_their_neighbours(num, in_small_pieces):
    features = torch.arange(float(num))[:, None].repeat(1, 2)
    features[3], features[-3], features[-5, 0] = torch.nan, torch.inf, -torch.inf
    features[5] = torch.tensor([torch.nan, -1.0])
    found = search(chunked(features, 999), torch.ones(1, 2), 4)
    assert found.proponents.tolist() == [[num - 1, num - 2, num - 4, num - 6]]
    assert found.opponents.tolist() == [[0, 1, 2, 4]]
    nothing = search(chunked(features, 999), torch.full((1, 2), torch.nan), 2)
    assert nothing.opponents.tolist() == [[-1, -1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_features_are_multiplied_in_float32(dtype):
    generator = torch.Generator().manual_seed(5)
    features = (300 * torch.randn(3_000, 16, generator=generator)).to(dtype)
    asked = 1e4 * torch.randn(3, 16, generator=generator)
    found = search(chunked(features, 1_000), asked, 10)
    assert found.proponent_scores.dtype == torch.float32
    assert_is(found, parts(search([(0, features.float())], asked, 10)))
    assert search([(0, features)], asked.to(dtype), 10).opponent_scores.dtype == torch.float32
    assert search([(0, features)], asked.double(), 10).opponent_scores.dtype == torch.float64


def test_only_proponents():
    features = torch.arange(9.0)[:, None]
    found = search([(0, features)], torch.ones(2, 1), 2, both=False)
    assert found.proponents.tolist() == [[8, 7]] * 2
    assert found.opponents.tolist() == [[-1, -1]] * 2
    assert found.opponent_scores.isnan().all()


def test_chunks_may_lie_in_memory_that_is_used_again(in_small_pieces):
    features, memory = torch.randn(101, 4), torch.empty(13, 4)

    def read():
        for first, chunk in chunked(features, 13):
            memory[: len(chunk)] = chunk
            yield first, memory[: len(chunk)]
            memory.fill_(torch.nan)

    asked = torch.randn(2, 4)
    assert_is(search(read(), asked, 20), parts(search([(0, features)], asked, 20)))


@pytest.mark.parametrize("rising", [True, False])
def test_what_waits_does_not_grow_with_the_rows(monkeypatch, rising):
    """Every row is as good as the one before it or better: all would wait if none were put in their places."""
    most = 0
    merge = room._Best._merge

    def watched(self):
        nonlocal most
        most = max(most, sum(len(rows) for _, rows, _ in self.waiting))
        merge(self)

    monkeypatch.setattr(room._Best, "_merge", watched)
    features = torch.arange(100_000.0)[:, None] * rising
    found = search(chunked(features, 10_000), torch.ones(200, 1), 10, both=False)
    assert found.proponents[7].tolist() == list(range(99_999, 99_989, -1) if rising else range(10))
    assert 2_000 <= most <= 4_000  # k·Q wait before they are put in order, and at most that many more come at once


@pytest.mark.parametrize("width", [16, 256, 2048])
def test_features_are_multiplied_32_mib_at_a_time_however_wide(width):
    features, sizes = torch.randn(20_000, width), []

    def scale(first, count):
        sizes.append(count * width * features.element_size())
        return torch.ones(count)

    # In one chunk, as one thread of a reader may have it, and in small ones, which are joined.
    for step in (20_000, 300):
        chunks = ((start, features[start : start + step]) for start in range(0, 20_000, step))
        search(chunks, torch.randn(1, width), 3, scale=scale)
    assert max(sizes) <= 2**25
    assert sum(sizes) == 2 * features.nbytes


def test_gradients_are_not_followed():
    features, asked = torch.randn(5, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    assert not search([(0, features)], asked, 1).proponent_scores.requires_grad


def test_what_cannot_be_searched_is_refused():
    features, asked = torch.randn(6, 2), torch.randn(3, 2)
    with refused(InputError, "k", 1, 0):
        search([(0, features)], asked, 0)
    with refused(InputError, "(Q, K)", "torch.float32", "(2,)"):
        search([(0, features)], asked[0], 1)
    with refused(InputError, "2 features", "torch.float32", "(6, 1)"):
        search([(0, features[:, :1])], asked, 1)
    with refused(InputError, "torch.int64", "(6, 2)"):
        search([(0, features.long())], asked, 1)
    with refused(InputError, "row 5", "row 6"):
        search([(0, features), (5, features)], asked, 1)
    with refused(InputError, "`scale`", "6 rows", "(3,)"):
        search([(0, features)], asked, 1, scale=lambda first, n: torch.ones(3))
    with refused(InputError, "`allowed`", "(3, 6)", "torch.float32", "(6,)"):
        search([(0, features)], asked, 1, allowed=lambda first, n: torch.ones(n))
    with refused(NumericalError, 2, 6, "NaN"):
        shortlist_rows(torch.full((6, 2), torch.nan), asked, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_it_finds_the_same():
    generator = torch.Generator().manual_seed(6)
    features = torch.randint(-8, 9, (300_000, 16), generator=generator).half()
    asked = torch.randint(-8, 9, (50, 16), generator=generator).float()
    there = torch.rand(300_000, generator=generator) < 0.5
    options = {"k": 100, "allowed": lambda first, n: there[first : first + n]}
    here = search(chunked(features, 65_536), asked, **options)
    found = search(chunked(features, 65_536), asked, device="cuda", **options)
    assert found.proponents.device.type == "cpu"
    assert_is(found, parts(here))
    resident = search(chunked(features.cuda(), 65_536), asked.cuda(), **options)
    assert resident.proponents.is_cuda
    assert_is(resident, parts(here))
