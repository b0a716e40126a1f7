"""The page as one file: whole, within its size, inert whatever the examples say."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.page import one_file as report
from eigentrace.page.one_file import bundled, write_report
from eigentrace.page.replies import Answers
from eigentrace.page.subject import Subject
from eigentrace.rendering import Images
from tests.helpers.expecting import refused
from tests.helpers.pages import HOSTILE
from tests.helpers.runs import data, task

STATIC = Path(report.__file__).parent / "static"


class Page(HTMLParser):
    """What a browser makes of a page: scripts, styles, attributes of everything."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self._inside = [], {"script": [], "style": []}, None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in self.texts else None
        if self._inside:
            self.texts[tag].append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            attrs, text = self.texts[self._inside].pop()
            self.texts[self._inside].append((attrs, text + data))

    @property
    def embedded(self):
        return next(json.loads(text) for attrs, text in self.texts["script"] if attrs.get("id") == "embedded")

    @property
    def policy(self):
        return next(attrs["content"] for _, attrs in self.tags if attrs.get("http-equiv") == "Content-Security-Policy")


@pytest.fixture(scope="module")
def digit_page(digits, tmp_path_factory):
    return write_report(digits, tmp_path_factory.mktemp("report") / "report.html", rows=20)


@pytest.fixture(scope="module")
def pair_page(pairs, tmp_path_factory):
    return write_report(pairs, tmp_path_factory.mktemp("report") / "report.html")


def hashes(texts):
    return {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts}


def test_holds_the_rows_that_stand_out_and_whoever_is_responsible(digits, digit_page):
    run, found = et.open_run(digits), Page(digit_page).embedded
    top = run.self_influence().top(20).rows.tolist()
    assert [int(row) for row in found["explain"]] == top
    expected = run.explain(top, 6)
    for at, row in enumerate(top):
        sides = found["explain"][str(row)]
        for name, side in (("proponents", expected.proponents), ("opponents", expected.opponents)):
            assert [other for other, _ in sides[name]] == side.rows[at].tolist()
            np.testing.assert_allclose([score for _, score in sides[name]], side.scores[at], rtol=1e-5)
            assert {str(other) for other, _ in sides[name]} <= found["rows"].keys()
    assert found["rows"][str(top[0])]["rank"] == 1
    assert found["overview"]["rows"] == 200
    assert not found["overview"]["live"]
    assert found["histograms"]["loss"]["column"] == "loss"
    assert {group["value"] for group in found["groups"]["scanner"]} == {"old", "new"}


def test_images_are_inside(digits, digit_page):
    sources = {row["content"]["src"] for row in Page(digit_page).embedded["rows"].values()}
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    assert digit_page.stat().st_size < 5_000_000


@pytest.mark.parametrize("name", ["digit_page", "pair_page"])
def test_needs_nothing_from_outside(name, request):
    page = Page(request.getfixturevalue(name))
    addresses = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert all(value.startswith(("#", "data:")) for value in addresses)
    assert not any(key.startswith("on") or key == "style" for _, attrs in page.tags for key in attrs)


@pytest.mark.parametrize("name", ["digit_page", "pair_page"])
def test_policy_allows_what_is_inside_and_nothing_else(name, request):
    page = Page(request.getfixturevalue(name))
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    run_by_browser = [text for attrs, text in page.texts["script"] if "type" not in attrs]
    assert len(run_by_browser) == 3
    assert rules["default-src"] == "'none'"
    assert set(rules["script-src"].split()) == hashes(run_by_browser)
    assert set(rules["style-src"].split()) == hashes(text for _, text in page.texts["style"])
    assert "connect-src" not in rules


def test_hostile_examples_are_data(pair_page):
    text, found = pair_page.read_text(encoding="utf-8"), Page(pair_page).embedded
    assert len(Page(pair_page).texts["script"]) == 4
    assert not any(words in text for words in HOSTILE if "<" in words)
    contents = [found["rows"][str(row)]["content"] for row in range(len(HOSTILE))]
    shown = [content["text" if row % 2 == 0 else "target"] for row, content in enumerate(contents)]
    assert shown == [words.replace("\u0000", "") for words in HOSTILE]
    assert found["rows"]["49"]["content"]["more"]


def test_a_file_that_exists_is_left(digits, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    with refused(InputError, out):
        write_report(digits, out)
    assert out.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_rows_must_be_some(digits, tmp_path):
    with refused(InputError, "rows", 1, 0):
        write_report(digits, tmp_path / "report.html", rows=0)


def test_what_has_no_room_is_left_out(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_BYTES", 30_000)
    found = Page(write_report(digits, tmp_path / "report.html", rows=50)).embedded
    assert 1 <= len(found["explain"]) < 50
    assert len(found["rows"]) < 60
    mentioned = {
        str(other)
        for sides in found["explain"].values()
        for side in sides.values()
        if isinstance(side, list)
        for other, _ in side
    }
    assert mentioned <= found["rows"].keys()


def test_large_images_are_made_small(digits, tmp_path):
    pytest.importorskip("PIL")
    noise = torch.Generator().manual_seed(0)
    show = Images(lambda _: torch.randint(256, (3, 300, 200), generator=noise, dtype=torch.uint8), 200)
    out = write_report(digits, tmp_path / "report.html", show, rows=5)
    sources = {row["content"]["src"] for row in Page(out).embedded["rows"].values()}
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert out.stat().st_size < 5_000_000


def test_a_method_without_features_explains_nobody(tmp_path):
    et.score(et.TracIn().fit(task(), data()), data(), tmp_path / "run")
    found = Page(write_report(tmp_path / "run", tmp_path / "report.html")).embedded
    assert found["explain"] == {}
    assert len(found["rows"]) == 60
    assert found["overview"]["kind"] == "none"


def test_decisions_made_so_far_are_shown(digits, tmp_path):
    run = shutil.copytree(digits, tmp_path / "run")
    Answers(Subject(run)).decide({"rows": [7], "decision": "drop"})
    found = Page(write_report(run, trust=True, out=tmp_path / "report.html", rows=200)).embedded
    assert found["overview"]["decisions"]["drop"] == 1
    assert [row for row, record in found["rows"].items() if record["decision"] == "drop"] == ["7"]


def test_the_script_holds_every_module_once_and_imports_nothing():
    script = bundled()
    names = re.findall(r"^const module_(\w+) = ", script, re.MULTILINE)
    assert sorted(names) == sorted(path.stem for path in STATIC.glob("*.js"))
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    for at, name in enumerate(names):
        used = set(re.findall(r"= module_(\w+);", script.split(f"const module_{name} = ")[1].split("\n})();")[0]))
        assert used <= set(names[:at])
    assert "</script" not in script
    assert "<!--" not in script


def test_vendored_files_are_the_ones_on_record():
    table = (STATIC / "vendor" / "README.md").read_text()
    libraries = sorted((STATIC / "vendor").glob("*.js"))
    assert [path.name for path in libraries] == ["d3.min.js", "plot.min.js"]
    for path in libraries:
        assert hashlib.sha256(path.read_bytes()).hexdigest() in table
        assert path.with_name(f"{path.name.split('.')[0]}.LICENSE").exists()


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.name)
def test_markup_is_never_made_of_text(path):
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")
    assert not [word for word in words if word in path.read_text()]
