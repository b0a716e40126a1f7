"""The page of `experiments.images.image_exemplars`: numbers on the paper's findings, and grids of images."""

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import mean

from experiments.images.parts.exemplar_grid import explained_svg, ranked_svg
from harness.measure import Cell
from harness.plot import Drawing
from harness.record import Notes, Record, shown, table

NORMALISATIONS = {"paper": (None, "gradient", "features"), "ours": (None, "gradient")}
"""Of each fit: with a tail, an example is not described by its features alone."""
FITS = {
    "paper": "the paper's: Hessian, truncated",
    "ours": "ours: Gauss-Newton, with tail",
}
RANKINGS = FITS | {"loss": "the loss alone"}
_NORMALISED = {"none": "no", "gradient": "gradients", "features": "features"}
BANDS = {
    "90–100%": (9, 10, "mislabelled, ambiguous or cluttered images"),
    "40–60%": (4, 6, "several objects, or a rich background"),
    "0–10%": (0, 1, "the object large, by itself"),
}
"""Ranges of deciles, with the paper's findings."""
_GONE = "those gone; itself the highest"
FINDINGS = {"none": "outliers of large norm among the proponents", "gradient": _GONE, "features": _GONE}

ABOUT = """\
The paper's appendix shows photos of ImageNet by the self-influence that a ResNet-50 gives them (ten projectors), and
the five strongest proponents and opponents of two random training images, with and without gradients of unit length,
among the images of the ten most probable labels. It gives pictures and describes them; it has no numbers. The tables
put numbers beside its descriptions.

What runs here is smaller. *CIFAR-10*: its first 15,000 training images, a residual network of eight layers trained with
flips and shifts, once on the published labels and once on labels that people gave (CIFAR-10N, the worst of three), of
which it is known which are wrong; and a published ResNet-20, trained on all 50,000 images, which is the network of
`python -m experiments.images.resnet_cifar`. *Photos*: 250 of ImageNet at 64 pixels, 25 for each of Imagenette's ten
classes, and a network like the first trained from scratch with crops, mirroring and changes of colour. So few photos
make a weak network: its accuracy on 60 others is stated. For twenty of the 250 at most two of five people chose the
given label; nobody was asked about most of the others. These twenty count as wrong, but need not be outliers here:
twelve of them are labelled "cassette player", and what people took them for (a thing much like it, of ImageNet's
thousand) need not be among the ten classes, so that no photo would contradict them.

Each problem is fitted with the paper's settings (200 products of the Hessian, each on 512 new images, ten eigenpairs,
nothing beyond them) and with ours (200 products of Gauss-Newton on 2,048 images, fifty
eigenpairs, and a tail), on all photos where there are fewer. Then it is scored into a run and asked by `run.explain`.
Unit length is that of whole gradients or of features, the projections on the ten directions: the paper does not say
which it took. With ten classes, ten labels would be no filter: proponents and opponents come from the three most
probable. A picture is a candidate for its own explanation, as in the paper, unless its label is not among those; what
is said about proponents and opponents leaves it out. 100 random training pictures were explained, and the first two are
drawn.

The full size takes minutes on a GPU; `--small` puts digits in the place of both, smaller networks and fewer products.
Photos come under ImageNet's terms, for research only: they are drawn with `--photos-figure` alone."""


def tables(records: Mapping[str, Record]) -> list[str]:
    """Return the tables of every problem."""
    notes = Notes()
    lines = [line for record in records.values() for line in _problem(record, notes)]
    return lines + (["", *notes.lines()] if notes.texts else [])


