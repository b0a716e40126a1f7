"""Answers of a run against the whole matrix of influences, and what may answer at all."""

import numpy as np
import pytest
import torch

import eigentrace as et
import eigentrace.runs.explain as explaining
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.runs.explain import EXACT, KEPT, RESCORED, STORED
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.runs import Points, data, fit, model, task

QUERIES = [3, 17, 0]


def truth(fitted, normalize=None):
    """All influences on the queries, in nats where they have that unit."""
    asked = et.Data([Points()[row] for row in QUERIES])
    unit = "nats" if fitted.has_curvature and normalize is None else None
    return fitted.influence(data(), asked, normalize=normalize, unit=unit).numpy()


def best(scores, k, banned=None):
    """Rows of the k highest and the k lowest of each query, without those that are banned."""
    found = []
    for sign in (-1, 1):
        sorted_ = np.where(banned, np.inf, sign * scores) if banned is not None else sign * scores
        found.append(np.argsort(sorted_, axis=1, kind="stable")[:, :k])
    return found


def check(explanation, scores, k, banned=None, rtol=2e-4):
    high, low = best(scores, k, banned)
    for side, rows in ((explanation.proponents, high), (explanation.opponents, low)):
        expected = np.take_along_axis(scores, rows, axis=1)
        assert np.allclose(side.scores, expected, rtol=rtol, atol=rtol * np.abs(scores).max())
        assert np.allclose(np.take_along_axis(scores, side.rows, axis=1), expected, rtol=rtol, atol=1e-6)


def own_rows():
    banned = np.zeros((3, 60), dtype=bool)
    banned[range(3), QUERIES] = True
    return banned


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.fixture(scope="module")
def run(fitted, tmp_path_factory):
    return et.score(fitted, data(), tmp_path_factory.mktemp("runs") / "x", shard_rows=20)


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    fitted = fit(method=et.Arnoldi(steps=20, keep=6, tail=None))
    return fitted, et.score(fitted, data(), tmp_path_factory.mktemp("runs") / "x", shard_rows=20)


def test_features_that_hold_everything_answer_exactly(truncated):
    fitted, run = truncated
    found = et.open_run(run.path).explain(QUERIES, k=5)
    assert (found.how, found.unit) == (EXACT, "nats")
    check(found, truth(fitted), 5, own_rows())


def test_new_examples_are_answered_like_rows(truncated):
    fitted, run = truncated
    asked = et.Data([Points()[row] for row in QUERIES])
    found = run.explain(asked, k=5, exclude=None)
    check(found, truth(fitted), 5)
    check(run.explain(asked, k=5, exclude="duplicates"), truth(fitted), 5, own_rows())
    everything = tuple(next(data(batch_size=60).batches()).values)
    scores = fitted.influence(data(), data(), unit="nats").numpy()
    check(run.explain(everything, k=3, exclude="duplicates"), scores, 3, np.eye(60, dtype=bool))


def test_a_shortlist_is_scored_again_where_the_model_is_at_hand(run, fitted):
    found = run.explain(QUERIES, k=5, shortlist=120)
    assert found.how == EXACT
    check(found, truth(fitted), 5, own_rows())
    few = run.explain(QUERIES, k=2, shortlist=10)
    scores = truth(fitted)
    assert np.allclose(few.proponents.scores, np.take_along_axis(scores, few.proponents.rows, axis=1), rtol=1e-4)


def test_only_an_answer_that_overlooks_nobody_is_called_exact(run, fitted, monkeypatch):
    for count in (60, 61, None):
        whole = run.explain(QUERIES, k=2, shortlist=count)
        assert (whole.how, whole.shortlist, whole.told) == (EXACT, None, EXACT)
    some = run.explain(QUERIES, k=2, shortlist=11)
    assert (some.how, some.shortlist) == (RESCORED, 12)
    expect_mentions(some.told, [12])
    assert some.told in str(some).splitlines()[0]
    expect_mentions(str(some).splitlines()[0], ["nats"])
    assert run.explain(QUERIES, k=7, shortlist=2).shortlist == 14
    monkeypatch.setattr(explaining, "_SHORTLIST", 22)
    assert run.explain(QUERIES, k=1).shortlist == 22
    assert run.explain(QUERIES, k=2).how == EXACT  # forty candidates, and no more than twice as many rows
    labels = run.column("label")
    few = run.explain(QUERIES, k=2, same_label=True, shortlist=int(np.bincount(labels).max()))
    assert (few.how, few.shortlist) == (EXACT, None)
    check(few, truth(fitted), 2, own_rows() | (labels != labels[QUERIES][:, None]))


