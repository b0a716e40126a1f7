"""Pairs of the web: what goes with high scores is computed right, and foreign text cannot spoil the page."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from experiments.shared.frame import main
from experiments.translation.mt_exemplars import (
    EXPERIMENT,
    SHORT,
    SHOWN,
    SHOWN_EACH,
    TENTHS,
    WORK,
    Noisy,
    exemplars,
    ranked,
    safe,
    said,
)
from experiments.translation.parts.corpora import END, PAD, Ordered, Pairs, Texts
from tests.helpers.drawings import words_on


@pytest.fixture(scope="module")
def noisy():
    draw = np.random.default_rng(0)
    table = np.full((200, 20), PAD, dtype=np.int32)
    for row, size in zip(table, draw.integers(2, 21, 200), strict=True):
        row[: size - 1], row[size - 1] = 5, END
    verdicts = [*[""] * 100, *draw.choice(["V", "A", "L", "MT"], 100).tolist()]
    texts = Texts([f"satz {i}" for i in range(200)], ["x" * (SHORT + i % 2) for i in range(200)], verdicts)
    pairs = Pairs(torch.from_numpy(table), torch.from_numpy(table[::-1].copy()), np.arange(200))
    return Noisy(texts, pairs, Ordered.of(pairs, 50))


def test_verdicts_and_lengths_are_compared_with_scores(noisy):
    scores = np.random.default_rng(1).random(200)
    cell = said(scores, noisy)
    verdicts = np.array(noisy.texts.verdicts)
    asked = verdicts != ""
    assert cell["wrong"] == pytest.approx(100 * roc_auc_score(verdicts[asked] != "V", scores[asked]))
    some = np.isin(verdicts, ["V", "A", "L"])
    assert cell["misaligned"] == pytest.approx(100 * roc_auc_score(verdicts[some] != "V", scores[some]))
    order = np.argsort(scores)
    lengths = noisy.pairs.lengths
    for low, high in ((0, 10), (70, 100), (0, 100)):
        rows = order[2 * low : 2 * high]
        assert cell[f"spearman {low}-{high}"] == pytest.approx(spearmanr(scores[rows], lengths[rows]).statistic)
    assert cell["lengths"] == pytest.approx([lengths[part].mean() for part in np.split(order, TENTHS)])


def test_short_pairs_are_drawn_from_each_range(noisy):
    scores = np.random.default_rng(2).random(200)
    rows = exemplars(scores, noisy.texts)["rows"]
    quantiles = ranked(scores)
    assert [row[0] for row in rows].count("90–100%") == SHOWN_EACH
    for shown, verdict, german, english in rows:
        low, high = (int(part) for part in shown.rstrip("%").split("–"))
        place = int(german.split()[1])
        assert low / 100 <= quantiles[place] < high / 100
        assert len(english) <= SHORT
        assert verdict == noisy.texts.verdicts[place]
    assert rows == exemplars(scores, noisy.texts)["rows"]
    assert len(rows) <= len(SHOWN) * SHOWN_EACH == 15


def test_text_of_the_web_is_shown_as_it_is():
    assert safe("a | b\t<script>`x`</script>") == r"a \| b &lt;script&gt;\`x\`&lt;/script&gt;"
    assert safe("![a](b) *c* _d_") == r"!\[a\](b) \*c\* \_d\_"
    assert "http://" not in safe("see http://www.x.org or me@x.org")
    assert safe(r"\|") == r"\\\|"


def test_the_table_has_the_papers_numbers_beside_ours():
    cells = {
        "Arnoldi": {"wrong": 61.0, "misaligned": 71.0, "spearman 0-10": 0.25, "spearman 70-100": None},
        "pairs": {"rows": [["0–1%", "V", "Ja | nein", "Yes <b>"]]},
        "loss": {"failed": "no"},
    }
    lines = EXPERIMENT.tables({"exemplars": {"cells": cells}})
    rows = {
        line.split("|")[1].strip(): [word.strip() for word in line.split(" | ")[1:]] for line in lines if "|" in line
    }
    assert rows["paper: Arnoldi"][:3] == ["0.5", "-0.19", "–"]
    assert rows["Arnoldi"][:4] == ["0.25", "–", "–", "61.0"]
    assert rows["loss"][0].startswith("failed")
    assert r"Ja \| nein" in "\n".join(lines)


def test_the_figure_is_drawn_from_what_is_there():
    cells = {name: {"lengths": list(range(TENTHS))} for name in WORK}
    (drawing,) = EXPERIMENT.figures({"exemplars": {"cells": cells}}, small=False).values()
    assert set(WORK) <= set(words_on(drawing()))
    assert EXPERIMENT.figures({}, small=False) == {}


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_exemplars_small.json").read_text()).values()
    cells = records["exemplars"]["cells"]
    assert len(cells) == 2 + 2 * len(WORK)
    assert not any("failed" in cell for cell in cells.values())
    assert cells["loss"]["misaligned"] > 90
    assert cells["Arnoldi + tail"]["misaligned"] > 80
    page = (tmp_path / "mt_exemplars_small.md").read_text()
    assert page.count("90–100%") == SHOWN_EACH
    assert str(tmp_path) not in page
    assert len(list(tmp_path.glob("figures/*.svg"))) == 1
    before = (tmp_path / "data" / "mt_exemplars_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "mt_exemplars_small.json").read_text() == before
