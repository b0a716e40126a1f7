"""Results that are there: no failure, no other settings and no foreign file takes their place unasked."""

import json
from pathlib import Path

import pytest

from bench import projection
from bench.per_model import main as bench_main
from experiments.paper import NAMES
from experiments.shared.frame import Experiment, Session, main
from harness.merging import _checked
from harness.record import is_number, merged, read, save, table
from harness.refusal import differences
from harness.screen import shown_tables
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.places import ROOT


def toy(numbers: dict, settings: dict | None = None, name: str = "toy") -> Experiment:
    """An experiment of one part, `first`, that measures these numbers; those that are None fail."""

    def first(session: Session) -> None:
        part = session.part("first", "First", settings or {"n": 1})
        for key, value in numbers.items():
            part.cell(key, lambda value=value: {"ap": value + 0})

    def tables(records):
        cells = {k: c for record in records.values() for k, c in record["cells"].items()}
        return ["A remark.", "", *table(("cell", "paper", "ap"), [(k, "97.5", f"{c['ap']}") for k, c in cells.items()])]

    return Experiment(name, "A toy", "About it.", {"first": first}, tables)


@pytest.fixture
def there(tmp_path):
    """Results with one good number."""
    assert main(toy({"good": 1.0}), ["--out", str(tmp_path)]) == 0
    return tmp_path


def cells_in(folder: Path) -> dict:
    (records,) = json.loads((folder / "data" / "toy.json").read_text()).values()
    return {name: cell.get("ap") for name, cell in records["first"]["cells"].items()}


def test_a_failure_never_replaces_a_number(there, capsys):
    assert main(toy({"good": None, "new": 2.0}), ["--out", str(there)]) == 1
    assert cells_in(there) == {"good": 1.0, "new": 2.0}
    said = capsys.readouterr().out
    expect_mentions(said, ["first/good"])
    assert main(toy({"good": 3.0}), ["--out", str(there)]) == 0
    assert cells_in(there)["good"] == 3.0


def test_a_number_replaces_a_failure_and_a_failure_another():
    def results(cell, run):
        return {"CPU": {"m": {"settings": {}, "cells": {"x": cell | {"run": run}}, "runs": {run: {}}}}}

    old = results({"failed": "first"}, "a")
    assert merged(old, results({"failed": "second"}, "b"))["CPU"]["m"]["cells"]["x"]["failed"] == "second"
    assert merged(old, results({"ap": 1}, "b")) == results({"ap": 1}, "b")
    assert merged(results({"ap": 1}, "a"), results({"missing": "m"}, "b")) == results({"ap": 1}, "a")
    assert not is_number(None)


def test_a_benchmark_whose_number_could_not_be_repeated_says_so_by_its_code(tmp_path, monkeypatch, capsys):
    argv = ["--small", "--seconds", "0", "--batch", "2", "--models", "vit_b_32", "--ks", "2", "--out", str(tmp_path)]
    argv += ["--skip", "forward,layerwise,rotated"]
    assert bench_main(projection.BENCHMARK, argv) == 0
    before = (tmp_path / "data" / "projection_small.json").read_bytes()

    def fail(*args, **options):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(projection, "training", fail)
    assert bench_main(projection.BENCHMARK, argv) == 1
    assert (tmp_path / "data" / "projection_small.json").read_bytes() == before
    expect_mentions(capsys.readouterr().out, ["vit_b_32/train"])


def test_other_settings_end_a_command_before_it_measures(there, capsys):
    before = (there / "data" / "toy.json").read_bytes()
    other = toy({"good": 2.0}, {"n": 2, "more": [1]})
    with refused(SystemExit, 2):
        main(other, ["--out", str(there)])
    said = capsys.readouterr()
    assert "first/good" not in said.out
    expect_mentions(
        said.err, [there / "data" / "toy.json", "'first'", "`python -m experiments.toy`", "--out", "--replace"]
    )
    expect_mentions(said.err, differences({"n": 1}, {"n": 2, "more": [1]}))
    assert (there / "data" / "toy.json").read_bytes() == before
    assert main(other, ["--out", str(there), "--replace"]) == 0
    assert cells_in(there) == {"good": 2.0}
    assert "--replace" not in (there / "data" / "toy.json").read_text()


