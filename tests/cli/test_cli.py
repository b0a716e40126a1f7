import builtins
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from eigentrace import __version__, cli
from eigentrace.cli import commands
from eigentrace.demo.report import MethodRow
from eigentrace.errors import InputError
from tests.helpers.expecting import expect_mentions, refused


def run(monkeypatch, *arguments):
    """Call the entry point as the installed script does, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["eigentrace", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"eigentrace {__version__}\n"


def test_help_lists_the_demo_and_its_options(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, "--help") == 0
    assert "demo" in capsys.readouterr().out
    assert run(monkeypatch, "demo", "--help") == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--out", "--seed", "--steps"))


def test_help_leaves_torch_alone():
    code = (
        "import sys\n"
        "from eigentrace.cli import main\n"
        "sys.argv = ['eigentrace', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('loaded:', [name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("loaded: []")


def test_without_typer_it_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without_typer(name, *rest):
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    message = run(monkeypatch, "--help")
    # A text handed to sys.exit goes to stderr and makes the code 1.
    assert message.startswith("eigentrace: ")
    expect_mentions(message, ["typer", 'pip install -e ".[cli]"'])
    assert capsys.readouterr().out == ""


def test_other_missing_packages_are_not_mistaken_for_typer(monkeypatch):
    real = builtins.__import__

    def without_rich(name, *rest):
        if name == "typer":  # which imports rich
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with refused(ModuleNotFoundError, "rich"):
        cli.main()


def test_errors_are_one_line_on_stderr(monkeypatch, capsys):
    from eigentrace import demo

    def fails(*arguments, **options):
        raise InputError("Something arrived:\n  give another.")

    monkeypatch.setattr(demo, "run_demo", fails)
    assert run(monkeypatch, "demo") == 2
    captured = capsys.readouterr()
    assert captured.err == "eigentrace: Something arrived: give another.\n"
    assert captured.out == ""


def test_the_real_refusal_reaches_the_user(monkeypatch, capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert run(monkeypatch, "demo", "--out", str(tmp_path)) == 2
    expect_mentions(capsys.readouterr().err, [tmp_path])


def test_bad_steps_are_refused(monkeypatch, capsys):
    assert run(monkeypatch, "demo", "--steps", "0") == 2
    assert "--steps" in capsys.readouterr().err


def test_demo_prints_progress_the_table_and_where_to_look(monkeypatch, capsys, tmp_path):
    from eigentrace import demo

    def fake(out, *, seed, steps, on_message):
        on_message(f"working with seed {seed} and {steps} steps")
        return type("Summary", (), {"methods": (MethodRow("Loss", None, 99.0, 98.0, 0.0, 1.0),)})

    monkeypatch.setattr(demo, "run_demo", fake)
    assert run(monkeypatch, "demo", "--out", str(tmp_path / "here"), "--seed", "3", "--steps", "7") == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "working with seed 3 and 7 steps"
    assert lines[2].startswith("method")
    assert lines[3].startswith("Loss")
    out = tmp_path / "here"
    places = [out / "summary.json", out / "report.html", (out / "report.html").as_uri()]
    for line, place in zip(lines[5:], [*places, f"eigentrace serve {out / 'run'} --open", ""], strict=True):
        assert line.endswith(str(place))


def test_the_default_of_steps_is_the_demo_s_own(monkeypatch, tmp_path):
    from eigentrace import demo

    default, asked = inspect.signature(demo.run_demo).parameters["steps"].default, []

    def fake(out, *, seed, steps, on_message):
        asked.append(steps)
        return SimpleNamespace(methods=())

    monkeypatch.setattr(demo, "run_demo", fake)
    assert run(monkeypatch, "demo", "--out", str(tmp_path)) == 0
    assert asked == [default]


def test_columns_of_a_table_that_came_from_a_run_keep_names_of_their_own():
    table = pa.table({"loss": [1], "given_loss": [2], "source": [3], "row": [4]})
    kept = commands._columns(SimpleNamespace(columns=table, data=SimpleNamespace(ids=None)))
    assert kept.to_pydict() == {"given_given_loss": [1], "given_loss": [2], "source": [3], "given_row": [4]}
