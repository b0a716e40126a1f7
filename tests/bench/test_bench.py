"""The benchmarks run at their smallest, results merge, and a measurement that fails becomes a word in a table."""

import json
import warnings

import pytest
import torch

from bench import curvature, projection
from bench import explain as explaining
from bench import search as searching
from bench import store as storing
from bench.curvature_page import PARTS
from bench.per_model import main
from bench.projection_page import render
from eigentrace.errors import EigentraceWarning
from harness.measure import Run, Subject, attempt, profiled, reason, timed
from harness.models import MODELS, SMALL
from harness.record import Notes, judged, merged, save, shown, table
from tests.helpers.expecting import expect_mentions

CPU = torch.device("cpu")
COUNTS = {
    "vit_l_32": 306_535_400,
    "vit_b_32": 88_224_232,
    "resnet_50": 25_557_032,
    "transformer_base": 60_522_496,
    "gpt2_small": 124_439_808,
}
QUICK = ["--small", "--seconds", "0", "--batch", "2"]


def measured(benchmark, out, *options):
    """Run a benchmark at its smallest; return its cells by model, and its page."""
    assert main(benchmark.BENCHMARK, [*QUICK, "--out", str(out), *options]) == 0
    name = f"{benchmark.BENCHMARK.name}_small"
    (models,) = json.loads((out / "data" / f"{name}.json").read_text()).values()
    return {model: record["cells"] for model, record in models.items()}, (out / f"{name}.md").read_text()


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_size(name):
    with torch.device("meta"):
        model = MODELS[name].build()
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", SMALL)
def test_small_models_give_finite_losses_and_the_same_twice(name):
    state = torch.get_rng_state()
    first, again = (Subject.of(SMALL[name], CPU, 2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert 100_000 < first.task.layout.numel < 1_000_000
    losses = [s.task.losses(s.task.params, s.batch) for s in (first, again)]
    assert losses[0].shape == (2,)
    assert losses[0].isfinite().all()
    assert torch.equal(*losses)


def test_projection_runs_and_models_merge_into_one_table(tmp_path):
    cells, _ = measured(projection, tmp_path, "--models", "vit_b_32", "--ks", "10,100")
    assert list(cells["vit_b_32"]) == ["train", "rotated/1024", "forward/10", "layerwise/10", "layerwise/100"]
    assert all(cell["rate"] > 0 for cell in cells["vit_b_32"].values()), cells
    cells, page = measured(
        projection, tmp_path, "--models", "resnet_50", "--ks", "10", "--skip", "forward,train,rotated"
    )
    assert list(cells) == ["vit_b_32", "resnet_50"]
    assert list(cells["resnet_50"]) == ["layerwise/10"]
    assert "| ViT-B/32" in page
    assert "| ResNet-50" in page
    assert "K = 100 / K = 10" in page
    assert str(tmp_path) not in page + (tmp_path / "data" / "projection_small.json").read_text()


def test_rendering_is_idempotent(tmp_path):
    measured(projection, tmp_path, "--models", "gpt2_small", "--ks", "2", "--skip", "forward")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert len(files) == 3
    measured(projection, tmp_path, "--render")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == files


def test_a_failing_measurement_becomes_text(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no kernel\n  in /home/somebody/site-packages/torch/lib.py")

    monkeypatch.setattr(projection, "training", fail)
    cells, page = measured(projection, tmp_path, "--models", "vit_b_32", "--ks", "2", "--skip", "forward")
    assert cells["vit_b_32"]["train"]["failed"] == "RuntimeError: no kernel in lib.py"
    assert "failed<sup>1</sup>" in page
    assert "<sup>1</sup> RuntimeError: no kernel in lib.py" in page
    assert cells["vit_b_32"]["layerwise/2"]["rate"] > 0


def test_a_model_that_cannot_be_built_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Subject, "of", fail)
    assert main(projection.BENCHMARK, [*QUICK, "--out", str(tmp_path), "--models", "vit_b_32,resnet_50"]) == 2
    expect_mentions(capsys.readouterr().out, ["ViT-B/32", "ResNet-50", "OutOfMemoryError: CUDA out of memory"])


def test_unknown_models_are_named(capsys):
    with pytest.raises(SystemExit):
        main(projection.BENCHMARK, ["--models", "vit"])
    expect_mentions(capsys.readouterr().err, ["--models", "'vit'", "vit_l_32, vit_b_32"])


def test_directions_are_repeated_where_they_do_not_fit(monkeypatch):
    subject = Subject.of(SMALL["vit_b_32"], CPU, 2)
    bytes_each = 4 * subject.task.layout.numel
    monkeypatch.setattr(projection, "_free_memory", lambda device: int(5 * bytes_each / 0.6))
    pool = projection.DirectionPool.draw(subject.task, [2, 4, 10], Run(CPU, True, 0.0, {}))
    assert len(pool.matrix) == 4
    assert pool.directions(2).count == 2
    written = pool.directions(10).dense(0, 10)
    assert torch.equal(written, torch.cat([pool.matrix, pool.matrix, pool.matrix[:2]]))
    assert pool.remarks(4) == []
    assert "first 4 directions" in pool.remarks(10)[0]
    assert pool.unused(3) == bytes_each


def test_an_eager_number_never_stands_for_a_compiled_one(monkeypatch):
    def step():
        warnings.warn("could not be compiled and runs as it is", EigentraceWarning, stacklevel=2)

    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # which takes seconds to import
    run = Run(CPU, True, 0.0, {})
    cell = attempt(lambda: timed(step, run, compiles=True).numbers)
    assert "could not be compiled" in cell["failed"]
    with pytest.warns(EigentraceWarning):
        assert timed(step, run).repeats == 1


def test_curvature_runs(tmp_path):
    options = ["--models", "transformer_base", "--precisions", "fp32"]
    cells, page = measured(curvature, tmp_path, *options)
    assert list(cells["transformer_base"]) == ["hessian/fp32/eager", "gauss-newton/fp32/eager"]
    assert all(cell["milliseconds"] > 0 for cell in cells["transformer_base"].values()), cells
    assert "| Transformer Base" in page


def test_fit_runs_and_its_parts_are_shown(tmp_path):
    cells, page = measured(curvature, tmp_path, "--models", "vit_b_32", "--batch", "16", "--fit", "--steps", "3")
    cell = cells["vit_b_32"]["fit/3/auto"]
    assert "failed" not in cell, cell
    assert set(cell["parts"]) == set(PARTS)
    # How much of the time lies between the parts depends on what else runs.
    assert all(seconds > 0 for seconds in cell["parts"].values())
    assert sum(cell["parts"].values()) <= cell["seconds"]
    expect_mentions(page, ["orthogonalisation", "eigenvectors"])


def test_search_runs_and_the_ways_agree(tmp_path):
    options = ["--small", "--seconds", "0", "--out", str(tmp_path)]
    assert searching.main([*options, "--rows", "70000", "--features", "8", "--queries", "3", "--k", "5"]) == 0
    for problems in json.loads((tmp_path / "data" / "search_small.json").read_text()).values():
        cells = problems["70000x8"]["cells"]
        assert {"search/both", "search/highest", "topk"} <= set(cells)
        assert all(cell["same"] == 1 and cell["seconds"] > 0 for cell in cells.values()), cells
    page = (tmp_path / "search_small.md").read_text()
    assert "| `search`, both sides" in page
    assert "70,000 × 8" in page
    assert searching.main([*options, "--render"]) == 0
    assert (tmp_path / "search_small.md").read_text() == page


def test_explanations_are_compared_with_every_score(tmp_path):
    options = ["--small", "--out", str(tmp_path)]
    assert explaining.main([*options, "--queries", "3"]) == 0
    (problems,) = json.loads((tmp_path / "data" / "explain_small.json").read_text()).values()
    cells = problems["400"]["cells"]
    assert len(cells) == len(explaining.NORMALIZED) * len(explaining.WAYS)
    for word in explaining.NORMALIZED:
        everybody, kept = (cells[f"5/{word}/{way}"] for way in ("shortlist of 2,000", "kept directions only"))
        assert (everybody["how"], everybody["proponents"], everybody["opponents"]) == ("exact", 1, 1)
        assert kept["proponents"] < 1
    page = (tmp_path / "explain_small.md").read_text()
    expect_mentions(page, ["400 digits, 3"])
    assert explaining.main([*options, "--render"]) == 0
    assert (tmp_path / "explain_small.md").read_text() == page


def test_store_runs_every_step(tmp_path):
    options = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path)]
    assert storing.main([*options, "--rows", "3000", "--features", "4", "--scored", "500"]) == 0
    for problems in json.loads((tmp_path / "data" / "store_small.json").read_text()).values():
        cells = problems["3000x4"]["cells"]
        assert set(cells) == set(storing.STEPS)
        assert all(cell["rows_per_second"] > 0 and cell["peak"] > 0 for cell in cells.values()), cells
    page = (tmp_path / "store_small.md").read_text()
    assert "| write shards" in page
    assert "3,000 × 4" in page
    assert str(tmp_path) not in page
    assert storing.main([*options, "--render"]) == 0
    assert (tmp_path / "store_small.md").read_text() == page
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["store_small.json", "store_small.md"]


