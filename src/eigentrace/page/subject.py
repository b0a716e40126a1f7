"""The run behind a page: its numbers at once, its examples and its model when somebody asks for them."""

from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from eigentrace.errors import EigentraceError, MismatchError, UnsupportedError
from eigentrace.page.columns import Columns
from eigentrace.store.reader import RunReader

if TYPE_CHECKING:  # these load torch, which takes seconds: a page should be there before
    from eigentrace.loading import Inputs
    from eigentrace.rendering import Show
    from eigentrace.runs.run import Run

# What the examples of a folder look like, by task: known before any of them is opened.
_KINDS = {"seq2seq": "pair", "text-classification": "text", "image-classification": "image", "causal-lm": "text"}


class Subject:
    """A run, and whatever else a page about it needs; everything slow is made once, when it is first used.

    Args:
        run: A run's directory, or a run that is open.
        show: What its examples look like; found out by what the run was made from if not given.
        inputs: The model and the data, where they are at hand.
        with_model: Load the model and open the data when they are first needed.
    """

    def __init__(
        self,
        run: "str | Path | Run",
        show: "Show | None" = None,
        inputs: "Inputs | None" = None,
        with_model: bool = False,
    ) -> None:
        is_path = isinstance(run, str | Path)
        self.reader = RunReader(run) if is_path else run.reader  # type: ignore[arg-type,union-attr]
        self.path = self.reader.path
        self._run: Run | None = None if is_path else run  # type: ignore[assignment]
        # Three locks: what is quick must not wait for what is slow.
        self._opening, self._looking, self._loading = RLock(), RLock(), RLock()
        self._show, self._inputs = show, inputs
        self._is_shown = show is not None
        self.with_model, self.trouble = with_model, ""
        # Why they are not shown, where they are no longer what was scored.
        self.changed: MismatchError | None = None
        self.columns = Columns(self.reader)

    @property
    def run(self) -> "Run":
        """The run, opened."""
        with self._opening:
            if self._run is None:
                from eigentrace.runs.run import open_run

                self._run = open_run(self.path)
            return self._run

    @property
    def request(self) -> dict[str, Any] | None:
        """What the run was made from, if that is known."""
        return self.reader.request

    @property
    def show(self) -> "Show | None":
        """What the examples look like; None where nobody can tell, and `trouble` then says why."""
        with self._looking:
            if not self._is_shown:
                self._is_shown = True
                try:
                    self._show = self._found()
                except (EigentraceError, OSError) as error:
                    self.trouble = f"The examples cannot be shown: {error}"
                    self.changed = error if isinstance(error, MismatchError) else None
            return self._show

    def _found(self) -> "Show | None":
        if self.request is None:
            return None
        from eigentrace.loading import show_of

        inputs = self.inputs if "function" in self.request["input"] else self._inputs
        if inputs is not None and inputs.data.is_seekable:  # else it takes a pass to compare them
            self.run.check_data(inputs.data, inputs.task)
        return show_of(self.request, self.path, inputs)

    @property
    def kind(self) -> str:
        """What the examples are; "none" if nobody can tell."""
        asked = (self.request or {}).get("input", {})
        if not self._is_shown and asked.get("task") in _KINDS:
            return "pair" if asked.get("text_pair") else _KINDS[asked["task"]]
        return "none" if self.show is None else self.show.kind

    @property
    def name(self) -> str:
        """What people call the run: its directory, with the one it lies in where that says more."""
        here = self.path.resolve()
        return "/".join(here.parts[-2:]) if here.name == "run" else here.name

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, if they are known."""
        named = (self.request or {}).get("classes")
        if named is None and self._is_shown and self._show is not None:
            named = self._show.classes
        return None if named is None else list(named)

    @property
    def live(self) -> bool:
        """Tell whether new examples can be asked about."""
        return self._inputs is not None or (self.with_model and self.request is not None)

    @property
    def inputs(self) -> "Inputs":
        """The model and the data, loaded."""
        with self._loading:
            if self._inputs is None:
                if self.request is None:
                    raise UnsupportedError(
                        "This run does not say which model and data it was made from, so new examples cannot be asked "
                        "about here. Ask in Python: eigentrace.open_run(path, task, data).explain(queries)."
                    )
                from eigentrace.loading import make_inputs

                self._inputs = make_inputs(self.request, self.path)
            return self._inputs

    def attached(self) -> "Run":
        """Return the run with its model and data at hand."""
        with self._loading:
            if self.run.fitted is None or self.run.data is None:
                self._run = self.run.attached(self.inputs.task, self.inputs.data)
            return self.run

    def warm_up(self) -> None:
        """Load what the next questions need, so that they need not wait for it."""
        try:
            _ = self.run, self.show
            if self.live:
                self.attached()
        except (EigentraceError, OSError) as error:
            self.trouble = str(error)
