"""Choose dropout and number of steps of the translation network by its loss on pairs it has not seen.

python -m experiments.translation.mt_training --small          # a small grammar, on a CPU
python -m experiments.translation.mt_training --data FOLDER    # minutes on a GPU, with --workers 3

The weights with the lowest loss are kept in --cache, where the other experiments on translation find them.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.shared.frame import Experiment, Session, main
from experiments.shared.kept import keep
from experiments.translation.parts.corpora import Corpora, Pairs
from experiments.translation.parts.mt_training_page import ABOUT, STEPS, VERDICT, figures, row, tables
from experiments.translation.parts.network import FIRST, SMALL_RECIPE, needed, weights_of
from experiments.translation.parts.transformer import Recipe, held_out, make_transformer, train_transformer
from harness.measure import Cell, clocked
from harness.models import Transformer

PAIRS, SMALL_PAIRS = 4096, 100
"""Number of pairs on which each loss is taken."""
EVERY, SMALL_EVERY = 100, 25
"""Number of steps between them."""


@dataclass(frozen=True)
class Watched:
    """Losses during a training, after every so many steps; the weights with the lowest held-out loss are kept."""

    model: Transformer
    every: int
    pairs: dict[str, Pairs]
    """Pairs on which the loss is taken, by the name of the set; that of `withheld` decides."""
    file_of: Callable[[int], Path]
    """Returns the file of the weights after a number of steps."""
    steps: list[int]
    losses: dict[str, list[float]]

    @staticmethod
    def of(model: Transformer, every: int, pairs: dict[str, Pairs], file_of: Callable[[int], Path]) -> "Watched":
        """Begin to watch."""
        return Watched(model, every, pairs, file_of, [], {name: [] for name in pairs})

    @property
    def best(self) -> int:
        """The number of steps with the lowest held-out loss."""
        return self.steps[int(np.argmin(self.losses["withheld"]))]

    def look(self, steps: int) -> None:
        """Take the losses after some steps."""
        if steps % self.every:
            return
        before = self.best if self.steps else None
        self.steps.append(steps)
        for name, some in self.pairs.items():
            self.losses[name].append(held_out(self.model, some)["loss"])
        if self.best == steps:
            keep(self.file_of(steps), self.model.state_dict())
            if before is not None:
                self.file_of(before).unlink(missing_ok=True)


def measure(session: Session, dropout: float) -> None:
    """Train with one dropout and follow the losses."""
    steps = SMALL_RECIPE.steps if session.small else STEPS[dropout]
    recipe = replace(SMALL_RECIPE if session.small else FIRST, dropout=dropout, steps=steps)
    every = SMALL_EVERY if session.small else EVERY
    settings = {"recipe": asdict(recipe) | {"dropout": "by row", "steps": "by row"}, "every": every}
    part = session.part("trainings", "Trainings", settings)
    part.cell(row(dropout), lambda: _trained(session, recipe, every))


def _trained(session: Session, recipe: Recipe, every: int) -> Cell:
    torch.backends.cuda.matmul.allow_tf32 = False
    corpora, device = Corpora.of(session), session.device
    train = corpora.pairs("train").to(device)
    sets = {"train": train, **{name: corpora.pairs(name).to(device) for name in ("withheld", "dev")}}
    count = SMALL_PAIRS if session.small else PAIRS
    some = {name: pairs.some(count) for name, pairs in sets.items()}
    model = make_transformer(recipe, device, seed=0)
    watched = Watched.of(model, every, some, lambda steps: weights_of(corpora, replace(recipe, steps=steps), train))
    seconds = clocked(lambda: train_transformer(model, train, recipe, 0, after=watched.look), device)
    keep(weights_of(corpora, recipe, train), model.state_dict())
    place = watched.steps.index(watched.best)
    found = {f"{name}_loss": losses[place] for name, losses in watched.losses.items()}
    found |= {f"{name}_loss_last": losses[-1] for name, losses in watched.losses.items()}
    return found | {"best": watched.best, "seconds": seconds, "steps": watched.steps, "losses": watched.losses}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="where networks are kept")


EXPERIMENT = Experiment(
    "mt_training",
    "How long the translation network is trained, and with how much dropout",
    ABOUT,
    {row(dropout).replace(" ", "_").replace(".", "_"): partial(measure, dropout=dropout) for dropout in STEPS},
    tables,
    figures,
    options,
    VERDICT,
    needed=needed(),
    area="translation",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
