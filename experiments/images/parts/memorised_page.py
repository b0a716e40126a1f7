"""The page of memorisation: text, tables and figures."""

from functools import partial

from experiments.shared.frame import Records
from harness.measure import Cell
from harness.plot import Dot, Drawing, dots_svg
from harness.record import Notes, shown, table

MEASURES = ("probability", "loss")
SERIES = {"digits": "digits", "cifar": "CIFAR-10N", "cifar_cut": "CIFAR-10N, the cut"}
"""Names of the parts in the figure."""

ABOUT = """\
Feldman and Zhang (*What Neural Networks Memorize and Why*, 2020) call an example memorised if models predict its
label only when they are trained on it: the mean probability of the label over networks trained on random 70% of the
examples with it, minus the mean over those without it. `evaluate.memorization` measures this, in probability or in
loss, from `evaluate.retrain`. It takes hundreds of trainings. Self-influence takes one; how well does it predict the
ranking?

The paper on influence discusses memorisation, but states no correlation with it, so this page is not among [its
experiments](paper.md).

- Every network is trained on a random 70% of the examples by SGD at a constant learning rate (`evaluate.ManyModels`),
  and measured on all of them, with the labels that training uses.
- The scores are self-influences of three networks trained on all examples by the same recipe, with other seeds. ρ is
  Spearman's correlation with memorisation, the mean over the three; the interval (95%) is a bootstrap over examples,
  for these networks. "Truncated" is the Hessian without a tail, "tail" is Gauss-Newton with one; both use all
  examples and 100 steps. The rows of memorisation itself say how well it would find the wrong labels.
- Reliability: memorisation from one half of the subsets is correlated with that from the other half, and the
  correlation extrapolated to all subsets (Spearman and Brown). The error of memorisation lowers every ρ by about the
  root of this.
- *Digits*: the first 1,000 embedded digits, a tenth of them relabeled, and a perceptron 784-128-64-10.
- *CIFAR-10N, the cut*: 600 images of four vehicles at half the resolution, with human labels (the worst of three
  where one is wrong), and a network of eight convolutions. It fits a CPU. With as few images its networks generalise
  poorly, so it does not stand for CIFAR-10.
- *CIFAR-10N in full* (`--parts cifar`: 10,000 images of ten classes, a network four times as wide, 1,000 subsets) is
  written for a GPU. No numbers of it are here yet, and its learning rate was not tuned."""

VERDICT = """\
**Scores that follow the training predict memorisation best.** On digits and on the cut of CIFAR-10N the mean loss
over ten checkpoints is ahead of every other score, with intervals that do not overlap; TracIn over ten checkpoints is
second on digits, and ahead of every score by Arnoldi on the cut, where its interval overlaps that of the loss.

**Self-influence of the final network predicts it no better than the loss does.** All labels are learnt by then. The
loss, TracIn at one checkpoint and every score by Arnoldi, with a tail or without, are not told apart by these
intervals on either problem: all of them overlap. No score comes near what the reliability of memorisation would
allow.

**Memorised is not the same as wrong.** Wrong labels are memorised more than right ones on both problems. On digits
memorisation in loss finds them nearly perfectly. On the cut most right labels are memorised too, since 600 images do
not teach these networks much else, and memorisation finds wrong labels only moderately well."""


def tables(records: Records) -> list[str]:
    """Return the tables of every problem."""
    notes = Notes()
    lines: list[str] = []
    for record in records.values():
        cells = record["cells"]
        lines += [f"### {record['title']}", ""]
        if "networks" in cells:
            lines += [*_networks(cells["networks"], notes), ""]
        lines += [*_scores(cells, notes), ""]
    return [*lines, *notes.lines()]


def _networks(cell: Cell, notes: Notes) -> list[str]:
    rows = [
        ("examples", "examples", ",d"),
        ("wrong labels", "wrong", ".1%"),
        ("parameters", "parameters", ",d"),
        ("random subsets, with a network each", "subsets", ",d"),
        ("examples in every subset or in none", "undefined", ",d"),
        ("accuracy on training examples, given labels (%)", "accuracy_given", ".1f"),
        ("accuracy on test examples, true labels (%)", "accuracy_test", ".1f"),
    ]
    lines = table(("", "value"), [(text, shown(cell, key, form, notes)) for text, key, form in rows])
    kinds = [
        ("mean", "mean"),
        ("mean of right labels", "mean_right"),
        ("mean of wrong labels", "mean_wrong"),
        ("median standard error", "error"),
        ("reliability", "reliability"),
    ]
    own = [(text, *(shown(cell, f"{key}_{measure}", ".3f", notes) for measure in MEASURES)) for text, key in kinds]
    return [*lines, "", *table(("memorisation", "probability", "loss (nats)"), own)]


def _scores(cells: dict[str, Cell], notes: Notes) -> list[str]:
    rows = [
        (
            name,
            *(_with_interval(cell, measure, notes) for measure in MEASURES),
            shown(cell, "auc", ".1f", notes),
            shown(cell, "ap", ".1f", notes),
        )
        for name, cell in cells.items()
        if name != "networks"
    ]
    headings = ("score", "ρ with probability", "ρ with loss", "AUC of wrong labels (%)", "AP (%)")
    return table(headings, rows)


def _with_interval(cell: Cell, measure: str, notes: Notes) -> str:
    text = shown(cell, measure, ".3f", notes)
    if f"{measure}_low" not in cell:
        return text
    return f"{text} ({cell[f'{measure}_low']:.3f} to {cell[f'{measure}_high']:.3f})"


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw the correlations of all scores with memorisation in probability, by problem."""
    dots = [
        Dot(name, SERIES[part], 100 * cell["probability"])
        for part, record in records.items()
        for name, cell in record["cells"].items()
        if "probability" in cell
    ]
    title = "Rank correlation with memorisation"
    return {"correlations": partial(dots_svg, title, dots, "Spearman's ρ × 100")} if dots else {}