def test_without_the_model_the_answer_says_what_it_lacks(run, fitted, tmp_path):
    kept = et.open_run(run.path).explain(QUERIES, k=5)
    assert kept.how == KEPT
    stored = fitted.stored(data(), coordinates=40)
    held = et.score(stored, data(), tmp_path / "x")
    found = et.open_run(held.path).explain(QUERIES, k=5)
    assert found.how == STORED
    check(found, truth(stored), 5, own_rows())
    check(held.explain(QUERIES, k=5, shortlist=120), truth(stored.unstored()), 5, own_rows())


@pytest.mark.parametrize("normalize", ["gradient", "metric"])
def test_normalised_scores(normalize, truncated, run, fitted):
    check(
        et.open_run(truncated[1].path).explain(QUERIES, 5, normalize="gradient"),
        truth(truncated[0], "gradient"),
        5,
        own_rows(),
    )
    found = run.explain(QUERIES, k=5, normalize=normalize, shortlist=120)
    assert found.unit == {"metric": "cosine", "gradient": None}[normalize]  # a product over lengths may exceed 1
    check(found, truth(fitted, normalize), 5, own_rows())


def test_order_and_repetition_of_queries(run):
    several = run.explain([17, 3, 17], k=4)
    for place, row in enumerate([17, 3, 17]):
        alone = run.explain(row, k=4)
        assert np.array_equal(several.proponents.rows[place], alone.proponents.rows[0])
        assert np.allclose(several.opponents.scores[place], alone.opponents.scores[0], rtol=1e-5)


def test_only_some_labels(run, truncated):
    labels = run.column("label")
    for opened in (run, et.open_run(run.path)):
        found = opened.explain(QUERIES, k=4, same_label=True)
        assert (labels[found.proponents.rows] == labels[QUERIES][:, None]).all()
        assert np.array_equal(found.opponents.labels, labels[found.opponents.rows])
    with torch.no_grad():
        logits = run.fitted.task.model(torch.stack([Points()[row][0] for row in QUERIES]))
    allowed = logits.topk(2, dim=1).indices.numpy()
    found = run.explain(QUERIES, k=4, top_labels=2)
    assert all(set(found.proponents.labels[q]) <= set(allowed[q]) for q in range(3))
    with refused(InputError, "top_labels", "eigentrace.open_run(path, task, data)"):
        et.open_run(run.path).explain(QUERIES, top_labels=2)
    with refused(InputError, "same_label", "top_labels"):
        run.explain(QUERIES, same_label=True, top_labels=2)


class Twins(Points):
    """Rows 40 to 59 are copies of rows 0 to 19."""

    def __getitem__(self, row):
        return super().__getitem__(row - 40 if row >= 40 else row)


def test_copies_of_the_query_can_be_left_out(tmp_path):
    twins = et.Data(Twins(), batch_size=8)
    run = et.score(et.Arnoldi(steps=20, keep=6, tail=None).fit(task(), twins), twins, tmp_path / "x")
    left_out = {"self": {3}, "duplicates": {3, 43}, None: set()}
    for exclude, expected in left_out.items():
        assert set(range(60)) - set(run.explain(3, k=60, exclude=exclude).proponents.rows[0]) - {-1} == expected
    close = run.explain(3, k=60, exclude=None).proponents
    assert np.diff(close.scores[0][np.isin(close.rows[0], [3, 43])]) == pytest.approx(0, abs=1e-6)
    fresh = run.explain(et.Data([Points()[3]]), k=60, exclude="duplicates")
    assert set(range(60)) - set(fresh.proponents.rows[0]) == {3, 43}


def test_fewer_than_asked_for(run):
    found = run.explain(QUERIES, k=60, same_label=True)
    count = np.bincount(run.column("label"))[run.column("label")[QUERIES]] - 1
    assert ((found.proponents.rows >= 0).sum(axis=1) == count).all()
    assert found.table().num_rows == 2 * count.sum()


def test_methods_without_features_need_the_model(tmp_path):
    fitted = fit(method=et.TracIn())
    run = et.score(fitted, data(), tmp_path / "x")
    found = run.explain(QUERIES, k=5)
    assert (found.how, found.unit) == (EXACT, None)
    check(found, truth(fitted), 5, own_rows())
    with refused(UnsupportedError, "TracIn", "eigentrace.open_run(path, task, data)"):
        et.open_run(run.path).explain(QUERIES)


def test_an_ensemble_answers_as_one(tmp_path):
    fitted = et.Ensemble([fit(seed=1), fit(seed=2)])
    run = et.score(fitted, data(), tmp_path / "x")
    check(run.explain(QUERIES, k=5, shortlist=120), truth(fitted), 5, own_rows())


def test_answers_as_a_table_and_as_text(tmp_path, fitted):
    names = [f"n{row}" for row in range(60)]
    run = et.score(fitted, data(ids=names), tmp_path / "x")
    found = run.explain(QUERIES, k=2)
    table = found.table()
    assert table.column_names == ["query", "side", "rank", "row", "id", "score", "label", "prediction"]
    assert table.num_rows == 12
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["query"], first["side"], first["rank"]) == (0, "proponent", 1)
    assert first["id"] == names[first["row"]]
    assert first["id"] in str(found)


