"""The translation network shared by the experiments, and the fits of its curvature, in a cache."""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, cast, get_args

import torch

import eigentrace as et
from eigentrace.errors import ConvergenceWarning, PrecisionWarning
from eigentrace.fits.eigen_fit import EigenFit
from eigentrace.fits.load import load
from eigentrace.task.parameters import Params
from experiments.shared.frame import Session
from experiments.shared.kept import kept, name_of
from experiments.shared.needed import Needed
from experiments.translation.parts.corpora import FILES, Corpora, Ordered, Pairs, translation_task
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, train_transformer
from harness.command import positive, share
from harness.files import alone
from harness.measure import Cell, Precision, clocked, with_seconds
from harness.models import Transformer

KEEPS = (10, 20)
ALL, LAST = "all layers", "last 3 decoder layers"
LAYERS = (ALL, LAST)
"""The layers of the paper's table."""
EMBEDDING, ENCODER, DECODER, NO_EMBEDDING = "embedding", "encoder", "decoder", "without the embedding"
PARAMETERS: dict[str, Params] = {
    EMBEDDING: ["embedding.*"],
    ENCODER: ["encoder.*", "last_norms.0.*"],
    DECODER: ["decoder.*", "last_norms.1.*"],
    NO_EMBEDDING: ["encoder.*", "decoder.*", "last_norms.*"],
}
"""Parameters of other layers. The embedding is that of source, target and output; the first three are all there is."""
Estimator = Literal["Arnoldi", "Arnoldi + tail"]
PAPER_WAY: Estimator = "Arnoldi"
OUR_WAY: Estimator = "Arnoldi + tail"


FIRST = Recipe()
"""The training that most experiments take their network from: dropout 0.3, 2,000 steps."""
CHOSEN = replace(FIRST, dropout=0.5, steps=2900)
"""The training with the lowest held-out loss of those tried, by `mt_training`."""


@dataclass(frozen=True)
class Size:
    """Sizes shared by both experiments."""

    recipe: Recipe = field(default_factory=Recipe)
    steps: int = 200
    sample: int = 512
    """Number of pairs that every product of the paper's iteration samples anew."""
    tail_steps: int = 60
    tail_sample: int = 1024
    """Number of pairs in the fixed sample of our iteration."""
    product_batch: int = 128
    """Batch size of curvature products."""
    batch: int = 512
    """Batch size of scoring."""
    precision: Precision = "fp32"
    """Precision of curvature."""
    basis: Precision = "bf16"
    """What the vectors of the iteration and the directions are held in: 24 GB for 200 of them, and no product of
    more numbers than cuBLAS counts, where fp32 would take twice that and blocks."""
    score_precision: Precision = "fp32"
    """Precision of scores."""


SMALL_RECIPE = Recipe(
    32, 2, 2, words=240, steps=100, tokens=400, row=80, lr=1e-2, warm_up=30, dropout=0.0, save_every=50
)
SMALL = Size(SMALL_RECIPE, steps=24, sample=32, tail_steps=24, tail_sample=64, product_batch=64, batch=128)


