"""Pictures by self-influence and their explanations: rows, shares, grids and the page."""

import io
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from eigentrace.errors import InputError
from experiments.images.image_exemplars import EXPERIMENT, FITS
from experiments.images.parts.exemplar_grid import explained_svg, ranked_svg
from experiments.images.parts.exemplar_numbers import answers, bands, deciles
from experiments.images.parts.exemplar_page import BANDS, FINDINGS, tables
from experiments.images.parts.exemplar_problems import PHOTOS, _digits, as_uri, pixels, read_photos
from experiments.images.parts.photos import Recipe, changed, make_network, train_photos
from experiments.shared.frame import main
from tests.helpers.drawings import pictures_on, words_on
from tests.helpers.expecting import refused

RECIPE = Recipe(width=4, epochs=2, batch_size=10, side=12)


def test_the_papers_fit_is_a_truncated_hessian_of_ten_projectors():
    paper = FITS["paper"]
    assert (paper.curvature, paper.tail, paper.keep, paper.sample) == ("hessian", None, 10, 512)
    assert (FITS["ours"].curvature, FITS["ours"].tail) == ("auto", "auto")


def test_deciles_are_shares_from_the_lowest_to_the_highest():
    values = np.array([3.0, 1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    assert deciles(values, values >= 8) == [0.0] * 8 + [1.0] * 2


def test_bands_hold_rows_of_their_quantiles_and_no_row_twice():
    values = np.random.default_rng(1).normal(size=400)
    found = bands(values, 6, seed=0)
    assert [len(rows) for rows in found.values()] == [6, 12, 6]
    for (low, high), rows in zip(((0.9, 1.0), (0.4, 0.6), (0.0, 0.1)), found.values(), strict=True):
        assert len({row for row, _ in rows}) == len(rows)
        for row, share in rows:
            assert (values < values[row]).sum() / 399 == pytest.approx(share)
            assert low - 1 / 399 <= share <= high + 1 / 399
    assert bands(values, 6, seed=0) == found
    assert bands(values, 6, seed=1) != found


def test_answers_leave_the_query_itself_out():
    side = SimpleNamespace
    found = side(
        proponents=side(rows=np.array([[0, 1, 2], [3, 1, -1]])), opponents=side(rows=np.array([[4, 5, 3], [4, 5, 0]]))
    )
    queries, labels = np.array([0, 5]), np.array([1, 1, 0, 2, 2, 2])
    norms = np.array([5.0, 1.0, 2.0, 3.0, 4.0, 0.0])
    cell = answers(found, queries, labels, norms, np.array([True, False]))
    assert cell["own_first"] == 1.0
    assert cell["proponents_same_label"] == pytest.approx(2 / 4)  # rows 1, 2 of query 0 and 3, 1 of query 5
    assert cell["proponents_norm"] == pytest.approx((1 + 2 + 3 + 1) / 4)
    assert cell["proponents_norm_quantile"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.2) / 4)
    assert cell["proponents_distinct"] == 3 / 4
    assert cell["opponents_same_label"] == pytest.approx(1 / 5)
    assert cell["candidates"] == 1


def test_pixels_undo_a_normalisation_exactly():
    raw = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    raw[0, :, 0, 0], raw[0, :, 0, 1] = 0, 255
    centred = (torch.from_numpy(raw).float() / 255 - 0.4) / torch.tensor([0.2, 0.3, 0.25])[:, None, None]
    assert (pixels(centred, 3) == raw[3].transpose(1, 2, 0)).all()


def test_training_on_photos_follows_from_the_seed():
    photos = torch.rand(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels, states = torch.arange(20) % 10, []
    for _ in range(2):
        model = make_network(RECIPE)
        train_photos(model, photos, labels, RECIPE)
        assert not model.training
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_changes_of_photos_crop_and_mirror_within_the_photo():
    photos = torch.arange(16.0).expand(6, 3, 16, 16).clone()
    recipe = Recipe(side=8, least_area=1.0)
    seen = changed(photos, recipe, torch.Generator().manual_seed(0))
    assert seen.shape == (6, 3, 8, 8)
    slopes = (seen[:, 0, 4, -1] - seen[:, 0, 4, 0]).sign()
    assert set(slopes.tolist()) == {-1.0, 1.0}


def test_photos_are_read_with_their_likely_errors(tmp_path):
    image = pytest.importorskip("PIL.Image")
    stored = []
    for number in range(4):
        file = io.BytesIO()
        image.new("L" if number == 3 else "RGB", (224, 224), number * 60).save(file, format="JPEG")
        stored.append(np.frombuffer(file.getvalue(), np.uint8))
    votes = np.array([[2, 1, 2, 0], [-1] * 4, [3, 1, 1, 0], [0, 5, 0, 0]], np.int8)
    offset, is_val = np.cumsum([0, *map(len, stored)]), np.array([False, True, False, False])
    arrays = {"jpeg": np.concatenate(stored), "offset": offset, "y": np.arange(4, dtype=np.uint8)}
    np.savez(tmp_path / PHOTOS, **arrays, is_val=is_val, mturk_votes=votes)
    found = read_photos(tmp_path)
    assert found.images.shape == (4, 3, 96, 96)
    assert found.is_bad.tolist() == [True, False, False, True]
    assert found.images[3].mean().item() == pytest.approx(180 / 127.5 - 1, abs=0.02)
    assert found.uri(0).startswith("data:image/jpeg;base64,")
    with refused(InputError, tmp_path / "elsewhere", "imagenette224_jpeg.npz"):
        read_photos(tmp_path / "elsewhere")


def test_digits_stand_for_photos():
    found = _digits()
    assert (int((~found.is_val).sum()), int(found.is_val.sum()), int(found.is_bad.sum())) == (250, 60, 20)
    assert not found.is_bad[found.is_val].any()


def ranked_cell(bad):
    uri = as_uri(np.zeros((2, 2, 3), np.uint8))
    rows = {"90–100%": [[7, 0.95, 1, bad]], "40–60%": [[5, 0.5, 0, False], [4, 0.45, 0, False]]}
    rows["0–10%"] = [[2, 0.05, 1, False]]
    return {"bands": rows, "pictures": {str(row): uri for row in (7, 5, 4, 2)}}


def test_sheets_hold_every_picture_and_frame_those_to_see():
    svg = ranked_svg("a < b", {"one": ranked_cell(True), "two": ranked_cell(False)}, "xy")
    assert pictures_on(svg) == 8
    assert svg.count("stroke: #d55e00") == 1
    assert {"one", "two", "90–100%", "y 95%"} <= set(words_on(svg))
    shown = {"query": [7, 1], "proponents": [[7, 1], [5, 0]], "opponents": [[2, 1]]}
    cell = {"shown": [shown], "pictures": ranked_cell(True)["pictures"]}
    svg = explained_svg("t", {"paper": cell}, ["cat & dog", "ship"])
    assert pictures_on(svg) == 4
    assert re.findall(r"stroke: (#[0d]\w{5})", svg) == ["#009e73", "#0072b2", "#d55e00"]
    assert "cat & dog" in words_on(svg)


@pytest.mark.slow
def test_the_small_run_finds_noise_and_draws_no_photo_unasked(tmp_path):
    assert main(EXPERIMENT, ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    (records,) = json.loads((tmp_path / "data" / "image_exemplars_small.json").read_text()).values()
    assert set(records) == {"cifar", "cifar_noisy", "cifar_resnet20", "photos"}
    assert records["photos"]["cells"]["ranked/loss"]["auc"] > 90
    assert records["photos"]["cells"]["ranked/paper"]["auc"] > 85
    assert records["cifar_noisy"]["cells"]["ranked/loss"]["auc"] > 80
    for record in records.values():
        plain, unit = (record["cells"][f"explained/paper/{way}"] for way in ("none", "gradient"))
        assert unit["proponents_norm_quantile"] < plain["proponents_norm_quantile"] - 0.15
        right = record["cells"]["ranked/ours"]["right_by_decile"]
        assert right[-1] < right[0] or record["facts"]["accuracy_given"] == 1.0
    drawn = sorted(path.name.split("_cpu")[0] for path in tmp_path.glob("figures/*.svg"))
    words = (
        "cifar_explained",
        "cifar_noisy_ranked",
        "cifar_ranked",
        "cifar_resnet20_explained",
        "cifar_resnet20_ranked",
    )
    assert drawn == [f"image_exemplars_small_{word}" for word in words]
    for path in tmp_path.glob("figures/*.svg"):
        ElementTree.fromstring(path.read_text())
    assert "pictures" not in records["photos"]["cells"]["ranked/paper"]
    page = (tmp_path / "image_exemplars_small.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| 90–100%")]
    assert len(lines) == 4
    assert all(BANDS["90–100%"][2] in line for line in lines)
    assert FINDINGS["gradient"] in "\n".join(tables(records))