def test_the_rows_of_a_search_are_compared_in_any_order():
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert searching.same_rows(torch.tensor([[3, 1, 2], [6, 5, 4]]), expected) == 1
    assert searching.same_rows(torch.tensor([[3, 1, 9], [1, 2, 3]]), expected) == pytest.approx(2 / 6)


def record(cells, run="a", batch=2):
    cells = {name: {"rate": rate, "run": run} for name, rate in cells.items()}
    about = {"title": "M", "parameters": 10, "settings": {"batch": batch}}
    return {"CPU": {"vit_l_32": about | {"cells": cells, "runs": {run: {"command": "c"}}}}}


def test_merging_takes_new_cells_and_drops_runs_without_any():
    old = record({"train": 1.0, "layerwise/10": 2.0})
    both = merged(old, record({"train": 3.0}, run="b"))["CPU"]["vit_l_32"]
    assert [cell["rate"] for cell in both["cells"].values()] == [3.0, 2.0]
    assert list(both["runs"]) == ["a", "b"]
    again = merged({"CPU": {"vit_l_32": both}}, record({"train": 4.0, "layerwise/10": 5.0}, run="c"))["CPU"]["vit_l_32"]
    assert list(again["runs"]) == ["c"]


def test_merging_does_not_mix_settings():
    new = record({"train": 3.0}, run="b", batch=4)
    assert merged(record({"train": 1.0, "layerwise/10": 2.0}), new) == new


