"""Every address of the page gives what the run says, on points, images and texts."""

import base64
import io
import json

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import eigentrace as et
from eigentrace.errors import MismatchError
from eigentrace.rendering import Custom, Texts
from eigentrace.runs.explain import KEPT
from tests.helpers.expecting import expect_mentions, missing, refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.pages import HOSTILE
from tests.helpers.runs import data, fit
from tests.helpers.serving import HEADERS, client

NUMBERS = ("loss", "gradient_norm", "self_influence", "confidence")


def get(asked, path, **query):
    answer = asked.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows_of(asked, **query):
    return [row["row"] for row in get(asked, "/api/examples", **query)["rows"]]


@pytest.fixture(scope="module")
def asked(scored):
    return client(scored, show=Texts([f"text number {row}" for row in range(60)]))


def test_the_overview_describes_the_run(asked, scored):
    found, run = get(asked, "/api/overview"), et.open_run(scored)
    own = run.column("self_influence")
    assert (found["rows"], found["missing"], found["num_train"], found["unit"]) == (60, 0, 60, "nats")
    assert found["model"]["coverage"] == run.manifest["coverage"]
    assert found["model"]["delta"] == pytest.approx(abs(found["spectrum"][-1]))
    assert len(found["spectrum"]) == found["model"]["features"] == 6
    assert np.all(np.diff(np.abs(found["spectrum"])) <= 0)
    assert sum(found["histogram"]["counts"]) == 60
    assert found["histogram"]["edges"][-1] == pytest.approx(own.max())
    assert sorted(point[0] for point in found["scatter"]) == list(range(60))
    disagree = run.column("label") != run.column("prediction")
    assert [point[4] for point in found["scatter"]] == disagree.astype(int).tolist()
    for group in found["by_class"]:
        here = run.column("label") == group["label"]
        assert group["count"] == here.sum()
        assert group["mean_self_influence"] == pytest.approx(own[here].mean(), rel=1e-5)
        assert group["disagree"] == pytest.approx(disagree[here].mean())
    assert found["group_columns"] == ["source"]
    kinds = {column["name"]: (column["kind"], column["values"]) for column in found["columns"]}
    assert kinds["source"] == ("text", ["books", "web"])
    assert kinds["label"] == ("label", [0, 1, 2])
    assert kinds["length"] == ("number", None)
    named = {column["name"]: (column["label"], column["scored"]) for column in found["columns"]}
    assert named["gradient_norm"] == ("gradient norm", True)
    assert named["length"] == ("length", False)
    meanings = {column["name"]: column["meaning"] for column in found["columns"]}
    assert meanings["length"] is None
    declared = run.manifest["declared"]
    assert list(declared) == run.manifest["columns"]
    assert {name: about["meaning"] for name, about in declared.items()}.items() <= meanings.items()


def test_the_overview_shows_how_reliable_the_fit_is(asked, tmp_path):
    assert get(asked, "/api/overview")["model"]["reliability"] is None
    fitted = fit(method=et.Arnoldi(steps=20, keep=6, reliability=True))
    found = get(client(et.score(fitted, data(), tmp_path / "run").path), "/api/overview")
    assert found["model"]["reliability"] == pytest.approx(fitted.reliability.self_influence)


def test_a_run_whose_method_has_no_directions(tmp_path):
    run = et.score(fit(method=et.Loss()), data(), tmp_path / "run")
    asked = client(run.path)
    found = get(asked, "/api/overview")
    assert (found["model"]["method"], found["model"]["features"], found["spectrum"]) == ("Loss", 0, [])
    assert "gradient_norm" not in [column["name"] for column in found["columns"]]
    row = get(asked, "/api/examples/3")
    assert row["gradient_norm"] is None
    assert row["self_influence"] == pytest.approx(run.column("self_influence")[3])
    answer = asked.get("/api/explain/3")
    assert answer.status_code == 409
    expect_mentions(answer.json()["error"], ["Loss", "pairs"])


@pytest.mark.parametrize("sort", [*NUMBERS, "length", "row"])
@pytest.mark.parametrize("order", ["desc", "asc"])
def test_sorting(asked, scored, sort, order):
    values = np.arange(60) if sort in ("length", "row") else et.open_run(scored).column(sort)
    expected = np.argsort(values if order == "asc" else -values, kind="stable")
    assert rows_of(asked, sort=sort, order=order, limit=200) == expected.tolist()
    assert rows_of(asked, sort=sort, order=order, offset=50, limit=7) == expected[50:57].tolist()