def test_settings_of_failures_alone_are_in_nobodys_way(tmp_path):
    broken = toy({"bad": None})
    assert main(Experiment("toy", "A toy", "", broken.parts, lambda records: []), ["--out", str(tmp_path)]) == 1
    assert main(toy({"good": 1.0}, {"n": 2}), ["--out", str(tmp_path)]) == 0
    assert cells_in(tmp_path) == {"good": 1.0}


def test_small_numbers_of_files_and_of_stand_ins_do_not_mix(tmp_path, capsys):
    out, data = tmp_path / "out", tmp_path / "data"
    data.mkdir()
    (data / "file").touch()
    assert main(toy({"good": 1.0}), ["--out", str(out), "--small"]) == 0
    with pytest.raises(SystemExit):
        main(toy({"good": 2.0}), ["--out", str(out), "--small", "--data", str(data)])
    expect_mentions(capsys.readouterr().err, ["data", "--data"])


def test_the_single_values_that_differ_are_named():
    there = {"network": "Size(recipe=Recipe(steps=2000, lr=0.1), batch=512)", "draw": {"folds": 5}, "keeps": [1, 2]}
    here = {"network": "Size(recipe=Recipe(steps=300, lr=0.1), batch=512)", "draw": {"folds": 5}, "keeps": (1, 2)}
    (steps,), (missing,) = differences(there, here), differences({}, {"n": "a b"})
    expect_mentions(steps, ["network.recipe.steps", 2000, 300])
    expect_mentions(missing, ["n", "a b"])
    assert differences({}, {}) == []


MERGED = {
    "nothing.json": (None, ("No such file",)),
    "broken.json": ('{"a": ', ("JSON",)),
    "list.json": ("[]", ()),
    "deep.json": ('{"a": {"b": {"c": 1}}}', ("'b' of 'a'", "'title'")),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_is_no_result_is_not_merged(there, name, capsys):
    text, mentions = MERGED[name]
    file = there / "elsewhere" / name
    file.parent.mkdir()
    if text is not None:
        file.write_text(text)
    _not_merged(there, file, mentions, capsys)


def _not_merged(there: Path, file: Path, mentions: tuple[str, ...], capsys) -> None:
    """A good file before the bad one is not merged either."""
    good = there / "elsewhere" / "good.json"
    good.write_text((there / "data" / "toy.json").read_text().replace('"good"', '"other"'))
    before = {path: path.read_bytes() for path in there.rglob("*.*")}
    capsys.readouterr()
    with refused(SystemExit, 2):
        main(toy({}), ["--out", str(there), "--merge", str(good), str(file)])
    expect_mentions(capsys.readouterr().err, [f"--merge {file}", *mentions])
    assert {path: path.read_bytes() for path in there.rglob("*.*")} == before


def test_results_of_another_command_or_form_are_not_merged(there, capsys):
    other = there / "elsewhere"
    main(toy({"x": 1.0}, name="tax"), ["--out", str(other)])
    _not_merged(there, other / "data" / "tax.json", ("`python -m experiments.tax`", "toy.json"), capsys)
    main(toy({"x": 1.0}), ["--out", str(other), "--small"])
    _not_merged(there, other / "data" / "toy_small.json", ("`python -m experiments.toy --small`",), capsys)


def test_what_the_page_cannot_show_is_not_merged(there, capsys):
    other = there / "elsewhere" / "data" / "toy.json"
    other.parent.mkdir(parents=True)
    other.write_text((there / "data" / "toy.json").read_text().replace('"ap"', '"old name"'))
    _not_merged(there, other, ("KeyError: 'ap'",), capsys)


def test_merged_results_of_other_settings_are_refused_until_told(there, capsys):
    other = there / "elsewhere"
    main(toy({"x": 1.0}, {"n": 2}), ["--out", str(other)])
    merge = ["--out", str(there), "--merge", str(other / "data" / "toy.json")]
    with pytest.raises(SystemExit):
        main(toy({}), merge)
    expect_mentions(capsys.readouterr().err, [there / "data" / "toy.json", other / "data" / "toy.json"])
    assert cells_in(there) == {"good": 1.0}
    assert main(toy({}), [*merge, "--replace"]) == 0
    assert cells_in(there) == {"x": 1.0}


def test_results_that_are_no_json_are_named(there, capsys):
    (there / "data" / "toy.json").write_text("{")
    with refused(SystemExit, 2):
        main(toy({"good": 1.0}), ["--out", str(there)])
    expect_mentions(capsys.readouterr().err, [there / "data" / "toy.json", "JSON"])


def test_numbers_where_they_were_once_kept_are_not_left_out(there, capsys):
    former = there / "toy.json"
    (there / "data" / "toy.json").rename(former)
    with refused(SystemExit, 2):
        main(toy({"other": 2.0}), ["--out", str(there)])
    expect_mentions(capsys.readouterr().err, [former, there / "data" / "toy.json", f"--merge {former}"])
    assert not list((there / "data").iterdir())
    assert main(toy({}), ["--out", str(there), "--merge", str(former)]) == 0
    assert main(toy({"other": 2.0}), ["--out", str(there)]) == 0
    assert cells_in(there) == {"good": 1.0, "other": 2.0}


RECORDS = {
    "values": ({"a": 1, "b": None, "c": [1.5, "ü"], "d": {}}, '{"a": 1, "b": null, "c": [1.5, "ü"], "d": {}}'),
    "records": ({"a": {"b": 1}, "c": {"d": 2}}, '{\n "a": {"b": 1},\n "c": {"d": 2}\n}'),
    "between": ({"a": 1, "b": 2, "c": [{"d": 3}], "e": 4}, '{\n "a": 1, "b": 2,\n "c": [\n  {"d": 3}\n ],\n "e": 4\n}'),
    "keys": ({1: {True: (1, 2)}}, '{\n "1": {"true": [1, 2]}\n}'),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_takes_a_line(name, tmp_path):
    value, text = RECORDS[name]
    save(tmp_path / "data" / "a.json", value)
    assert (tmp_path / "data" / "a.json").read_text(encoding="utf-8") == text + "\n"


def test_long_records_are_broken_and_stay_what_they_are(tmp_path):
    value = {"numbers": [k / 7 for k in range(99)], "words": "w" * 999, **{f"n{k}": k for k in range(200)}, "x": [[]]}
    save(tmp_path / "a.json", value)
    assert read(tmp_path / "a.json") == value
    lines = (tmp_path / "a.json").read_text(encoding="utf-8").splitlines()
    assert 5 < len(lines) < 20
    assert sorted(map(len, lines))[-2] < 620


PUBLISHED = [name.rpartition(".")[2] for name in NAMES]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if (ROOT / "docs/results/data" / f"{name}.json").exists()])
def test_published_results_could_be_merged(name):
    assert _checked(ROOT / "docs" / "results" / "data" / f"{name}.json", name, small=False)


