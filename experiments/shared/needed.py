"""The data files that an experiment reads, checked before anything is measured."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.refusal import refuse

Wanted = tuple[str, ...]
"""File names or patterns, of which one must match."""


def no_files(settings: argparse.Namespace, part: str) -> Sequence[Wanted]:
    """Read nothing."""
    return ()


@dataclass(frozen=True)
class Needed:
    """The data files that an experiment needs."""

    files: Callable[[argparse.Namespace, str], Sequence[Wanted]] = no_files
    """Returns the files that a part reads with the settings of the command line."""
    is_embedded: bool = False
    """Whether embedded data replaces the folder at full size too; with --small it always does."""
    public: frozenset[str] = frozenset()
    """The files that --download fetches."""
    origin: str = ""
    """A sentence on the source of files that are not public."""

    @property
    def full_options(self) -> str:
        """The options that a command at full size needs."""
        return "" if self.is_embedded or self.files is no_files else " --data FOLDER"

    def check(self, settings: argparse.Namespace, parts: Sequence[str], everything: Sequence[str]) -> None:
        """Exit with a message if files of a command are missing.

        Args:
            settings: The parsed command line.
            parts: The parts to measure.
            everything: All parts of the experiment.
        """
        wanted = {part: list(self.files(settings, part)) for part in parts}
        names = list(dict.fromkeys(each for files in wanted.values() for each in files))
        folder: Path | None = settings.data
        if folder is None:
            self._check_none(settings, names)
            return
        if not names:
            return
        if not folder.is_dir() and (folder.exists() or not settings.download):
            refuse(f"--data {folder} is no folder. It should hold {_listed(names)}. Nothing was measured.")
        gone = [each for each in names if not self._is_there(folder, each, download=settings.download)]
        if gone:
            without = [part for part in everything if not set(gone) & set(self.files(settings, part))]
            ways = ["Put the files there"]
            ways += ["add --download to fetch what is public"] if any(self.public & set(each) for each in gone) else []
            ways += [f"measure the parts that need none of them: --parts {','.join(without)}"] if without else []
            said = f"--data {folder} does not hold {_listed(gone)}. {', or '.join(ways)}."
            refuse(f"{said} {self._origin}Nothing was measured.")

    def _check_none(self, settings: argparse.Namespace, names: Sequence[Wanted]) -> None:
        """Exit with a message if a folder is needed and none was given."""
        if names and settings.download and self.public:
            refuse("--download needs --data, the folder to fetch the files to. Nothing was measured.")
        if names and not self.is_embedded and not settings.small:
            fetched = " (--download fetches what is public)" if self.public else ""
            refuse(
                f"Give the folder of {_listed(names)} as --data{fetched}, or try --small, which needs no files. "
                f"{self._origin}Nothing was measured."
            )

    @property
    def _origin(self) -> str:
        return f"{self.origin} " if self.origin else ""

    def _is_there(self, folder: Path, names: Wanted, *, download: bool) -> bool:
        return (download and bool(self.public & set(names))) or any(any(folder.glob(name)) for name in names)


def _listed(files: Sequence[Wanted]) -> str:
    return ", ".join(" or ".join(names) for names in files)