def test_filters_alone_and_together(asked, scored):
    run = et.open_run(scored)
    label, prediction, own, loss = (run.column(n) for n in ("label", "prediction", "self_influence", "loss"))
    by_rank = np.argsort(own, kind="stable")
    top = np.zeros(60, dtype=bool)
    top[by_rank[54:]] = True
    source = np.array(["web", "books", ""] * 20)
    cases = [
        ({"label": 1}, label == 1),
        ({"prediction": 2}, prediction == 2),
        ({"disagree": 1}, label != prediction),
        ({"group": "source:web"}, source == "web"),
        ({"group": "source:"}, source == ""),
        ({"group": "label:2"}, label == 2),
        ({"low": 0.9}, top),
        ({"high": 0.9}, ~top),
        ({"above": 20}, own > 20),
        ({"sort": "loss", "below": 1.5}, loss < 1.5),
        ({"within": ["loss:1:2", "self_influence:0:30"]}, (loss >= 1) & (loss <= 2) & (own <= 30)),
        ({"search": "NUMBER 5"}, np.array([str(row).startswith("5") for row in range(60)])),
        ({"search": "point 59"}, np.arange(60) == 59),
        ({"label": 1, "disagree": 1, "group": "source:books"}, (label == 1) & (prediction != 1) & (source == "books")),
        ({"decision": "none"}, np.ones(60, dtype=bool)),
        ({"decision": "drop"}, np.zeros(60, dtype=bool)),
    ]  # fmt: skip
    for query, mask in cases:
        found = get(asked, "/api/examples", limit=200, **query)
        assert sorted(row["row"] for row in found["rows"]) == np.flatnonzero(mask).tolist(), query
        assert found["total"] == mask.sum()


def test_a_row_says_all_that_is_known(asked, scored):
    run = et.open_run(scored)
    found = get(asked, "/api/examples/7")
    assert (found["row"], found["id"]) == (7, "point 7")
    assert found["columns"] == {"source": "books", "length": 7}
    for name in (*NUMBERS, "label", "prediction"):
        assert found[name] == pytest.approx(run.column(name)[7], rel=1e-6), name
    own = run.column("self_influence")
    assert found["rank"] == 1 + (own > own[7]).sum()
    assert found["quantile"] == pytest.approx((own < own[7]).mean())
    assert found["content"] == {"kind": "text", "text": "text number 7"}
    assert (found["decision"], found["new_label"]) == (None, None)


def test_groups_and_histograms(asked, scored):
    run = et.open_run(scored)
    found = {group["value"]: group for group in get(asked, "/api/groups/source")["groups"]}
    expected = {group["group"]: group for group in run.groups("source").to_pylist()}
    assert found.keys() == expected.keys() == {"web", "books", None}
    for value, group in expected.items():
        for name in ("count", "sum_self_influence", "mean_self_influence", "mean_loss"):
            assert found[value][name] == pytest.approx(group[name], rel=1e-5), (value, name)
        assert found[value]["share_of_top"] == pytest.approx(group["top_share"])
    histogram = get(asked, "/api/histogram", column="length")
    assert (sum(histogram["counts"]), histogram["edges"][0], histogram["edges"][-1]) == (60, 0, 59)


@pytest.mark.parametrize("normalize", ["none", "gradient", "metric"])
def test_explaining_is_what_the_run_says(asked, scored, normalize):
    options = {"normalize": None if normalize == "none" else normalize, "same_label": True}
    expected = et.open_run(scored).explain(11, 5, **options)
    found = get(asked, "/api/explain/11", k=5, normalize=normalize, same_label=1)
    assert (found["how"], found["unit"], found["query"]["row"]) == (expected.how, expected.unit, 11)
    for name, side in (("proponents", expected.proponents), ("opponents", expected.opponents)):
        assert [row["row"] for row in found[name]] == side.rows[0].tolist()
        assert [row["score"] for row in found[name]] == pytest.approx(side.scores[0].tolist())
        assert {row["label"] for row in found[name]} == {found["query"]["label"]}


def test_fewer_answers_than_asked_for_are_no_rows(asked):
    found = get(asked, "/api/explain/0", k=100, same_label=1)
    assert 0 < len(found["proponents"]) < 60
    assert all(row["row"] >= 0 and row["score"] is not None for row in found["proponents"])


