"""The translation network that the experiments share, and the fits of its curvature, kept for the next command."""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import torch

import eigentrace as et
from eigentrace.errors import ConvergenceWarning, PrecisionWarning
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.load import load
from experiments.shared.frame import Session
from experiments.shared.kept import kept, name_of
from experiments.shared.needed import Needed
from experiments.translation.parts.corpora import FILES, Corpora, Ordered, Pairs, translation_task
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, train_transformer
from harness.command import positive
from harness.files import alone
from harness.measure import Cell, Precision, clocked, with_seconds
from harness.models import Transformer

KEEPS = (10, 20)
ALL, LAST = "all layers", "last 3 decoder layers"
LAYERS = (ALL, LAST)
Estimator = Literal["Arnoldi", "Arnoldi + tail"]
PAPER_WAY: Estimator = "Arnoldi"
OUR_WAY: Estimator = "Arnoldi + tail"


@dataclass(frozen=True)
class Size:
    """How much of everything that both experiments need."""

    recipe: Recipe = field(default_factory=Recipe)
    steps: int = 200
    sample: int = 512
    """Pairs that every product of the paper's iteration draws anew."""
    tail_steps: int = 60
    tail_sample: int = 1024
    """Pairs that all products of ours are taken on."""
    product_batch: int = 128
    """Pairs of a curvature product that go through the network together."""
    batch: int = 512
    """Pairs that are scored together."""
    precision: Precision = "fp32"
    """Of curvature."""
    basis: Precision = "bf16"
    """What the vectors of the iteration and the directions are held in: 24 GB for 200 of them, and no product of
    more numbers than cuBLAS counts, where fp32 would take twice that and blocks."""
    score_precision: Precision = "fp32"
    """Of scores with a fit."""


SMALL_RECIPE = Recipe(
    32, 2, 2, words=240, steps=100, tokens=400, row=80, lr=1e-2, warm_up=30, dropout=0.0, save_every=50
)
SMALL = Size(SMALL_RECIPE, steps=24, sample=32, tail_steps=24, tail_sample=64, product_batch=64, batch=128)


@dataclass(frozen=True)
class Network:
    """A trained network and the pairs it was trained on."""

    model: Transformer
    train: Pairs
    size: Size
    path: Path
    """Where its weights are kept; its fits lie beside them."""
    unseen: Mapping[str, Pairs]
    """Held out: `withheld` from the same corpus, `dev` of news and captions."""
    seconds: float = 0.0
    """It took to train or read it."""

    @cached_property
    def facts(self) -> Cell:
        """Say what the network is worth."""
        facts: Cell = {}
        for where, pairs in {"train": self.train, **self.unseen}.items():
            some = np.sort(np.random.default_rng(0).permutation(len(pairs))[:4096])
            facts |= {f"{where}_{key}": value for key, value in held_out(self.model, pairs.take(some)).items()}
        parameters = list(self.model.parameters())
        count = sum(p.numel() for p in parameters)
        facts |= {"parameters": count, "seconds": self.seconds, "pairs": len(self.train)}
        # Whoever trains it again can tell whether it is the same.
        return facts | {"weights": name_of("sha256", "", *parameters)}

    def task(self, layers: str) -> et.Task:
        """Make the task of all parameters, or of the blocks at the end of the decoder: 3 of 6, half at toy size."""
        depth = self.size.recipe.depth
        last = [f"decoder.{number}.*" for number in range(depth - depth // 2, depth)]
        return translation_task(self.model, "trainable" if layers == ALL else last)

    @property
    def compute(self) -> et.Compute:
        """How pairs are scored."""
        return et.Compute(precision=self.size.score_precision, batch="data")

    def fit(self, layers: str, estimator: Estimator) -> tuple[EigenFit, float]:
        """Take the curvature of the training pairs, or read it back; return it with the seconds that took."""
        method, task = self.method(estimator), self.task(layers)
        path = self.path.with_name(f"{self.path.stem}_{sha256(f'{layers} {method}'.encode()).hexdigest()[:16]}")

        def work() -> EigenFit:
            with warnings.catch_warnings():
                # Products on new pairs each time settle on nothing. A finite difference crosses kinks of ReLU, so that
                # every Hessian of this network is warned about; a test compares it with double backward.
                for expected in (ConvergenceWarning, PrecisionWarning):
                    warnings.simplefilter("ignore", expected)
                return method.fit(task, Ordered.of(self.train, self.size.product_batch).data)

        if not path.exists():
            # Several processes may need it at this time: one fits. The seconds of the others are those of reading.
            with alone(path):
                if not path.exists():
                    fitted, took = with_seconds(work, task.layout.device)
                    fitted.save(path)
                    return fitted, took
        return with_seconds(lambda: cast(EigenFit, load(path, task)), task.layout.device)

    def method(self, estimator: Estimator) -> et.Arnoldi:
        """Return the settings: the paper's, or Gauss-Newton on a fixed sample with the tail."""
        size, keep, basis = self.size, max(KEEPS), et.Basis(dtype=self.size.basis)
        if estimator == PAPER_WAY:
            return et.Arnoldi(
                size.steps,
                keep,
                curvature="hessian",
                tail=None,
                sample=size.sample,
                spread=True,
                precision=size.precision,
                basis=basis,
                compile=False,
            )
        return et.Arnoldi(
            size.tail_steps, keep, sample=size.tail_sample, precision=size.precision, basis=basis, compile=False
        )


def load_network(session: Session) -> tuple[Network, Corpora]:
    """Train the network of a session, or read it back: once for all parts of a command."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return _loaded(Corpora.of(session), size_of(session), session.device)


@lru_cache(maxsize=1)
def _loaded(corpora: Corpora, size: Size, device: torch.device) -> tuple[Network, Corpora]:
    train = corpora.pairs("train").to(device)
    recipe = size.recipe
    path = corpora.cache / f"{name_of('translation', recipe, train.source, train.target)}.pt"
    model = make_transformer(recipe, device, seed=0)
    seconds = clocked(
        lambda: kept(
            path, model, lambda _: train_transformer(model, train, recipe, 0, path.with_suffix(".unfinished"))
        ),
        device,
    )
    unseen = {name: corpora.pairs(name).to(device) for name in ("withheld", "dev")}
    return Network(model, train, size, path, unseen, seconds), corpora


def size_of(session: Session) -> Size:
    """Return the sizes that the command line asks for."""
    if session.small:
        return SMALL
    settings = session.settings
    return Size(
        replace(Recipe(), steps=settings.steps),
        product_batch=settings.product_batch,
        precision=settings.precision,
        score_precision=settings.score_precision,
    )


def needed(*names: str) -> Needed:
    """Say which files all parts of an experiment read: those of the network, and these."""
    files = [(FILES[name],) for name in ("train", "dev", *names)]
    return Needed(lambda settings, part: files, origin="docs/translation_data.md says where they come from.")


def options(parser: argparse.ArgumentParser) -> None:
    """Add what the translation experiments understand."""
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/experiments"), help="where networks and fits (6 GB) are kept"
    )
    parser.add_argument("--steps", type=positive, default=Recipe.steps, help="steps of training")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32", help="of curvature")
    parser.add_argument("--score-precision", choices=get_args(Precision), default="fp32", help="of scores with a fit")
    parser.add_argument(
        "--product-batch", type=positive, default=Size.product_batch, help="pairs per pass of a product"
    )