def _problem(record: Record, notes: Notes) -> Iterator[str]:
    facts, cells = record["facts"], record["cells"]
    yield from (f"### {record['title']}", "")
    yield (
        f"{record['settings']['examples']:,} pictures, {facts['parameters']:,} parameters; "
        f"{facts['accuracy_given']:.1%} of the given labels are predicted, and {facts['accuracy_test']:.1%} of "
        f"{facts['num_test']:,} test pictures."
    )
    names = {key: name for key, name in RANKINGS.items() if f"ranked/{key}" in cells}
    yield from ("", "Share that the network predicts as labelled, by quantile of the score:", "")
    yield from table(["quantile", *names.values(), "paper"], [_band(band, names, cells, notes) for band in BANDS])
    wrong = [_wrong(name, cells[f"ranked/{key}"]) for key, name in names.items()]
    if any(wrong):
        headings = ["ranked by", "AUC", "AP", *(f"{10 * k}–{10 * k + 10}%" for k in range(10))]
        yield from ("", "Wrong labels: how well they are found, in percent, and their share in each tenth:", "")
        yield from table(headings, [row for row in wrong if row])
    headings = ["score", "Spearman with the loss", "below zero", "fit, s", "all scored, s"]
    yield from ("", *table(headings, [_score(name, cells[f"ranked/{key}"], notes) for key, name in names.items()]))
    yield from ("", *_explained(cells, notes), "")


def _band(band: str, names: Mapping[str, str], cells: Mapping[str, Cell], notes: Notes) -> list[str]:
    low, high, finding = BANDS[band]
    row = [band]
    for key in names:
        cell = cells[f"ranked/{key}"]
        found = cell.get("right_by_decile")
        row.append(f"{mean(found[low:high]):.1%}" if found else shown(cell, "", "", notes))
    return [*row, finding]


def _wrong(name: str, cell: Cell) -> list[str]:
    if "bad_by_decile" not in cell:
        return []
    return [name, f"{cell['auc']:.1f}", f"{cell['ap']:.1f}", *(f"{share:.0%}" for share in cell["bad_by_decile"])]


def _score(name: str, cell: Cell, notes: Notes) -> list[str]:
    marks = "".join(notes.mark(text) for text in cell.get("warnings", ()))
    return [
        name + marks,
        shown(cell, "spearman_with_loss", ".2f", notes),
        shown(cell, "negative", ".1%", notes),
        shown(cell, "fit_seconds", ".1f", notes),
        shown(cell, "score_seconds", ".1f", notes),
    ]


def _explained(cells: Mapping[str, Cell], notes: Notes) -> list[str]:
    rows = []
    for fit, name in FITS.items():
        for way, normalised in _NORMALISED.items():
            cell = cells.get(f"explained/{fit}/{way}")
            if cell is not None:
                rows.append([name, normalised, *_answers(cell, notes), FINDINGS[way]])
    if not rows:
        return []
    headings = ["explained by", "normalised", "proponents with its label", "opponents with its label"]
    headings += ["norm of proponents", "its quantile", "different proponents", "itself first", "how", "s", "paper"]
    return ["Proponents and opponents of random training pictures, five each:", "", *table(headings, rows)]


def _answers(cell: Cell, notes: Notes) -> list[str]:
    keys = {
        "proponents_same_label": ".0%",
        "opponents_same_label": ".0%",
        "proponents_norm": ".3g",
        "proponents_norm_quantile": ".0%",
        "proponents_distinct": ".0%",
        "own_first": ".0%",
        "how": "",
        "seconds": ".1f",
    }
    return [shown(cell, key, pattern, notes) for key, pattern in keys.items()]


def figures(records: Mapping[str, Record], *, small: bool) -> dict[str, Drawing]:
    """Draw the rankings and the explanations of each problem whose pictures were kept."""
    drawn = dict[str, Drawing]()
    for problem, record in records.items():
        classes = record["facts"]["classes"]
        cells = {name: cell for name, cell in record["cells"].items() if "pictures" in cell}
        ranked = {name: cells[f"ranked/{fit}"] for fit, name in FITS.items() if f"ranked/{fit}" in cells}
        if ranked:
            drawn[f"{problem}_ranked"] = partial(ranked_svg, record["title"], ranked, classes)
        explained = {
            f"{fit}, {'as they are' if way == 'none' else f'unit {_NORMALISED[way]}'}": cells[f"explained/{fit}/{way}"]
            for fit in FITS
            for way in _NORMALISED
            if f"explained/{fit}/{way}" in cells
        }
        if explained:
            drawn[f"{problem}_explained"] = partial(explained_svg, record["title"], explained, classes)
    return drawn