def test_deciding_and_exporting(points):
    asked = client(points)
    post = lambda path, body=None: asked.post(path, json=body, headers=HEADERS).json()  # noqa: E731
    run = et.open_run(points)
    own = run.column("self_influence")
    assert post("/api/decisions", {"rows": [1, 2, 3], "decision": "drop"})["changed"] == 3
    limit = float(np.sort(own)[-6])
    by_rule = post("/api/decisions", {"rule": {"by": "self_influence", "above": limit}, "decision": "drop"})
    dropped = {1, 2, 3, *np.flatnonzero(own > limit).tolist()}
    assert by_rule["counts"] == {"drop": len(dropped), "keep": 0, "relabel": 0}
    wrong = 5
    post("/api/decisions", {"rows": [wrong, 10], "decision": "relabel", "new_label": 2})
    post("/api/decisions", {"rows": [20], "decision": "keep"})
    post("/api/decisions", {"rows": [21], "decision": "drop"})
    assert post("/api/undo")["changed"] == 1
    dropped -= {wrong, 10, 20}
    assert sorted(rows_of(asked, decision="drop", limit=200)) == sorted(dropped)
    assert get(asked, "/api/examples/10")["new_label"] == 2
    assert [act["decision"] for act in get(asked, "/api/decisions")["log"]] == ["keep", "relabel", "drop", "drop"]

    parquet = asked.get("/api/export", params={"format": "parquet"})
    assert 'filename="decisions.parquet"' in parquet.headers["content-disposition"]
    table = pq.read_table(io.BytesIO(parquet.content))
    words = table["decision"].to_pylist()
    assert [row for row in range(60) if words[row] == "drop"] == sorted(dropped)
    assert [row for row in range(60) if words[row] == "relabel"] == sorted({wrong, 10})
    assert table["new_label"].to_pylist()[10] == 2
    reasons = table["reason"].to_pylist()
    expect_mentions(reasons[1], ["drop"])
    by_rule = [reason for reason in reasons if not missing(reason, ["self_influence", "above", f"{limit:.4g}"])]
    assert len(by_rule) >= 2
    assert table["id"].to_pylist()[4] == "point 4"
    (points / "out.parquet").write_bytes(parquet.content)
    read = et.Decisions.read(points / "out.parquet")
    assert read.mask.tolist() == [row in dropped for row in range(60)]
    assert read.new_labels.tolist() == [2 if row in (wrong, 10) else -1 for row in range(60)]
    as_csv = pyarrow.csv.read_csv(io.BytesIO(asked.get("/api/export?format=csv").content))
    assert as_csv["decision"].to_pylist() == words
    rows = asked.get("/api/export?format=rows").text.split()
    assert rows == [str(row) for row in range(60) if row not in dropped]


def test_relabelling_without_a_class_takes_the_prediction(points):
    asked, run = client(points), et.open_run(points)
    differs = run.column("label") != run.column("prediction")
    wrong, right = int(np.flatnonzero(differs)[0]), int(np.flatnonzero(~differs)[0])
    answer = asked.post("/api/decisions", json={"rows": [wrong], "decision": "relabel"}, headers=HEADERS)
    assert answer.json()["changed"] == 1
    assert get(asked, f"/api/examples/{wrong}")["new_label"] == run.column("prediction")[wrong]
    answer = asked.post("/api/decisions", json={"rows": [right], "decision": "relabel"}, headers=HEADERS)
    assert answer.status_code == 400
    expect_mentions(answer.json()["error"], [f"row {right}", "new_label"])