BAD = {
    "a row that is not there": ([60], {}, ("Row 60", 0, 59)),
    "a wrong normalisation": ([3], {"normalize": "cosine"}, ("normalize", "'gradient'", "'metric'", "'cosine'")),
    "a wrong exclusion": ([3], {"exclude": "me"}, ("exclude", "'self'", "'duplicates'", "'me'")),
    "no answers": ([3], {"k": 0}, ("k", 1, 0)),
    "new examples": (et.Data([Points()[3]]), {}, ("queries", "eigentrace.open_run(path, task, data)")),
    "scores without a model": ([3], {"rescore": True}, ("rescore=True", "eigentrace.open_run(path, task, data)")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_questions(name, run):
    queries, options, mentions = BAD[name]
    with refused(InputError, *mentions):
        et.open_run(run.path).explain(queries, **options)


class Lone(Points):
    """Row 3 is the only one of its class."""

    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x, 2 if row == 3 else y % 2


def test_nobody_left_to_answer(tmp_path):
    given = et.Data(Lone(), batch_size=8, ids=np.arange(60))
    run = et.score(et.Arnoldi(steps=20, keep=6).fit(task(), given), given, tmp_path / "x")
    for opened in (run, et.open_run(run.path)):
        found = opened.explain([3, 4], k=2, same_label=True).proponents
        assert found.rows[0].tolist() == [-1, -1]
        assert (found.rows[1] >= 0).all()
        assert np.isnan(found.scores[0]).all()
        assert (found.ids[0].tolist(), found.labels[0].tolist()) == ([None, None], [-1, -1])
    alone = et.score(et.RandProj(keep=1).fit(task(), data(1)), data(1), tmp_path / "y")
    assert alone.explain(0, k=3).opponents.rows.tolist() == [[-1]]


def test_many_queries_are_rescored_a_few_at_a_time(run, fitted, monkeypatch):
    asked = [7, 59, 7, 0, 31, 12]
    together = run.explain(asked, k=4)
    monkeypatch.setattr(explaining, "_TOGETHER", 2)
    apart = run.explain(asked, k=4)
    assert np.array_equal(together.proponents.rows, apart.proponents.rows)
    assert np.allclose(together.opponents.scores, apart.opponents.scores, rtol=1e-5)
    new = run.explain(et.Data([Points()[row] for row in asked]), k=4, exclude="duplicates")
    assert np.array_equal(new.proponents.rows, apart.proponents.rows)


@pytest.mark.parametrize("scores", [3 * 7, 1])
def test_methods_without_features_go_through_the_data_in_stretches(scores, tmp_path, monkeypatch):
    fitted = fit(method=et.TracIn())
    run = et.score(fitted, data(), tmp_path / "x")
    monkeypatch.setattr(explaining, "_SCORES", scores)
    found = run.explain(QUERIES, k=5)
    check(found, truth(fitted), 5, own_rows())
    for side in (found.proponents, found.opponents):
        assert all(len(set(rows)) == 5 for rows in side.rows.tolist())


def test_members_of_an_ensemble_are_normalised_by_themselves(tmp_path):
    fitted = et.Ensemble([fit(seed=seed, method=et.Arnoldi(steps=20, keep=6, tail=None)) for seed in (1, 2)])
    run = et.score(fitted, data(), tmp_path / "x")
    found = run.explain(QUERIES, k=5, normalize="gradient", shortlist=120)
    assert found.how == EXACT
    check(found, truth(fitted, "gradient"), 5, own_rows())
    with refused(UnsupportedError, "normalize='gradient'", "eigentrace.open_run(path, task, data)"):
        et.open_run(run.path).explain(QUERIES, normalize="gradient")


class Weighed(Points):
    """Every other example counts nothing, so that it has no gradient."""

    def __getitem__(self, row):
        return (*super().__getitem__(row), float(row % 2))


def test_examples_without_a_gradient_score_nothing(tmp_path):
    def loss(net, batch):
        return torch.nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none") * batch[2]

    given = et.Data(Weighed(), batch_size=8)
    fitted = et.Arnoldi(steps=20, keep=6, tail=None).fit(et.Task(model(), loss=loss), given)
    run = et.score(fitted, given, tmp_path / "x")
    expected = np.sort(fitted.influence(given, given.take([3]), normalize="gradient").numpy())[:, ::-1]
    found = et.open_run(run.path).explain(3, k=60, normalize="gradient", exclude=None).proponents
    assert np.allclose(found.scores, expected, atol=1e-5)


def test_rows_in_any_form(run):
    expected = run.explain([3, 17], k=2).proponents.rows
    for rows in (np.array([3, 17]), torch.tensor([3, 17]), (3, 17), range(3, 18, 14)):
        assert np.array_equal(run.explain(rows, k=2).proponents.rows, expected)