def test_merge_takes_files_over(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    measured(projection, there, "--models", "vit_b_32", "--ks", "2", "--skip", "forward,layerwise")
    cells, page = measured(projection, here, "--merge", str(there / "data" / "projection_small.json"))
    assert list(cells) == ["vit_b_32"]
    assert page == (there / "projection_small.md").read_text()


def test_goals_stand_beside_the_numbers(tmp_path):
    cells = {"train": 4000.0, "layerwise/10": 2800.0, "layerwise/100": 1900.0}
    models = record(cells)["CPU"]
    runs = {"a": {"command": "c", "torch": "2", "eigentrace": "0", "python": "3"}}
    models["vit_l_32"]["runs"] = runs
    save(tmp_path / "data" / "projection.json", {"NVIDIA H200": models})
    render(tmp_path, False)
    page = (tmp_path / "projection.md").read_text()
    for text in ("2,800 (≥ 2,700 met)", "1,900 (≥ 2,000 missed)", "1.43 (≤ 1.5 met)", "2.11 (≤ 1.5 missed)"):
        assert text in page
    (goals,) = [line for line in page.splitlines() if "2 of 4" in line]
    assert [("M" in part, "K = 100" in part) for part in goals.split("Missed")[-1].split(";")] == [(True, True)] * 2
    expect_mentions(goals, ["2,000 examples/s", "1.5 training steps"])


def test_timing_counts_calls_after_the_warm_up():
    calls = []
    timing = timed(lambda: calls.append(1), Run(CPU, True, 0.0, {}))
    assert timing.repeats == 1
    assert len(calls) == 4  # three to warm up
    assert timing.peak is None


def test_profiles_name_operations():
    x = torch.ones(50, 50)
    assert any("aten::mm" in line for line in profiled(lambda: x @ x, CPU))


def test_reasons_are_short_and_name_no_folder():
    assert reason(OSError("open('/a/b/c.py') and 3/4 of x/y")) == "OSError: open('c.py') and 3/4 of x/y"
    assert len(reason(OSError("x" * 999))) == 300
    assert attempt(dict) == {}


def test_cells_in_words():
    notes = Notes()
    assert shown(None, "rate", ".1f", notes) == "–"
    assert shown({"failed": "OutOfMemoryError: too much"}, "rate", ".1f", notes) == "out of memory<sup>1</sup>"
    assert shown({"rate": 1.0, "note": "why"}, "rate", ".1f", notes) == "1.0<sup>2</sup>"
    assert notes.lines()[1] == "<sup>2</sup> why  "
    assert judged("1", 1.0, None) == "1"
    assert table(("a", "b"), [("xxxx", "1")]) == ["| a    |   b |", "| :--- | --: |", "| xxxx |   1 |"]
