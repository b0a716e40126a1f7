"""What all experiments share: merging, resuming, failing, pages; and the page of all."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from eigentrace.errors import InputError
from experiments import paper
from experiments.shared import frame
from experiments.shared.claims import SEEN, Claim, Finding
from experiments.shared.download import fetch
from experiments.shared.frame import Experiment, Session, main
from experiments.shared.workers import dealt_out, run_parts
from experiments.translation import mt_retrieval
from harness.record import read, runs_of, table
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.places import ROOT


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
        return {"curve": lambda: "<svg xmlns='http://www.w3.org/2000/svg'/>"}

    return Experiment("toy", "A toy", "About it.", {"first": first, "second": second}, tables, figures)


def test_what_fails_is_kept_as_a_failure_and_the_rest_goes_on(tmp_path, capsys):
    calls: list[str] = []
    assert main(counting(calls), ["--out", str(tmp_path)]) == 2
    assert calls == ["good", "bad", "after"]
    (machine, records), *others = json.loads((tmp_path / "data" / "toy.json").read_text()).items()
    assert not others
    assert "ZeroDivisionError" in records["first"]["cells"]["bad"]["failed"]
    said = capsys.readouterr().out
    expect_mentions(said, ["--data"])
    page = (tmp_path / "toy.md").read_text()
    assert f"## {machine}" in page
    assert (tmp_path / re.search(r"\(([^)]*\.svg)\)", page)[1]).exists()
    assert str(tmp_path) not in page


def test_without_matplotlib_the_page_says_what_draws_its_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frame, "can_draw", lambda: False)
    main(counting([]), ["--out", str(tmp_path), "--parts", "first"])
    said = (
        "No figures: matplotlib was not installed. `pip install matplotlib`, then `python -m experiments.toy --render`"
    )
    for text in ((tmp_path / "toy.md").read_text(), capsys.readouterr().out.replace("\\", "")):
        assert said in text
    assert not (tmp_path / "figures").exists()
    monkeypatch.undo()
    assert main(counting([]), ["--out", str(tmp_path), "--render"]) == 0
    page = (tmp_path / "toy.md").read_text()
    assert (tmp_path / re.search(r"\(([^)]*\.svg)\)", page)[1]).exists()
    assert "No figures" not in page


def test_missing_measures_only_what_is_not_there_or_failed(tmp_path):
    calls: list[str] = []
    main(counting(calls), ["--out", str(tmp_path), "--parts", "first"])
    calls.clear()
    main(counting(calls), ["--out", str(tmp_path), "--parts", "first", "--missing"])
    assert calls == ["bad"]


def test_parts_are_dealt_out_in_their_order_after_those_that_come_first():
    assert dealt_out(["a", "b", "c", "d", "e"], ("d", "b"), 2) == [[["b", "d"]], [["a", "e"], ["c"]]]
    assert dealt_out(["a", "b"], (), 3) == [[["a"], ["b"]]]
    assert dealt_out(["b"], ("b",), 3) == [[["b"]]]


def test_processes_add_to_the_same_results(tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.record import add\n"
        "for k in range(40):\n"
        "    record = {'settings': {}, 'cells': {f'{sys.argv[1]} {k}': {'run': 'd'}}, 'runs': {'d': {}}}\n"
        "    add(Path(sys.argv[2]), {'machine': {'part': record}})"
    )
    path = tmp_path / "results" / "toy.json"
    argv = [[sys.executable, "-c", code, word, str(path)] for word in ("a", "b", "c")]
    running = [subprocess.Popen(each, cwd=ROOT) for each in argv]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(read(path)["machine"]["part"]["cells"]) == 120
    assert [found.name for found in path.parent.iterdir()] == ["toy.json"]


@pytest.mark.slow
def test_workers_measure_the_parts_and_count_what_failed(tmp_path, capfd):
    argv = ["--small", "--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--missing"]
    names = "all_select,all_proj,last_proj,network"
    assert main(mt_retrieval.EXPERIMENT, [*argv, "--parts", names, "--workers", "2"]) == 0
    (records,) = read(tmp_path / "data" / "mt_retrieval_small.json").values()
    retrieval = records["retrieval"]
    assert {retrieval["runs"][cell["run"]]["command"] for cell in retrieval["cells"].values()} == {
        f"python -m experiments.translation.mt_retrieval --small --missing --parts {parts}"
        for parts in ("network", "all_select,last_proj", "all_proj")
    }
    assert "RandSelect" in (tmp_path / "mt_retrieval_small.md").read_text()
    before = (tmp_path / "data" / "mt_retrieval_small.json").read_bytes()
    assert main(mt_retrieval.EXPERIMENT, [*argv, "--parts", names, "--workers", "3"]) == 0
    assert (tmp_path / "data" / "mt_retrieval_small.json").read_bytes() == before
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "cache").write_text("in the way")
    assert main(mt_retrieval.EXPERIMENT, [*argv, "--parts", "all_tail,last_select", "--workers", "2"]) == 2
    assert "last_select: FileExistsError" in capfd.readouterr().out


def test_a_process_that_is_killed_is_said_and_counted(tmp_path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/said\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert run_parts("experiments.toy", ["--workers=2", "--small", "--parts", "x"], [[["a", "b"]], [["c"]]]) == 2
    assert (tmp_path / "said").read_text().splitlines() == [
        "-m experiments.toy --small --no-tables --parts a,b",
        "-m experiments.toy --small --no-tables --parts c",
    ]
    expect_mentions(capsys.readouterr().out, ["a, b", "signal 9"])


def test_processes_end_with_the_one_that_started_them(tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 600\n")
    program.chmod(0o755)
    code = "import sys; from experiments.shared.workers import run_parts; sys.executable = sys.argv[1]\n"
    code += "run_parts('experiments.toy', [], [[['a'], ['b']], [['c']]])"
    parent = subprocess.Popen([sys.executable, "-c", code, str(program)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pids = tmp_path / "pids"
    while parent.poll() is None and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    parent.terminate()
    assert "measured" in parent.communicate(timeout=300)[1]
    assert parent.returncode == 1
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_numbers_of_other_settings_are_replaced_when_told_and_never_mixed(tmp_path):
    main(counting([]), ["--out", str(tmp_path), "--parts", "first"])
    calls: list[str] = []
    main(counting(calls, {"n": 2}), ["--out", str(tmp_path), "--parts", "first", "--missing", "--replace"])
    assert calls == ["good", "bad", "after"]
    (records,) = json.loads((tmp_path / "data" / "toy.json").read_text()).values()
    assert records["first"]["settings"] == {"n": 2}


def test_claims_and_verdict_are_shown_at_full_size_only(tmp_path):
    claim = Claim("One is ahead.", lambda records: Finding(SEEN, f"{len(records)} part."))
    experiment = replace(counting([]), verdict="It agrees.", claims=(claim,))
    main(experiment, ["--out", str(tmp_path), "--parts", "first"])
    main(experiment, ["--out", str(tmp_path), "--parts", "first", "--small"])
    for text in ("It agrees.", "- **Seen.** One is ahead. *1 part.*"):
        assert text in (tmp_path / "toy.md").read_text()
        assert text not in (tmp_path / "toy_small.md").read_text()


def test_the_page_of_all_says_what_has_not_run(tmp_path):
    assert paper.main(["--out", str(tmp_path)]) == 0
    page = (tmp_path / "paper.md").read_text()
    for name in paper.NAMES:
        assert f"`python -m experiments.{name}`" in page


def test_the_page_of_all_is_up_to_date():
    folder = ROOT / "docs" / "results"
    assert (folder / "paper.md").read_text(encoding="utf-8") == paper.page(folder)


def test_the_page_of_all_begins_with_the_main_claims_and_their_links_lead_there():
    page = paper.page(ROOT / "docs" / "results")
    listed = re.findall(r"^- \*\*.+\.\*\* \[(.+)\]\(#(.+)\) \*.+\*$", page.split("\n## ")[0], re.M)
    wanted = [claim.text for experiment in paper.experiments() for claim in experiment.claims if claim.is_main]
    assert [text for text, _ in listed] == wanted
    headings = [re.sub(r"[^\w -]", "", heading.lower()) for heading in re.findall(r"^## (.+)$", page, re.M)]
    assert {anchor for _, anchor in listed} <= {heading.replace(" ", "-") for heading in headings}


def test_every_experiment_runs_small_by_one_command():
    make = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    names = re.search(r"^EXPERIMENTS := (.*)$", make, re.M)[1].split()
    assert [name for name in names if name in paper.NAMES] == list(paper.NAMES)
    assert {*names} - {*paper.NAMES} == {
        *("images.vit_cifar", "images.memorization", "translation.mt_training", "translation.mt_layers"),
        "language.exchanged_answers",
    }
    listed = subprocess.run(
        ["make", "-n", "experiments-small"], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ
    )
    assert "experiments.$name --small" in listed.stdout


def test_every_experiment_says_where_its_command_lies():
    assert [experiment.module for experiment in paper.experiments()] == [f"experiments.{name}" for name in paper.NAMES]


def test_what_is_shared_imports_nothing_of_those_that_share_it():
    def imports(folder: str) -> set[str]:
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
        return set(re.findall(r"^\s*(?:from|import) (\w+)", "\n".join(texts), re.M))

    assert not imports("harness") & {"bench", "experiments"}
    assert "experiments" not in imports("bench")
    assert "bench" not in imports("experiments")


def test_a_page_names_commands_as_they_are_run_today():
    run = {"command": "python -m old.a --b c", "torch": "2", "eigentrace": "1", "python": "3"}
    records = {"part": {"runs": {"2026-01-01 00:00": run}}}
    assert "| `python -m new.a --b c` |" in runs_of(records, "new.a")[-1]
    assert "| `python -m old.a --b c` |" in runs_of(records)[-1]


def test_a_download_is_checked_and_kept(tmp_path):
    source, target = tmp_path / "there", tmp_path / "folder" / "here"
    source.write_bytes(b"abc")
    with refused(InputError, source.as_uri(), "900150983cd24fb0d6963f7d28e17f72", 0):
        fetch(source.as_uri(), "0", target)
    assert not list(target.parent.iterdir())
    assert fetch(source.as_uri(), "900150983cd24fb0d6963f7d28e17f72", target).read_bytes() == b"abc"
    source.unlink()
    assert fetch(source.as_uri(), "0", target) == target


def test_what_cannot_be_downloaded_says_where_to_put_it(tmp_path):
    with refused(InputError, (tmp_path / "nowhere").as_uri(), tmp_path / "here"):
        fetch((tmp_path / "nowhere").as_uri(), "0", tmp_path / "here")
