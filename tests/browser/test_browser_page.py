"""The page as people see it: real servers on small runs, driven in Chromium by the scripts of this folder."""

import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import eigentrace as et
from eigentrace.demo.digits import load_digits
from eigentrace.loading import make_inputs
from eigentrace.loading.trust import trust_run
from eigentrace.page.access import MOST_BYTES
from eigentrace.page.one_file import write_report
from eigentrace.rendering.png import encode_png
from tests.helpers.expecting import expect_mentions
from tests.helpers.pages import digit_run, pair_run

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-c", "from eigentrace.cli import main; main()"]
IMAGES = [f"{name}.mjs" for name in ("overview", "examples", "deciding", "late", "accessible", "report", "digits")]
REPORTED = 60
ASKED = 5
SECONDS = 1800  # only ends what hangs; a script bounds each of its scenarios itself


def _names(*scripts):
    """The scenarios that scripts hold, in their order."""
    return [name for script in scripts for name in re.findall(r"^  async (\w+)\(", (HERE / script).read_text(), re.M)]


def _browser():
    if not (HERE / "node_modules" / ".installed").exists() or shutil.which("node") is None:
        pytest.skip("The page is not tested in a browser: run tools/install_browser.sh, which needs Node.js with npm.")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("The page is not tested in a browser: install Chromium (Debian: apt-get install chromium).")
    return found


def _once(factory, name, make):
    """Do something for all processes of a test run: the first one does it, the others wait for what came of it."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "browser"
    shared.mkdir(exist_ok=True)
    kept = shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(make(Path(tempfile.mkdtemp(prefix=name, dir=shared)))))
    return json.loads(kept.read_text())


def _driven(script, folder, config):
    """Let a script do its scenarios, and return what came of them."""
    (folder / "out").mkdir()
    given = {"chromium": _browser(), "python": sys.executable, "out": str(folder / "out"), **config}
    (folder / "config.json").write_text(json.dumps(given))
    command = ["node", str(HERE / script), str(folder / "config.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            errors = f"The script did not end within {SECONDS} seconds."
        finally:
            _end(process.pid)
    results = folder / "out" / "results.json"
    assert results.exists(), errors
    return json.loads(results.read_text()) | {"messages": errors}


def _end(group):
    """End what a script left behind, if it did not come to end it."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _trust(path):
    trust_run(et.open_run(path).manifest["how"]["input"], path)


def _known(path):
    """What Python says about a run, to hold the page against."""
    run = et.open_run(path)
    names = [name for name in run.columns if name != "id"]
    columns = {name: run.column(name).tolist() for name in names}
    rows = [{"row": row} | {name: values[row] for name, values in columns.items()} for row in range(run.num_rows)]
    for row, name in zip(rows, run.ids.tolist(), strict=True):
        row["id"] = name
    top = int(np.argmax(run.column("self_influence")))
    explained = {"row": top}
    for name, normalize in (("none", None), ("gradient", "gradient")):
        explained[name] = _sides(run.explain(top, 8, normalize=normalize, exclude="self"))
    return {"run": str(path), "rows": rows, "features": run.num_features, "explained": explained}


def _sides(found):
    return {
        name: list(zip(side.rows[0].tolist(), side.scores[0].tolist(), strict=True))
        for name, side in (("proponents", found.proponents), ("opponents", found.opponents))
    }


def _model_known(path, example):
    """What the model itself says: exact scores, and who is responsible for something new."""
    inputs = make_inputs(json.loads((path / "request.json").read_text()), path)
    run = et.open_run(path, inputs.task, inputs.data)
    top = int(np.argmax(run.column("self_influence")))
    asked = run.explain(inputs.read([example]), 8, exclude="self", rescore=False)
    return _sides(run.explain(top, 8, exclude="self")), _sides(asked)


def _look_at_digits(folder, built):
    path = Path(shutil.copytree(built, folder / "run"))
    _trust(path)
    config = _known(path)
    row = config["rows"][ASKED]
    pixels = (load_digits().train_images[ASKED, 0] * 255).round().byte().numpy()
    (folder / "digit.png").write_bytes(encode_png(pixels))
    config["explained"]["exact"], answer = _model_known(path, {"image": pixels, "label": row["label"]})
    config["asked"] = {
        "file": str(folder / "digit.png"), "label": row["label"], "prediction": row["prediction"], "answer": answer,
    }  # fmt: skip
    config["report"] = str(folder / "report.html")
    asked = [*COMMAND, "report", str(path), "--out", config["report"], "--rows", str(REPORTED), "--json"]
    subprocess.run(asked, check=True, capture_output=True, timeout=SECONDS)
    return _driven("digits.mjs", folder, config)


