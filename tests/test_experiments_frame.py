"""What all experiments share: merging, resuming, failing, pages; and the page of all."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.record import table
from eigentrace.errors import InputError
from experiments import paper
from experiments.download import fetch
from experiments.frame import Experiment, Session, main

ROOT = Path(__file__).parents[1]


def counting(calls: list[str], settings: dict | None = None) -> Experiment:
    def first(session: Session) -> None:
        part = session.part("first", "First", settings or {"n": 1})
        part.cell("good", lambda: calls.append("good") or {"ap": 1.0})
        part.cell("bad", lambda: calls.append("bad") or 1 / 0)
        part.cell("after", lambda: calls.append("after") or {"ap": 2.0})

    def second(session: Session) -> None:
        session.data("The corpus")

    def tables(records):
        return table(("cell", "ap"), [(k, str(c.get("ap"))) for r in records.values() for k, c in r["cells"].items()])

    def figures(records, *, small):
        return {"curve": "<svg xmlns='http://www.w3.org/2000/svg'/>"}

    return Experiment("toy", "A toy", "About it.", {"first": first, "second": second}, tables, figures)


def test_what_fails_is_kept_as_a_failure_and_the_rest_goes_on(tmp_path, capsys):
    calls: list[str] = []
    assert main(counting(calls), ["--out", str(tmp_path)]) == 2
    assert calls == ["good", "bad", "after"]
    (machine, records), *others = json.loads((tmp_path / "toy.json").read_text()).items()
    assert not others
    assert "ZeroDivisionError" in records["first"]["cells"]["bad"]["failed"]
    said = capsys.readouterr().out
    assert "The corpus is not embedded: give the folder of its files as --data" in said
    page = (tmp_path / "toy.md").read_text()
    assert f"## {machine}" in page
    assert (tmp_path / re.search(r"\(([^)]*\.svg)\)", page)[1]).exists()
    assert str(tmp_path) not in page


def test_missing_measures_only_what_is_not_there_or_failed(tmp_path):
    calls: list[str] = []
    main(counting(calls), ["--out", str(tmp_path), "--parts", "first"])
    calls.clear()
    main(counting(calls), ["--out", str(tmp_path), "--parts", "first", "--missing"])
    assert calls == ["bad"]


def test_numbers_of_other_settings_are_replaced_not_mixed(tmp_path):
    main(counting([]), ["--out", str(tmp_path), "--parts", "first"])
    calls: list[str] = []
    main(counting(calls, {"n": 2}), ["--out", str(tmp_path), "--parts", "first", "--missing"])
    assert calls == ["good", "bad", "after"]
    (records,) = json.loads((tmp_path / "toy.json").read_text()).values()
    assert records["first"]["settings"] == {"n": 2}


def test_a_verdict_is_shown_at_full_size_only(tmp_path):
    experiment = replace(counting([]), verdict="It agrees.")
    main(experiment, ["--out", str(tmp_path), "--parts", "first"])
    main(experiment, ["--out", str(tmp_path), "--parts", "first", "--small"])
    assert "It agrees." in (tmp_path / "toy.md").read_text()
    assert "It agrees." not in (tmp_path / "toy_small.md").read_text()


def test_the_page_of_all_says_what_has_not_run(tmp_path):
    assert paper.main(["--out", str(tmp_path)]) == 0
    page = (tmp_path / "paper.md").read_text()
    for name in paper.NAMES:
        assert f"Not run at full size yet: `python -m experiments.{name}`." in page


def test_the_page_of_all_is_up_to_date():
    folder = ROOT / "docs" / "results"
    assert (folder / "paper.md").read_text(encoding="utf-8") == paper.page(folder)


def test_the_page_of_all_begins_with_a_line_on_each_that_ran_and_its_links_lead_there():
    folder = ROOT / "docs" / "results"
    ran = [experiment for experiment in paper.experiments() if (folder / f"{experiment.name}.json").exists()]
    page = paper.page(folder)
    listed = re.findall(r"^- \[(.+)\]\(#(.+)\)\. (.+)$", page.split("\n## ")[0], re.M)
    assert [(title, seen) for title, _, seen in listed] == [(each.title, each.seen) for each in ran]
    headings = [re.sub(r"[^\w -]", "", heading.lower()) for heading in re.findall(r"^## (.+)$", page, re.M)]
    assert {anchor for _, anchor, _ in listed} <= {heading.replace(" ", "-") for heading in headings}


def test_every_experiment_runs_small_by_one_command():
    make = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    assert re.search(r"^EXPERIMENTS := (.*)$", make, re.M)[1].split() == list(paper.NAMES)
    listed = subprocess.run(
        ["make", "-n", "experiments-small"], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ
    )
    assert "experiments.$name --small" in listed.stdout


def test_a_download_is_checked_and_kept(tmp_path):
    source, target = tmp_path / "there", tmp_path / "folder" / "here"
    source.write_bytes(b"abc")
    with pytest.raises(InputError, match="has the MD5 digest 900150983cd24fb0d6963f7d28e17f72, expected 0"):
        fetch(source.as_uri(), "0", target)
    assert not list(target.parent.iterdir())
    assert fetch(source.as_uri(), "900150983cd24fb0d6963f7d28e17f72", target).read_bytes() == b"abc"
    source.unlink()
    assert fetch(source.as_uri(), "0", target) == target


def test_what_cannot_be_downloaded_says_where_to_put_it(tmp_path):
    with pytest.raises(InputError, match=r"could not be downloaded .* Put the file at"):
        fetch((tmp_path / "nowhere").as_uri(), "0", tmp_path / "here")
