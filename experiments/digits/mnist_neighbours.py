"""Proponents and opponents of digits with right and wrong labels: two figures of the paper's appendix, and numbers.

python -m experiments.digits.mnist_neighbours                            # embedded digits
python -m experiments.digits.mnist_neighbours --data FOLDER --seeds 3    # another tenth of MNIST for each seed
python -m experiments.digits.mnist_neighbours --small                    # a toy of it, on a CPU
"""

import base64
import sys
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.rendering.png import encode_png
from experiments.digits.parts import noise
from experiments.digits.parts.large_network import SMALL as SMALL_RECIPE
from experiments.digits.parts.large_network import Recipe, stream
from experiments.digits.parts.noise import NoisyDigits, Subject, dataset, source_name, subject
from experiments.digits.parts.picture_grid import Picture, Strip, strips_svg
from experiments.digits.parts.scores import SMALL, Size, once, own_arnoldi, timed, trainings
from experiments.shared.claims import (
    NOT_SEEN,
    SEEN,
    UNDECIDED,
    Claim,
    Finding,
    Pair,
    Records,
    Sample,
    order,
    paired,
    percent,
    seed_sample,
)
from experiments.shared.frame import Experiment, Part, Session, main
from harness.measure import Cell
from harness.plot import Drawing
from harness.record import Record, table

SHOWN = 5
"""Numbers of proponents and opponents for each test digit."""
KINDS = {"right": "right label", "wrong": "wrong label"}
ESTIMATORS = {"paper": "paper's estimator", "tail": "with tail"}
NORMALISED = {
    "no": "gradients as they are",
    "yes": "gradients at unit length",
    "features": "features at unit length",
}
_NORMALIZE: dict[str, Any] = {"no": None, "yes": "gradient", "features": "features"}
ASKED_OF = {"paper": tuple(NORMALISED), "tail": ("no", "yes")}
"""By estimator: with a tail, an example is not described by its features alone."""
SIDES = {"proponents": 1, "opponents": -1}
# Statements of the paper's text on its two test digits: a 5, and a 4 labeled 9.
PAPER = {
    ("right", "proponents", "no"): "5s labeled 5, the fifth a 3 labeled 5",
    ("right", "proponents", "yes"): "5s labeled 5",
    ("right", "opponents", "no"): "5s labeled otherwise",
    ("right", "opponents", "yes"): "5s labeled otherwise",
    ("wrong", "proponents", "no"): "4s labeled 9, the fifth a 4 labeled 8",
    ("wrong", "proponents", "yes"): "4s labeled 9",
    ("wrong", "opponents", "no"): "9s labeled 4",
    ("wrong", "opponents", "yes"): "4s labeled 4",
}

ABOUT = f"""\
**In the paper** (appendix, opponents and proponents): for two test digits, a 5 with its right label and a 4 labeled 9,
the training digits whose influence is highest (proponents: without them the loss would be higher) and lowest
(opponents), by the top 10 eigenpairs of the network of [the first table](mnist_large.md), with gradients as they are
and scaled to unit length. Its reading: neighbours make sense to people, and without scaling those with large gradients,
which often carry wrong labels, crowd out those that look alike.

**Here**, at the same size: the same with the paper's estimator (Hessian of 512 new digits for each of 200 products, top
10) and with this package's (Gauss-Newton, and a tail for all directions beyond the top 10). Test digits are shuffled by
the seed. The paper scales to unit length without saying what: the whole gradient, or its projection on the ten
directions, which is what forward mode computes. Both are here. The figures show the first 5 with its right label and
the first 4 labeled 9 (if no 4 is, the first 4 with a wrong label, or else the first wrong label of all), each neighbour
by its label as given / its true one. The table says the same of the first 100 test digits with a right and the first
100 with a wrong label: which share of their {SHOWN} proponents and {SHOWN} opponents have the label the test digit was
given, which show the same digit, and which carry a wrong label; by chance it would be about 10%, 10% and 20%. The
paper's column is what its text says of its two digits. Of the opponents of the second it says "without normalization"
twice; the order here follows its explanation. The second table has the share of 200 training digits that are their own
strongest proponent.

The full size takes a minute on a GPU and some ten on a CPU."""


@dataclass(frozen=True)
class Neighbours:
    """The training rows of highest and lowest influence on test digits, that of the figure first."""

    queries: Tensor  # (Q,) rows of the test digits
    rows: dict[str, Tensor]  # (Q, SHOWN) by side


def measure(session: Session) -> None:
    """Find proponents and opponents of test digits of both kinds with both estimators."""
    size = SMALL if session.small else Size(keeps=(10,))
    recipe, digits, count = (SMALL_RECIPE, 300, 10) if session.small else (Recipe(), 6000, 100)
    settings = {"digits": digits, "source": source_name(session), "epochs": recipe.epochs, "queries": count}
    part = session.part("neighbours", "Proponents and opponents", settings | {"shown": SHOWN, "size": repr(size)})
    for seed in session.seeds:
        trained = subject(session, recipe, seed, digits)
        methods = {
            "paper": et.Arnoldi.as_published(size.steps, max(size.keeps), size.sample, seed=seed, compile=False),
            "tail": own_arnoldi(size, seed, size.sample),
        }
        for name, method in methods.items():
            _estimated(part, trained, name, method, count)