def _look_at_pairs(folder):
    path = pair_run(folder)
    config = _known(path)
    options = pyarrow.csv.ParseOptions(delimiter="\t", newlines_in_values=True)
    texts = pyarrow.csv.read_csv(folder / "pairs.tsv", parse_options=options)
    for row, (text, target) in enumerate(
        zip(*(texts.column(name).to_pylist() for name in ("text", "target")), strict=True)
    ):
        config["rows"][row] |= {"text": text, "target": target}
    example = {"text": config["rows"][20]["text"], "target": config["rows"][21]["target"]}
    config["explained"]["exact"], answer = _model_known(path, example)
    config["asked"] = example | {"answer": answer}
    return _driven("pairs.mjs", folder, config)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A run of images; the process that made it recorded its trust in a configuration of its own."""
    path = Path(_once(tmp_path_factory, "built", lambda folder: str(digit_run(folder))))
    _trust(path)
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory, built):
    """What came of looking at a copy of it."""
    _browser()
    return _once(tmp_path_factory, "digits", lambda folder: _look_at_digits(folder, built))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """What came of looking at a run of pairs of texts."""
    _browser()
    return _once(tmp_path_factory, "pairs", _look_at_pairs)


def _check(results, scenario):
    assert scenario in results, f"it was not come to: {results['messages']}"
    assert results[scenario]["ok"], results[scenario]["detail"]


@pytest.mark.parametrize("scenario", _names(*IMAGES))
def test_images(digits, scenario):
    _check(digits, scenario)


@pytest.mark.parametrize("scenario", _names("pairs.mjs"))
def test_pairs_of_texts(pairs, scenario):
    _check(pairs, scenario)


def test_servers_have_nothing_to_say(digits, pairs):
    assert digits["messages"] == pairs["messages"] == ""


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_exported_decisions_are_those_that_were_made(digits, form):
    path = next(path for path in digits["exported"]["saved"] if path.endswith(form))
    table = (pyarrow.csv.read_csv if form == "csv" else pq.read_table)(path)
    decisions = np.array(table.column("decision").to_pylist())
    acts = {int(row): word for row, word in digits["exported"]["acts"].items()}
    assert len(set(acts.values())) >= 2
    wanted = np.array([acts.get(row, "keep") for row in range(table.num_rows)])
    np.testing.assert_array_equal(decisions, wanted)
    relabelled = np.flatnonzero(decisions == "relabel")
    np.testing.assert_array_equal(table.column("new_label").take(relabelled).to_pylist(), 4)


def test_a_report_of_the_usual_size_can_be_mailed(built, tmp_path):
    assert write_report(built, tmp_path / "report.html").stat().st_size < 5e6


@contextmanager
def _served(run):
    """`eigentrace serve`, and a way to ask it anything."""
    command = [*COMMAND, "serve", str(run), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            port = int(json.loads(line)["url"].rstrip("/").rpartition(":")[2])
            yield lambda *asked, **headers: _asked(port, *asked, **headers)
        finally:
            process.kill()


def _asked(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def ask(built):
    """A server on the run of images, asked without a browser."""
    with _served(built) as asking:
        yield asking


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/../../../../../../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/app.py",
        "/static/..%2f..%2fapp.py",
        "/static//etc/passwd",
        "/static/vendor/../../guard.py",
        "/api/image/../../manifest.json",
        "/manifest.json",
        "/request.json",
    ],
)
def test_no_path_leads_to_a_file(ask, path):
    status, text = ask("GET", path)
    assert status in (400, 404, 422)
    assert set(json.loads(text)) == {"error"}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost:1", ""])
@pytest.mark.parametrize("path", ["/", "/api/overview", "/static/app.js", "/api/export?format=csv"])
def test_foreign_names_of_the_server_are_refused(ask, host, path):
    assert ask("GET", path, Host=host)[0] == 400


@pytest.mark.parametrize("path", ["/api/decisions", "/api/undo", "/api/ask"])
@pytest.mark.parametrize("given", [{}, {"X_Token": ""}, {"X_Token": "guess"}, {"Cookie": "token=guess"}])
def test_nothing_is_written_without_the_token(ask, path, given):
    assert ask("POST", path, json.dumps({"rows": [1], "decision": "drop"}), **given)[0] == 403
    assert json.loads(ask("GET", "/api/decisions")[1])["counts"] == {"drop": 0, "keep": 0, "relabel": 0}


def test_large_uploads_are_refused_before_they_are_sent(ask):
    token = re.search(r'<meta name="token" content="([^"]+)">', ask("GET", "/")[1])[1]
    status, text = ask("POST", "/api/ask", X_Token=token, Content_Length=str(7 * 2**20))
    assert status == 413
    expect_mentions(json.loads(text)["error"], [f"{MOST_BYTES // 2**20} MiB"])
