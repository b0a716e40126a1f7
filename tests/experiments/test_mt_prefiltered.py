"""Self-influence on top of the rules: every row drops from what the rules leave, beside the paper's numbers."""

import json
import re

import pytest

from experiments.shared.frame import main
from experiments.translation.mt_prefiltered import DROPPED, EXPERIMENT, NOTHING, PAPER, PARTS, WAYS, label
from experiments.translation.parts.bleu import SETS
from experiments.translation.parts.network import OUR_WAY, PAPER_WAY
from experiments.translation.parts.selection import LOSS, RANDOM, bleu_key
from tests.helpers.drawings import words_on

AT = {"at": [10, 30]}


def test_every_row_is_a_part():
    assert list(EXPERIMENT.parts) == list(PARTS)
    assert len(PARTS) == 1 + len(WAYS) * len(DROPPED)
    assert set(PAPER) <= set(PARTS.values())


def test_the_table_has_the_papers_numbers_beside_ours():
    cells = {label(PAPER_WAY, 25): {bleu_key(SETS[0], 30): 4.5, "pairs": 75_123, "kinds": {"clean": 40.5}}}
    cells[NOTHING] = {"failed": "no"}
    lines = EXPERIMENT.tables({"dropped": {"cells": cells, "settings": AT}})
    rows = {tuple(w.strip() for w in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines if "|" in line}
    rows = {key: [word.strip() for word in row] for key, row in rows.items()}
    assert rows[PAPER_WAY, "25"] == ["37.38", "–", "4.5", "–", "–", "75,123", "40.5", "1"]
    assert rows[PAPER_WAY, "50"][0] == "37.20"
    assert rows[NOTHING, "0"][0] == "36.32"
    assert rows[NOTHING, "0"][1].startswith("failed")
    assert EXPERIMENT.tables({}) == []


def test_curves_begin_where_nothing_is_dropped():
    key = bleu_key(SETS[1], 30)
    cells = {NOTHING: {key: 10.0}, label(OUR_WAY, 25): {key: 12.0}, label(RANDOM, 50): {key: 8.0}}
    drawn = EXPERIMENT.figures({"dropped": {"cells": cells, "settings": AT}}, small=False)
    assert list(drawn) == [SETS[1]]
    (curves,) = drawn[SETS[1]].args[0].values()
    assert [list(curve.across) for curve in curves] == [[0, 25], [0, 50]]
    assert [curve.up[0] for curve in curves] == [10.0, 10.0]
    assert {curve.name for curve in curves} <= set(words_on(drawn[SETS[1]]()))
    assert EXPERIMENT.figures({}, small=False) == {}


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    # Processes that begin with an empty cache all need the same network, fits and scores.
    assert main(EXPERIMENT, [*argv, "--workers", "4"]) == 0
    (records,) = json.loads((tmp_path / "data" / "mt_prefiltered_small.json").read_text()).values()
    cells = records["dropped"]["cells"]
    assert len(cells) == len(PARTS)
    assert not any("failed" in cell for cell in cells.values())
    left = cells[NOTHING]
    for way in WAYS:
        for percent in DROPPED:
            cell = cells[label(way, percent)]
            assert cell["pairs"] == round(left["pairs"] * (100 - percent) / 100)
            assert cell["kinds"]["both German"] == 0
    for way in (PAPER_WAY, OUR_WAY, LOSS):
        assert cells[label(way, 50)]["kinds"]["clean"] > left["kinds"]["clean"] + 10
    page = (tmp_path / "mt_prefiltered_small.md").read_text()
    assert len(re.findall(r"^\| nothing +\| +0 \| +36\.32 \|", page, re.MULTILINE)) == 1
    assert len(list(tmp_path.glob("figures/*.svg"))) == 2 * len(SETS)
    before = (tmp_path / "data" / "mt_prefiltered_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing"]) == 0
    assert (tmp_path / "data" / "mt_prefiltered_small.json").read_text() == before