def _estimated(part: Part, trained: Subject, name: str, method: et.Arnoldi, count: int) -> None:
    digits = trained.digits
    fit = once(lambda: timed(lambda: method.fit(trained.task, digits.data), digits.images.device).value)
    for normalised in ASKED_OF[name]:
        part.cell(
            f"{name}, itself, {normalised}, seed {trained.seed}",
            lambda normalised=normalised: own_proponents(  # type: ignore[misc]
                fit(), digits, trained.seed, count, _NORMALIZE[normalised]
            ),
        )
    for kind in KINDS:
        queries = queries_of(digits, kind, trained.seed, count)
        for normalised in ASKED_OF[name]:
            found = once(
                lambda queries=queries, normalised=normalised: neighbours(  # type: ignore[misc]
                    fit(), digits, queries, _NORMALIZE[normalised]
                )
            )
            for side in SIDES:
                words = f"{name}, {kind}, {side}, {normalised}, seed {trained.seed}"
                part.cell(
                    words,
                    lambda found=found, side=side: (  # type: ignore[misc]
                        shares(digits, found(), side) | {"figure": _pictured(digits, found(), side)}
                    ),
                )


def queries_of(digits: NoisyDigits, kind: str, seed: int, count: int) -> Tensor:  # (1 + count,)
    """Return test digits of a kind: that of the figure, then the others in the order of the seed."""
    order = torch.randperm(len(digits.test_labels), generator=stream(seed, "test digits"))
    given, true = digits.test_labels.cpu()[order], digits.test_true_labels.cpu()[order]
    of_kind = (given == true) if kind == "right" else (given != true)
    wishes = [true == 5] if kind == "right" else [(true == 4) & (given == 9), true == 4, true >= 0]
    shown = next(order[of_kind & wish] for wish in wishes if bool((of_kind & wish).any()))[:1]
    return torch.cat([shown, order[of_kind][:count]])


def neighbours(fitted: et.Fitted, digits: NoisyDigits, queries: Tensor, normalize: Any) -> Neighbours:
    """Find the training digits of highest and lowest influence on test digits, strongest first."""
    asked = dataset(digits.test_images[queries], digits.test_labels[queries])
    scores = fitted.influence(digits.data, asked, normalize=normalize).cpu()
    return Neighbours(queries, {side: (sign * scores).topk(SHOWN, dim=1).indices for side, sign in SIDES.items()})


def own_proponents(fitted: et.Fitted, digits: NoisyDigits, seed: int, count: int, normalize: Any) -> Cell:
    """Return the percentage of twice as many training digits that are their own strongest proponent."""
    rows = torch.randperm(len(digits.labels), generator=stream(seed, "training digits"))[: 2 * count].sort().values
    scores = fitted.influence(digits.data, digits.data.take(rows.numpy()), normalize=normalize).cpu()
    return {"itself": 100 * float((scores.argmax(dim=1) == rows).double().mean())}


def shares(digits: NoisyDigits, found: Neighbours, side: str) -> Cell:
    """Return the percentages of neighbours with the same label, the same true class, or a wrong label."""
    rows, queries = found.rows[side][1:], found.queries[1:]
    given, true = digits.labels.cpu()[rows], digits.true_labels.cpu()[rows]
    same = {
        "same_given": given == digits.test_labels.cpu()[queries][:, None],
        "same_digit": true == digits.test_true_labels.cpu()[queries][:, None],
        "wrong": given != true,
    }
    return {key: 100 * float(value.double().mean()) for key, value in same.items()}


def _pictured(digits: NoisyDigits, found: Neighbours, side: str) -> list[dict[str, Any]]:
    """Record the images of the figure, so that it can be drawn again without the data."""
    query, rows = int(found.queries[0]), found.rows[side][0]
    test = _picture(digits.test_images, digits.test_labels, digits.test_true_labels, query)
    return [test, *(_picture(digits.images, digits.labels, digits.true_labels, int(row)) for row in rows)]


def _picture(images: Tensor, given: Tensor, true: Tensor, row: int) -> dict[str, Any]:
    pixels = (images[row, 0] * 255).round().byte().cpu().numpy().astype(np.uint8)
    png = base64.b64encode(encode_png(pixels)).decode("ascii")
    return {"png": png, "given": int(given[row]), "true": int(true[row])}


