"""The `eigentrace` command: the only package that reads from or writes to the terminal, and that imports typer.

The commands, their options and their help are defined in `words`, which does not load torch; `commands` runs them.
"""

import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from eigentrace import __version__
from eigentrace.errors import EigentraceError

if TYPE_CHECKING:
    import typer

_NO_TYPER = (
    "eigentrace: the command line needs the package typer, which is not installed. "
    'Install it in the clone: pip install -e ".[cli]"'
)
# Equal to the demo's own default, which cannot be read without loading torch.
_STEPS = 100


def main() -> None:
    """Run the command line; the entry point of the installed `eigentrace` script."""
    try:
        app = _make_app()
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit(_NO_TYPER)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            app(prog_name="eigentrace", standalone_mode=True)
    except EigentraceError as error:
        _complain(error)
        sys.exit(2)


def _complain(what: Warning | Exception | str) -> None:
    # Always one line, without a traceback: the message says what happened.
    print(f"eigentrace: {' '.join(str(what).split())}", file=sys.stderr, flush=True)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning without its source line."""
    _complain(f"warning: {message}")


def _make_app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        help="Find out which training examples taught a PyTorch model what it does.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"eigentrace {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True),
        ] = False,
    ) -> None:
        """Find out which training examples taught a PyTorch model what it does."""

    from eigentrace.cli import words

    for name in ("fit", "score", "explain", "clean", "check", "info", "serve", "report"):
        app.command(name)(getattr(words, name))

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
        seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
        steps: Annotated[int, typer.Option(min=1, help="Number of Arnoldi steps.")] = _STEPS,
        json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    ) -> None:
        """Train a small network on digits, some with a wrong label, and find these by self-influence.

        Takes a few minutes on a laptop, downloads nothing, and ends with a report to open in a browser.
        """
        _demo(out, seed, steps, json)

    return app


def _demo(out: Path, seed: int, steps: int, as_json: bool = False) -> None:
    # Imported here: torch takes seconds to load, and `--help` must not wait for it.
    from eigentrace.demo import run_demo
    from eigentrace.demo.folder import REPORT, RUN, SUMMARY
    from eigentrace.demo.report import methods_table

    summary = run_demo(out, seed=seed, steps=steps, on_message=_note if as_json else _say)
    if as_json:
        _say((out / SUMMARY).read_text().rstrip())
        return
    _say("")
    _say(methods_table(summary.methods))
    _say("")
    _say(f"Numbers: {out / SUMMARY}")
    _say(f"Report:  {out / REPORT}")
    _say(f"Open it in a browser: {(out / REPORT).resolve().as_uri()}")
    # If the environment is not active, `eigentrace` needs its path, as in this call.
    program = "eigentrace" if shutil.which("eigentrace") else sys.argv[0]
    _say(f"Look at every example: {program} serve {out / RUN} --open")


def _say(line: str) -> None:
    print(line, flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