@dataclass(frozen=True)
class Network:
    """A trained network and its training pairs."""

    model: Transformer
    train: Pairs
    size: Size
    path: Path
    """The file of its weights; its fits are in the same folder."""
    unseen: Mapping[str, Pairs]
    """Held-out pairs: `withheld` from the same corpus, `dev` of news and captions."""
    seconds: float = 0.0
    """Seconds to train or load it."""

    @cached_property
    def facts(self) -> Cell:
        """Return the quality of the network."""
        facts: Cell = {}
        for where, pairs in {"train": self.train, **self.unseen}.items():
            facts |= {f"{where}_{key}": value for key, value in held_out(self.model, pairs.some(4096)).items()}
        parameters = list(self.model.parameters())
        count = sum(p.numel() for p in parameters)
        facts |= {"parameters": count, "seconds": self.seconds, "pairs": len(self.train)}
        # A digest of the weights, to compare trainings.
        return facts | {"weights": name_of("sha256", "", *parameters)}

    def task(self, layers: str) -> et.Task:
        """Return the task with the parameters of some layers; the last decoder blocks are half of them: 3 of 6."""
        depth = self.size.recipe.depth
        last = [f"decoder.{number}.*" for number in range(depth - depth // 2, depth)]
        params = {ALL: "trainable", LAST: last, **PARAMETERS}
        return translation_task(self.model, params[layers])

    @property
    def compute(self) -> et.Compute:
        """The computation of scores."""
        return et.Compute(precision=self.size.score_precision, batch="data")

    def fit(self, layers: str, estimator: Estimator) -> tuple[EigenFit, float]:
        """Fit on the training pairs, or load the fit; return it with the seconds of either."""
        method, task = self.method(estimator), self.task(layers)
        path = self.path.with_name(f"{self.path.stem}_{sha256(f'{layers} {method}'.encode()).hexdigest()[:16]}")

        def work() -> EigenFit:
            with warnings.catch_warnings():
                # Products on new pairs each time settle on nothing. A finite difference crosses kinks of ReLU, so that
                # every Hessian of this network is warned about; a test compares it with double backward.
                for expected in (ConvergenceWarning, PrecisionWarning):
                    warnings.simplefilter("ignore", expected)
                return cast(EigenFit, method.fit(task, Ordered.of(self.train, self.size.product_batch).data))

        if not path.exists():
            # If several processes need it, one fits; the seconds of the others are those of loading.
            with alone(path):
                if not path.exists():
                    fitted, took = with_seconds(work, task.layout.device)
                    fitted.save(path)
                    return fitted, took
        return with_seconds(lambda: cast(EigenFit, load(path, task)), task.layout.device)

    def method(self, estimator: Estimator) -> et.Arnoldi:
        """Return the settings of a fit: the paper's, or Gauss-Newton on a fixed sample with the tail."""
        size, keep, basis = self.size, max(KEEPS), et.Basis(dtype=self.size.basis)
        if estimator == PAPER_WAY:
            return et.Arnoldi.as_published(
                size.steps, keep, size.sample, precision=size.precision, basis=basis, compile=False
            )
        return et.Arnoldi(
            size.tail_steps, keep, sample=size.tail_sample, precision=size.precision, basis=basis, compile=False
        )


def load_network(session: Session, size: Size | None = None) -> tuple[Network, Corpora]:
    """Train or load the network of a session, or one of another size, once for all parts of a command."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return _loaded(Corpora.of(session), size or size_of(session), session.device)


def untrained_network(session: Session) -> Network:
    """Return a network of the same size with random weights, to measure what does not depend on them."""
    corpora, size = Corpora.of(session), size_of(session)
    train = corpora.pairs("train").to(session.device)
    return Network(make_transformer(size.recipe, session.device, seed=0), train, size, corpora.cache, {})


@lru_cache(maxsize=1)
def _loaded(corpora: Corpora, size: Size, device: torch.device) -> tuple[Network, Corpora]:
    train = corpora.pairs("train").to(device)
    recipe = size.recipe
    path = weights_of(corpora, recipe, train)
    model = make_transformer(recipe, device, seed=0)
    seconds = clocked(
        lambda: kept(
            path, model, lambda _: train_transformer(model, train, recipe, 0, path.with_suffix(".unfinished"))
        ),
        device,
    )
    unseen = {name: corpora.pairs(name).to(device) for name in ("withheld", "dev")}
    return Network(model, train, size, path, unseen, seconds), corpora


def weights_of(corpora: Corpora, recipe: Recipe, train: Pairs) -> Path:
    """Return the file of the weights that a training gives."""
    return corpora.cache / f"{name_of('translation', recipe, train.source, train.target)}.pt"


def part_of(name: str, recipe: Recipe) -> str:
    """Return the name of a part's numbers: those of the chosen network stand beside those of the first."""
    return f"{name}_chosen" if recipe == CHOSEN else name


def size_of(session: Session) -> Size:
    """Return the sizes of the command line."""
    if session.small:
        return SMALL
    settings = session.settings
    return Size(
        replace(Recipe(), steps=settings.steps, dropout=settings.dropout),
        product_batch=settings.product_batch,
        precision=settings.precision,
        score_precision=settings.score_precision,
    )


def needed(*names: str) -> Needed:
    """Return the files that all parts of an experiment read: those of the network, and these."""
    files = [(FILES[name],) for name in ("train", "dev", *names)]
    return Needed(lambda settings, part: files, origin="docs/translation_data.md says where they come from.")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the translation experiments."""
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/experiments"), help="where networks and fits (6 GB) are kept"
    )
    parser.add_argument("--steps", type=positive, default=Recipe.steps, help="steps of training")
    parser.add_argument("--dropout", type=share, default=Recipe.dropout, help="dropout of training")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32", help="of curvature")
    parser.add_argument("--score-precision", choices=get_args(Precision), default="fp32", help="of scores with a fit")
    parser.add_argument(
        "--product-batch", type=positive, default=Size.product_batch, help="pairs per pass of a product"
    )