def test_the_tables_are_printed_at_the_end_with_where_they_lie(there, capsys):
    assert main(toy({"other": 2.25}), ["--out", str(there)]) == 0
    (machine,) = json.loads((there / "data" / "toy.json").read_text())
    end = capsys.readouterr().out.split("\n\n", 1)[1].splitlines()
    assert end == [
        f"## {machine}",
        "",
        "A remark.",
        "",
        "cell   paper    ap",
        "------------------",
        "good    97.5   1.0",
        "other   97.5  2.25",
        "",
        f"Page: {there / 'toy.md'}",
        f"Numbers: {there / 'data' / 'toy.json'}",
    ]
    assert main(toy({"other": 2.25}), ["--out", str(there), "--no-tables"]) == 0
    assert "paper" not in capsys.readouterr().out
    assert "--no-tables" not in (there / "data" / "toy.json").read_text()


def test_a_page_is_shown_without_its_verdict_its_pictures_and_its_markup(tmp_path):
    page = tmp_path / "page.md"
    rows = table(("name", "n"), [("a &lt; b \\| \\*c", "failed<sup>1</sup>"), ("xx", "1")])
    lines = ["# T", "", "About.", "", "## What it shows", "", "| not | this |", "", "## CPU", "", *rows, ""]
    page.write_text(
        "\n".join([*lines, "<sup>1</sup> why  ", "", "![x](y.svg)", "", "| made by | at |", "| :-- | --: |"])
    )
    assert shown_tables(page, tmp_path / "n.json")[:-3] == [
        "## CPU",
        "",
        "name                n",
        "---------------------",
        "a < b | *c  failed[1]",
        "xx                  1",
        "",
        "[1] why",
    ]