def test_images_are_shown_and_asked_about(digits):
    asked = client(digits)
    overview = get(asked, "/api/overview")
    assert (overview["kind"], overview["live"], len(overview["classes"])) == ("image", True, 10)
    wrong = get(asked, "/api/examples", group="corrupted:true", limit=200)["rows"]
    assert len(wrong) == 40
    assert all(row["columns"]["corrupted"] and row["label"] != row["columns"]["true_label"] for row in wrong)
    row = get(asked, "/api/examples", limit=1)["rows"][0]
    image = asked.get(row["content"]["src"])
    assert image.headers["content-type"] == "image/png"
    assert image.content.startswith(b"\x89PNG")
    # An image of the data, posted, is answered as its row is; only the row itself is among the answers.
    posted = {"image": base64.b64encode(image.content).decode(), "label": row["label"], "k": 5, "exact": True}
    answer = asked.post("/api/ask", json=posted, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["query"]["prediction"] == row["prediction"]
    assert found["query"]["loss"] == pytest.approx(row["loss"], rel=1e-3)
    assert found["query"]["content"]["src"].startswith("data:image/png;base64,")
    expected = get(asked, f"/api/explain/{row['row']}", k=5, exclude="none", exact=True)
    assert expected["how"] == found["how"] == "exact"
    assert expected["shortlist"] is None
    assert [r["row"] for r in found["proponents"]] == [r["row"] for r in expected["proponents"]]
    # Without being told so, no answer waits for the model.
    assert get(asked, f"/api/explain/{row['row']}", k=5)["how"] == KEPT
    quick = asked.post("/api/ask", json=posted | {"exact": False}, headers=HEADERS).json()
    assert (quick["how"], quick["query"]["prediction"]) == (KEPT, row["prediction"])
    assert asked.post("/api/ask", json=posted | {"exact": "yes"}, headers=HEADERS).status_code == 400


def test_pairs_are_shown_searched_and_asked_about(pairs):
    without = client(pairs)
    assert get(without, "/api/overview")["kind"] == "pair"
    assert get(without, "/api/overview")["live"] is False
    answer = without.post("/api/ask", json={"text": "the cat", "target": "a dog"}, headers=HEADERS)
    assert answer.status_code == 409
    expect_mentions(answer.json()["error"], ["eigentrace serve RUN --model"])
    first = get(without, "/api/examples/0")
    assert first["content"]["text"] == HOSTILE[0]
    assert first["id"] == "<i>0</i>"
    assert sorted(rows_of(without, search="<SCRIPT>")) == [0, 2]
    last = get(without, "/api/examples", search="begin the_cat", limit=1)["rows"][0]
    assert (len(last["content"]["text"]), last["content"]["more"]) == (2000, True)
    assert len(get(without, f"/api/examples/{last['row']}")["content"]["text"]) > 3000

    asked = client(pairs, with_model=True)
    text = get(asked, "/api/examples/20")["content"]
    answer = asked.post("/api/ask", json={"text": text["text"], "target": text["target"], "k": 3}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["query"]["loss"] == pytest.approx(get(asked, "/api/examples/20")["loss"], rel=1e-4)
    assert len(answer.json()["proponents"]) == 3


def test_a_renderer_that_fails_leaves_the_numbers(scored):
    def broken(row):
        raise RuntimeError("no such picture")

    asked = client(scored, show=Custom(broken, "text", 60))
    row = get(asked, "/api/examples", limit=1)["rows"][0]
    assert row["content"] == {"kind": "none", "error": "RuntimeError: no such picture"}
    assert row["loss"] > 0


def test_a_dataset_that_is_gone_leaves_the_numbers(scored, tmp_path, points):
    gone = {"model": str(tmp_path / "gone"), "dataset": str(tmp_path / "gone.csv"), "task": "causal-lm"}
    edit_manifest(points, lambda manifest: manifest.update(how={"input": gone | {"resolved": {}}}))
    asked = client(points)
    assert get(asked, "/api/examples", limit=1)["rows"][0]["content"] == {"kind": "none"}
    overview = get(asked, "/api/overview")
    assert overview["kind"] == "none"
    assert "gone.csv" in overview["note"]


def test_what_is_no_run_is_told(tmp_path):
    with refused(MismatchError, tmp_path, "manifest.json"):
        client(tmp_path)


def test_a_run_that_is_not_complete_shows_what_there_is(points):
    record = json.loads((points / "shards.json").read_text())
    record["shards"] = record["shards"][:-1]
    (points / "shards.json").write_text(json.dumps(record))
    (points / "table.parquet").unlink()
    asked = client(points)
    missing_rows = 60 - record["shards"][-1]["stop"]
    assert get(asked, "/api/overview")["missing"] == missing_rows > 0
    assert get(asked, "/api/examples/59")["loss"] is None
    assert rows_of(asked, order="asc", limit=200)[-1] == 59
    answer = asked.get("/api/explain/3")
    assert answer.status_code == 400
    expect_mentions(answer.json()["error"], [points, missing_rows, 60])
