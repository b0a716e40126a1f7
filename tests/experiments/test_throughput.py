"""Pairs an hour: what is read, thinned and written is right, and rates follow from the seconds."""

import gzip
import json
import re
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

import eigentrace as et
from experiments.shared.frame import main
from experiments.translation.parts.corpora import (
    FILES,
    Corpora,
    Ordered,
    read_texts,
    small_texts,
    translation_task,
)
from experiments.translation.parts.phrases import COUNTS
from experiments.translation.parts.transformer import Recipe, make_transformer
from experiments.translation.throughput import (
    BATCHES,
    EXPERIMENT,
    RUN,
    TITLES,
    WHOLE,
    _most,
    cell_name,
    per_hour,
    raw_files,
    read_pairs,
    thinned,
    watched,
    write_scores,
)
from tests.helpers.token_pairs import token_pairs


@pytest.fixture(scope="module")
def pairs():
    return token_pairs(90, 9, words=30, shortest=2)


def test_text_is_read_from_files_and_nothing_kept(tmp_path):
    pytest.importorskip("tokenizers")
    corpora = Corpora(None, tmp_path / "cache", small=True)
    paths = raw_files(corpora, tmp_path)
    with gzip.open(paths[0], "rt", encoding="utf-8") as file:
        assert file.readline() == "de\ten\n"
    found = read_pairs(paths, corpora.subwords, None)
    expected = corpora.pairs("train") + corpora.pairs("crawl")
    assert torch.equal(found.source, expected.source)
    assert torch.equal(found.target, expected.target)
    before = set((tmp_path / "cache").iterdir())
    assert len(read_pairs(paths, corpora.subwords, 40)) == 40
    assert set((tmp_path / "cache").iterdir()) == before


def test_the_small_form_scores_a_cut_of_the_files_it_is_given(tmp_path):
    texts = {"train": small_texts("train"), "crawl": small_texts("crawl")}
    for name, found in texts.items():
        rows = zip(found.german * 3, found.english * 3, strict=True)
        with gzip.open(tmp_path / FILES[name], "wt", encoding="utf-8") as file:
            file.write("\n".join(["de\ten", *("\t".join(row) for row in rows)]))
    (tmp_path / "cut").mkdir()
    for small, counts in ((True, [COUNTS["train"], COUNTS["crawl"]]), (False, [3 * len(t) for t in texts.values()])):
        paths = raw_files(Corpora(tmp_path, tmp_path / "cache", small=small), tmp_path / "cut")
        assert [len(read_texts(path)) for path in paths] == counts


def test_fewer_pairs_are_of_all_lengths(pairs):
    some = thinned(pairs, 30)
    assert len(set(some.rows)) == 30
    assert abs(some.lengths.mean() - pairs.lengths.mean()) < 0.5
    assert (some.lengths.min(), some.lengths.max()) == (pairs.lengths.min(), pairs.lengths.max())
    assert thinned(pairs, 90) is pairs


def test_scores_are_written_in_the_order_of_the_pairs(pairs, tmp_path):
    ordered = Ordered.of(pairs, 16)
    write_scores(tmp_path / "scores.parquet", torch.from_numpy(pairs.lengths[ordered.order]).double(), ordered)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table["self_influence"].to_pylist() == pairs.lengths.tolist()
    assert table["row"].to_pylist() == list(range(90))


@pytest.mark.parametrize("engine", TITLES)
def test_the_size_of_batches_is_seen(pairs, engine):
    model = make_transformer(Recipe(8, 1, 2, words=30), torch.device("cpu"), 0).eval()
    data = Ordered.of(pairs, 32).data
    fitted = et.RandProj(3).fit(translation_task(model), data)
    with watched(model) as sizes:
        fitted.self_influence(data, compute=et.Compute(engine=engine, batch=16))
    assert _most(sizes) == 16
    assert not model._forward_pre_hooks
    assert _most(Counter({2048: 1, 1024: 84, 1: 90})) == 1024


def test_rates_follow_from_the_seconds():
    cell = per_hour({"scored": 1000, "score_seconds": 4.0, "write_seconds": 1.0}, read_seconds=10.0, read=5000)
    assert cell["per_hour"] == pytest.approx(3600 / (0.005 + 0.002))
    assert cell["scoring_per_hour"] == pytest.approx(900_000)


def test_the_table_has_the_papers_number_beside_ours():
    cell = {"scored": 6400, "score_seconds": 2.0, "write_seconds": 0.01, "used": 32, "peak": 2**30}
    cells = {
        cell_name(WHOLE, "bf16", 2048): {"failed": "no"},
        cell_name("layerwise", "bf16", 64): per_hour(cell, 3.0, 100_000) | {"fit_seconds": 70.0},
    }
    lines = EXPERIMENT.tables({"throughput": {"cells": cells}})
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["paper: TPUv2, 16 cores", TITLES["layerwise"], WHOLE]
    assert rows[0][-1] == "2.2M"
    assert rows[1][1:5] == ["bf16", "64", "32", "1.0"]
    assert rows[1][-1] == "10.5M"
    assert "failed" in rows[2][-1]
    assert "100,000 pairs" in "\n".join(lines)
    assert "70 s" in "\n".join(lines)
    assert max(BATCHES) == 2048


@pytest.mark.slow
def test_a_small_run_measures_everything(tmp_path):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main(EXPERIMENT, argv) == 0
    (records,) = json.loads((tmp_path / "data" / "throughput_small.json").read_text()).values()
    cells = records["throughput"]["cells"]
    assert len(cells) == 2 * 2 * 2 + 1
    assert not any("failed" in cell for cell in cells.values())
    for name, cell in cells.items():
        assert cell["used"] == int(name.rpartition(" ")[2])
        assert cell["per_hour"] > 0
    assert cells[cell_name(WHOLE, "bf16", 64)]["scored"] == 600
    page = (tmp_path / "throughput_small.md").read_text()
    assert len(re.findall(r"^\| paper: TPUv2, 16 cores .* 2\.2M \|$", page, re.MULTILINE)) == 1
    assert str(tmp_path) not in page
    before = (tmp_path / "data" / "throughput_small.json").read_text()
    assert main(EXPERIMENT, [*argv, "--missing", "--ways", RUN]) == 0
    assert (tmp_path / "data" / "throughput_small.json").read_text() == before
