"""The run that a page shows: its columns are read at once, its examples and its model on first use."""

from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from eigentrace.errors import EigentraceError, MismatchError, UnsupportedError
from eigentrace.page.columns import Columns
from eigentrace.store.reader import RunReader

if TYPE_CHECKING:  # these import torch, which takes seconds; the page should open before
    from eigentrace.loading import Inputs
    from eigentrace.rendering import Show
    from eigentrace.runs.run import Run

# The kind of a folder's examples by task, known before the data is opened.
_KINDS = {"seq2seq": "pair", "text-classification": "text", "image-classification": "image", "causal-lm": "text"}


class Subject:
    """A run with its renderer, model and data, each loaded once, on first use.

    Args:
        run: A run's directory, or an open run.
        show: Renders the examples; default: chosen from the run's request.
        inputs: The model and the data, if they are already loaded.
        with_model: Load the model and the data on first use.
        trust: Call the function that the run names to load its model and data; see `eigentrace.loading.trust`.
    """

    def __init__(
        self,
        run: "str | Path | Run",
        show: "Show | None" = None,
        inputs: "Inputs | None" = None,
        with_model: bool = False,
        trust: bool = False,
    ) -> None:
        is_path = isinstance(run, str | Path)
        self.reader = RunReader(run) if is_path else run.reader  # type: ignore[arg-type,union-attr]
        self.path = self.reader.path
        self._run: Run | None = None if is_path else run  # type: ignore[assignment]
        # Three locks, so that quick requests do not wait for slow ones.
        self._opening, self._looking, self._loading = RLock(), RLock(), RLock()
        self._show, self._inputs = show, inputs
        self._is_shown = show is not None
        self.with_model, self.trouble, self._trust = with_model, "", trust
        # Set if the examples are not shown because the data has changed since scoring.
        self.changed: MismatchError | None = None
        self.columns = Columns(self.reader)

    @property
    def run(self) -> "Run":
        """The run, opened on first use."""
        with self._opening:
            if self._run is None:
                from eigentrace.runs.run import open_run

                self._run = open_run(self.path)
            return self._run

    @property
    def request(self) -> dict[str, Any] | None:
        """The recorded request with the run's model and data; None if the run has none."""
        return self.reader.request

    @property
    def show(self) -> "Show | None":
        """The renderer of examples; None if there is none, with the reason in `trouble` if it failed."""
        with self._looking:
            if not self._is_shown:
                self._is_shown = True
                try:
                    self._show = self._find_show()
                except (EigentraceError, OSError) as error:
                    self.trouble = f"The examples cannot be shown: {error}"
                    self.changed = error if isinstance(error, MismatchError) else None
            return self._show

    def _find_show(self) -> "Show | None":
        if self.request is None:
            return None
        from eigentrace.loading import show_of

        inputs = self.inputs if "function" in self.request["input"] else self._inputs
        if inputs is not None and inputs.data.is_seekable:  # otherwise comparing takes a pass over the data
            self.run.check_data(inputs.data, inputs.task)
        return show_of(self.request, self.path, inputs, trust=self._trust)

    @property
    def kind(self) -> str:
        """The kind of the examples: "image", "text", "pair", ...; "none" if they cannot be shown."""
        asked = (self.request or {}).get("input", {})
        if not self._is_shown and asked.get("task") in _KINDS:
            return "pair" if asked.get("text_pair") else _KINDS[asked["task"]]
        return "none" if self.show is None else self.show.kind

    @property
    def name(self) -> str:
        """The displayed name: the run's directory, preceded by its parent if the directory is named "run"."""
        here = self.path.resolve()
        return "/".join(here.parts[-2:]) if here.name == "run" else here.name

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes; None if unknown."""
        named = (self.request or {}).get("classes")
        if named is None and self._is_shown and self._show is not None:
            named = self._show.classes
        return None if named is None else list(named)

    @property
    def live(self) -> bool:
        """Whether new examples can be explained, which needs the model."""
        return self._inputs is not None or (self.with_model and self.request is not None)

    @property
    def inputs(self) -> "Inputs":
        """The model and the data, loaded on first use."""
        with self._loading:
            if self._inputs is None:
                if self.request is None:
                    raise UnsupportedError(
                        "The request of this run, which names its model and data, is not recorded, so the page cannot "
                        "explain new examples. Use Python: eigentrace.open_run(path, task, data).explain(queries)."
                    )
                from eigentrace.loading import make_inputs

                self._inputs = make_inputs(self.request, self.path, trust=self._trust)
            return self._inputs

    def attached(self) -> "Run":
        """Return the run with its model and data attached."""
        with self._loading:
            if self.run.fitted is None or self.run.data is None:
                self._run = self.run.attached(self.inputs.task, self.inputs.data)
            return self.run

    def warm_up(self) -> None:
        """Load in advance what the next requests need."""
        try:
            _ = self.run, self.show
            if self.live:
                self.attached()
        except (EigentraceError, OSError) as error:
            self.trouble = str(error)