def tables(records: Records, *, published: bool = False) -> list[str]:
    """Return the table of what neighbours have in common with their test digits, with the paper's statements."""
    cells = records["neighbours"]["cells"]
    headings = (
        "test digit, neighbours, gradients",
        "by",
        "same label",
        "same digit",
        "wrong label",
        "the paper's digit",
    )
    body = []
    for kind, kind_words in KINDS.items():
        for side in SIDES:
            for normalised, words in NORMALISED.items():
                for name, estimator in ESTIMATORS.items():
                    if normalised not in ASKED_OF[name] or (published and name != "paper"):
                        continue
                    found = [c for key, c in cells.items() if key.startswith(f"{name}, {kind}, {side}, {normalised},")]
                    numbers = [_mean(found, key) for key in ("same_given", "same_digit", "wrong")]
                    scaled = "no" if normalised == "no" else "yes"
                    said = PAPER[kind, side, scaled] if name == "paper" else "–"
                    body.append((f"{kind_words}, {side}, {words}", estimator, *numbers, said))
    more = [] if published else ["", *_themselves(cells)]
    return [*trainings(records.values()), *table(headings, body), *more]


def _themselves(cells: dict[str, Cell]) -> list[str]:
    rows = []
    for name, estimator in ESTIMATORS.items():
        for normalised in ASKED_OF[name]:
            found = [cell for key, cell in cells.items() if key.startswith(f"{name}, itself, {normalised},")]
            rows.append((f"{estimator}, {NORMALISED[normalised]}", _mean(found, "itself")))
    return table(("training digits that are their own strongest proponent", "share"), rows)


def _mean(cells: list[Cell], key: str) -> str:
    values = [cell[key] for cell in cells if key in cell]
    return f"{mean(values):.0f}%" if values else "–"


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw the neighbours of one test digit of each kind, for the first seed."""
    record = records["neighbours"]
    return {kind: drawing for kind in KINDS if (drawing := _figure(record, kind)) is not None}


def _figure(record: Record, kind: str) -> Drawing | None:
    strips, query = [], None
    for name, estimator in ESTIMATORS.items():
        for normalised in ASKED_OF[name]:
            words = NORMALISED[normalised]
            for side in SIDES:
                cell = record["cells"].get(f"{name}, {kind}, {side}, {normalised}, seed 0", {})
                if "figure" in cell:
                    query, *found = (Picture(**picture) for picture in cell["figure"])
                    strips.append(Strip(f"{estimator}, {words}", side, found))
    if query is None:
        return None
    title = f"A test digit with a {KINDS[kind]} and its neighbours (label given / true)"
    return partial(strips_svg, title, query, strips)


_DIGITS = 100
"""Test digits of each kind: their neighbours, not independent of each other, count once."""


def _share(records: Records, kind: str, side: str, normalised: str, key: str) -> Sample:
    row = f"paper, {kind}, {side}, {normalised}"
    found = seed_sample(records, "neighbours", row, key)
    first = percent(records, next(iter(found.places.values())), _DIGITS, scale=1)
    return replace(found, deviation=first.deviation)


def _cleared(records: Records) -> list[Pair]:
    shares = (_share(records, "right", "proponents", normalised, "wrong") for normalised in ("no", "yes"))
    return [paired("as they are against unit length, ", shares)]


def _become_right(records: Records) -> list[Pair]:
    shares = (_share(records, "wrong", "opponents", normalised, "same_digit") for normalised in ("yes", "no"))
    return [paired("unit length against as they are, ", shares)]


def _same_label(records: Records) -> Finding:
    shares = [_share(records, "wrong", "proponents", normalised, "same_given") for normalised in ("no", "yes")]
    told = f"{shares[0].mean:.0f}% of them, {shares[1].mean:.0f}% at unit length, for {_DIGITS} digits."
    least = min(share.mean - 2 * (share.deviation or 0.0) for share in shares)
    most = min(share.mean + 2 * (share.deviation or 0.0) for share in shares)
    return Finding(SEEN if least > 50 else NOT_SEEN if most < 50 else UNDECIDED, told)


CLAIMS = (
    order(
        "Gradients at unit length clear wrong labels out of the proponents of a rightly labelled digit (paper: one "
        "digit, 1 of 5 to 0 of 5).",
        f"Percent of proponents with a wrong label, {_DIGITS} digits",
        _cleared,
        is_main=True,
    ),
    order(
        "At unit length, opponents of a wrongly labelled digit are digits of its true class (paper: one digit, all).",
        f"Percent of opponents, {_DIGITS} digits",
        _become_right,
    ),
    Claim(
        "Most proponents of a wrongly labelled digit carry the same wrong label (paper: one digit, 4 or 5 of 5).",
        _same_label,
    ),
)

VERDICT = """\
The tail changes most where the paper's ten directions see least: with it, most proponents of a wrongly labelled digit
carry the same wrong label. What is scaled to unit length matters: few digits are their own strongest proponent by the
length of the whole gradient, and every second one is by that of its features, the projection on the ten directions."""

EXPERIMENT = Experiment(
    name="mnist_neighbours",
    title="Proponents and opponents in MNIST",
    about=ABOUT,
    parts={"neighbours": measure},
    tables=tables,
    summary=partial(tables, published=True),
    figures=figures,
    options=noise.options,
    needed=noise.NEEDED,
    verdict=VERDICT,
    claims=CLAIMS,
    area="digits",
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, sys.argv[1:]))
