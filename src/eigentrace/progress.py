"""Progress of long loops: a bar on a terminal or in a notebook, a line now and then in a log file."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from time import monotonic
from typing import Any, Literal, TypeVar, get_args

from tqdm import tqdm

from eigentrace.errors import InputError

T = TypeVar("T")
Form = Literal["auto", "bar", "lines", "none"]

VARIABLE = "EIGENTRACE_PROGRESS"
"""Environment variable with the form of progress, for processes in which `show_progress` is not called."""
# Seconds before a bar or the first line appears: quick calls show nothing.
_BAR_AFTER, _LINE_AFTER = 1.0, 10.0
# Seconds between two lines; in long loops a tenth of the time so far, so that a night's log fits on a screen or two.
_LINE_EVERY, _LINE_SHARE = 30.0, 0.1

_chosen: list[Form] = []


def show_progress(form: Form) -> None:
    """Choose how this process shows the progress of long loops, on standard error.

    Args:
        form: "auto" for a bar on a terminal or in a notebook, and lines anywhere else; "bar", "lines" or "none" for
            always the same. Overrides the environment variable EIGENTRACE_PROGRESS, which has the same values.
    """
    _chosen[:] = [_checked(form, "form")]


def track(
    items: Iterable[T], description: str, total: int | None = None, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Iterate over `items`, and show the progress if that takes more than a few seconds.

    Args:
        items: The iterable to loop over.
        description: Text in front of the bar, or of every line.
        total: Sum of the sizes of all items, if known, to show the remaining time.
        size: Returns the size of an item; 1 by default.
    """
    form = _form()
    if form == "none":
        yield from items
    elif form == "lines":
        lines = _Lines(description, total)
        for item in items:
            yield item
            lines.update(size(item))
        lines.finish()
    else:
        options = {"desc": description, "total": total, "delay": _BAR_AFTER, "leave": False}
        with _bar()(**options) as bar:
            for item in items:
                yield item
                bar.update(size(item))


def tell(line: str) -> None:
    """Print a line about what follows where progress is shown: above the bar, or into the log file."""
    form = _form()
    if form == "bar":
        tqdm.write(line, file=sys.stderr)
    elif form == "lines":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def as_duration(seconds: float) -> str:
    """Return a time in a unit that suits it.

    >>> as_duration(0.0042), as_duration(8.25), as_duration(250), as_duration(9000), as_duration(200_000)
    ('4.2 ms', '8.2 s', '4.2 min', '2.5 h', '2.3 days')
    """
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size and (unit != "days" or seconds >= 2 * size):
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.2g} ms"


class _Lines:
    """Plain lines for a log file: the first after some seconds, then at growing intervals, and one at the end."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total, self.done = description, total, 0
        self.start = monotonic()
        self.due = self.start + _LINE_AFTER
        self.written = False

    def update(self, count: int) -> None:
        self.done += count
        now = monotonic()
        if now >= self.due:
            self._write(now - self.start)
            self.due = now + max(_LINE_EVERY, _LINE_SHARE * (now - self.start))

    def finish(self) -> None:
        """Write the last line, unless the loop was so short that it has none."""
        if self.written:
            self._write(monotonic() - self.start, is_last=True)

    def _write(self, elapsed: float, is_last: bool = False) -> None:
        count, took = f"{self.done:,}", tqdm.format_interval(elapsed)
        left = ""
        if self.total:
            count += f" of {self.total:,} ({self.done / self.total:.0%})"
            if self.done and not is_last:
                left = f", about {tqdm.format_interval(elapsed * max(0, self.total - self.done) / self.done)} left"
        sys.stderr.write(f"{self.description}: {count}, {took} elapsed{left}{', done' if is_last else ''}\n")
        sys.stderr.flush()
        self.written = True


def _form() -> Form:
    """Return the form in which a loop that begins now shows its progress."""
    form = _chosen[0] if _chosen else _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)
    if sys.stderr is None:  # a program without a console
        return "none"
    if form == "auto":
        return "bar" if sys.stderr.isatty() or _in_notebook() else "lines"
    return form


def _checked(form: Any, name: str) -> Form:
    if form not in get_args(Form):
        raise InputError(f"{name} must be 'auto', 'bar', 'lines' or 'none', got {form!r}.")
    return form


def _in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _bar() -> Any:
    """Return the class of bars: with widgets in a notebook that has them, else made of text."""
    if _in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as widget

        return widget
    return tqdm
