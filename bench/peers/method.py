"""The interface of methods, and their list: eigentrace's, the baselines, and every peer with its package."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Protocol

from torch import Tensor

from bench.peers.problem import Problem


class Fit(Protocol):
    """A fitted method. Scores are positive for proponents; self-scores are high for suspicious examples."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings to try, which share the fit; the first is timed."""
        ...

    def self_scores(self, setting: str) -> Tensor:  # (N,)
        """Score every training example against itself."""
        ...

    def cross_scores(self, setting: str) -> Tensor:  # (Q, N)
        """Score every training example against every query."""
        ...


Fitter = Callable[[Problem, Path], Fit]
"""Fits a method to a problem; the folder is temporary."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table."""

    name: str
    """Name on the command line."""
    title: str
    """Name on the page."""
    at: str
    """Its fitter as "module:function", imported only in the process that runs it."""
    package: str | None = None
    """Name of its distribution; None if it needs only eigentrace."""
    module: str | None = None
    """The module that must be importable."""
    has_self: bool = True
    """Whether it scores examples against themselves."""
    has_cross: bool = True
    """Whether it scores examples against queries."""
    ensembles: bool = False
    """Whether its fitter uses all of a problem's networks at once; scores of other methods are averaged."""

    @property
    def is_installed(self) -> bool:
        """Whether the package can be imported."""
        return self.module is None or util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Name and version of the package."""
        if self.package is None:
            import eigentrace

            return f"eigentrace {eigentrace.__version__}"
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return self.package

    def fitter(self) -> Fitter:
        """Import the method."""
        module, function = self.at.split(":")
        return getattr(import_module(f"bench.peers.{module}"), function)


def _ours(name: str, title: str, at: str, *, has_cross: bool = True) -> Entry:
    return Entry(name=name, title=title, at=f"ours:{at}", has_cross=has_cross)


def _peer(package: str, module: str, name: str, title: str, at: str, **options: bool) -> Entry:
    return Entry(name=name, title=title, at=at, package=package, module=module, **options)


_ALL = (
    _ours("arnoldi", "eigentrace Arnoldi", "arnoldi"),
    _ours("arnoldi-truncated", "eigentrace Arnoldi, truncated", "truncated"),
    _ours("arnoldi-hessian", "eigentrace Arnoldi on the Hessian, truncated", "hessian"),
    _ours("tracin", "eigentrace TracIn over checkpoints", "tracin"),
    _ours("loss", "the loss alone", "loss", has_cross=False),
    _ours("mean-loss", "mean loss over checkpoints", "mean_loss", has_cross=False),
    _ours("gradient-norm", "gradient norm; inner product of gradients", "gradient"),
    _peer("captum", "captum", "captum-arnoldi", "Captum Arnoldi", "with_captum:arnoldi"),
    _peer("captum", "captum", "captum-tracin", "Captum TracInCP", "with_captum:tracin"),
    _peer("captum", "captum", "captum-tracin-fast", "Captum TracInCPFast (last layer)", "with_captum:tracin_fast"),
    _peer("pyDVL", "pydvl", "pydvl-arnoldi", "pyDVL Arnoldi", "with_pydvl:arnoldi"),
    _peer("pyDVL", "pydvl", "pydvl-woodbury", "pyDVL Arnoldi, Woodbury", "with_pydvl:woodbury"),
    _peer("pyDVL", "pydvl", "pydvl-ekfac", "pyDVL EK-FAC (linear layers)", "with_pydvl:ekfac"),
    _peer("dattri", "dattri", "dattri-arnoldi", "dattri Arnoldi", "with_dattri:arnoldi"),
    _peer("dattri", "dattri", "dattri-ekfac", "dattri EK-FAC (linear layers)", "with_dattri:ekfac"),
    _peer("dattri", "dattri", "dattri-trak", "dattri TRAK", "with_dattri:trak", ensembles=True),
    _peer("kronfluence", "kronfluence", "kronfluence", "Kronfluence EK-FAC", "with_kronfluence:ekfac"),
    _peer("traker", "trak", "trak", "TRAK", "with_trak:trak", ensembles=True),
    _peer("cleanlab", "cleanlab", "cleanlab", "cleanlab, 5-fold probabilities", "with_cleanlab:folds", has_cross=False),
)
METHODS: dict[str, Entry] = {entry.name: entry for entry in _ALL}
"""All methods by name, in the order of the page."""


def is_asked(entry: Entry, problem: Problem) -> bool:
    """Return whether a method computes the scores that a problem needs."""
    return entry.has_cross if problem.examples.num_queries else entry.has_self
