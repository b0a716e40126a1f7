"""The page of the error analysis: text, tables and figures."""

from functools import partial

from experiments.shared.claims import (
    NOT_SEEN,
    SEEN,
    UNDECIDED,
    Claim,
    Finding,
    MissingNumberError,
    Records,
    number,
)
from harness.measure import Cell
from harness.plot import Curve, Drawing, curves_svg
from harness.record import Notes, shown, table

BATCHES, GAUSSIAN = "mini-batches", "Gaussian noise"

ABOUT = """\
**In the paper**: two lemmas argue that the eigenvectors of largest |λ| are those to keep. They are proved and not
measured. H = Σ λⱼeⱼeⱼᵀ with |λ₁| ≥ |λ₂| ≥ …, g = ∇L(x)/N is the gradient of a training example divided by the number
of examples, and removing x moves the parameters by θ* = H⁻¹g, where Q(θ) = ½⟨θ, Hθ⟩ − ⟨g, θ⟩ is stationary.

- **Lemma 1.** Qₖ is Q with the first k terms of H. The paper states 0 ≤ Q(θ) − Qₖ(θ) ≤ ½|λₖ₊₁|·‖θ‖². Also, if the
  result is off by ε in the direction of eₖ₊₁, Q is larger than at θ* by λₖ₊₁ε²/2. Small eigenvalues, it concludes,
  matter less.
- **Lemma 2.** If H is estimated with an error δH of mean zero, the variance of y = H⁻¹u along eₖ is about Var⟨eₖ, δH
  y⟩/λₖ². For isotropic δH it is therefore proportional to 1/λₖ²: small eigenvalues, it concludes, add noise.

**What holds precisely.**

- *The difference of Lemma 1* is ½ Σ_{j>k} λⱼ⟨θ, eⱼ⟩². The proof in the appendix has λⱼ² there; its bound is that of
  λⱼ. The upper bound holds for every symmetric H, and for the part of θ beyond the first k directions alone ("bound
  beyond k" below). The lower bound needs λⱼ ≥ 0 for all j > k. With negative ones, the magnitude is bounded instead.
- *The linear term* must stay whole. If Q is restricted to the span of the first k eigenvectors, as the text can also
  be read, the difference contains ⟨g, θ⟩ beyond k, which no eigenvalue bounds. But this restriction is what the
  truncated estimator solves: its θₖ = Σ_{j≤k} ⟨g, eⱼ⟩eⱼ/λⱼ misses Σ_{j>k} ⟨g, eⱼ⟩²/(2λⱼ) of Q, whose terms *grow* as
  eigenvalues fall, for the same ⟨g, eⱼ⟩. So the bound says nothing about the error of truncated influence.
- *λₖ₊₁ε²/2* is exact for every symmetric invertible H and every eigenvector; it is negative for a negative
  eigenvalue. The proof's last line lacks the term Q(θ*). ε is given there. If it comes from leaving eₖ₊₁ out, it is
  ⟨g, eₖ₊₁⟩/λₖ₊₁.
- *Lemma 2* is of first order in H⁻¹δH. All of it must be small, so δH must be small beside the smallest |λ|, not
  beside λₖ alone: otherwise H + δH can be singular, and the variance need not be finite. The formula itself does not
  need isotropic noise; the proportionality does. For a symmetric Gaussian δH the numerator is σ²(‖y‖² + ⟨y, eₖ⟩²),
  equal for all k up to a factor of 2. Relative to ⟨y, eₖ⟩² = ⟨u, eₖ⟩²/λₖ², the variance is Var⟨eₖ, δH y⟩/⟨u, eₖ⟩²,
  without any λₖ.

**Here**: the network of [mnist_small](mnist_small.md) (2,616 parameters, float64, a fifth of the labels changed),
trained by the same recipe on the first 1,000 embedded digits instead of 6,000, because its exact Hessian is to be had
on a CPU: layer by layer, for 20 blocks of 50 digits.

- H has one eigenvalue that is zero for every training (a shift of all output biases). It is left out; gradients have
  no component there.
- Lemma 1: θ* of 64 random training digits. Q is computed from the matrix, Qₖ from eigenpairs. "Change of the
  objective" is that of the training objective itself without the digit, at Θ₀ + θ* ± εeₖ₊₁ against Θ₀ + θ*, ε = 0.01,
  mean of both signs and of four digits. "Missed by θₖ" is the share of Q(0) − Q(θ*) that the truncated estimator
  misses, median.
- Lemma 2: u are the gradients of 8 test digits; a mini-batch of size b is b/50 of the blocks, drawn with replacement,
  so that large b show the limit of little noise. Gaussian noise is symmetric and isotropic, with the same mean square
  ‖δH‖². 20 draws each; H + δH is solved exactly. Numbers of a band of eigenvalues are the measured variance divided
  by that of the lemma, from medians over directions and queries: 1 where the lemma holds. Damping is added to every
  eigenvalue.

One core takes seven minutes for the training, four for the Hessians, and ten for the rest."""

VERDICT = """\
**Lemma 1 holds as a bound on magnitudes, and is far from what it bounds.** For every k and every digit the magnitude
of Q − Qₖ is less than 3% of the bound, and up to k = 10 less than a ten-thousandth of it, because θ* lies almost
wholly in directions of small eigenvalues. The lower bound does not hold here: L-BFGS ended with some of the gradient
left, 29 eigenvalues are negative, and for each k Q is below Qₖ for some digits. λₖ₊₁ε²/2 is met by Q to rounding, and
by the training objective itself within 30%.

**It does not argue for truncation.** An error of given length matters less along a small eigenvalue, but truncation
makes longer errors there. The best point in the span of the first 100 eigenvectors misses 92% of what θ* changes in
Q, that of the first 1,000 still 29%.

**Lemma 2 holds where noise is small beside the smallest eigenvalue, which it is not without damping.** With damping 3
the variances are within a third of the lemma's from mini-batches of 800 on, with damping 0.1 from 12,800 on. Without
damping, H itself is indefinite, H + δH was so in every draw, and the variances are off by more than four times in
every band from b = 800 on, with as many as three million digits drawn. Gaussian noise of the same mean square reaches
the lemma later, since most of it falls on directions of small eigenvalues.

**Real noise is not isotropic.** That of mini-batches is weaker along small eigenvalues, so the first-order variance
falls with |λₖ| to the power of −1.34, not −2. Small eigenvalues are still noisier, but less than the paper concludes.
With damping 3 it is the other way round: for mini-batches the variance is smallest along the smallest eigenvalues,
while for Gaussian noise it is largest there."""


def _kept(records: Records) -> list[str]:
    cells = records.get("quadratic", {"cells": {}})["cells"]
    return [name for name in cells if name.startswith("k=")]


def _bound(records: Records) -> Finding:
    shares = [number(records, "quadratic", "cells", name, "largest_share_of_bound") for name in _kept(records)]
    if not shares:
        raise MissingNumberError("quadratic")
    told = f"At most {max(shares):.1%} of the bound in magnitude, {len(shares)} k, every digit asked, 1 training."
    return Finding(SEEN if max(shares) <= 1 else NOT_SEEN, told)


def _sign(records: Records) -> Finding:
    negative = max(number(records, "quadratic", "cells", name, "negative") for name in _kept(records) or [""])
    below = number(records, "network", "cells", "network", "negative")
    if below:
        why = "so the network is not at a minimum, as the lemma assumes"
        return Finding(
            UNDECIDED, f"{below:.0f} eigenvalues are below zero, {why}; {negative:.0f} digits contradict it."
        )
    return Finding(NOT_SEEN if negative else SEEN, f"{negative:.0f} digits contradict it, 1 training.")


def _power(records: Records) -> Finding:
    power = number(records, "noise", "cells", "alignment", "slope_batches") - 2
    told = f"By mini-batches of real digits it falls as |λ| to the power of {power:.2f}; seen within 0.2 of −2."
    return Finding(SEEN if abs(power + 2) < 0.2 else NOT_SEEN, told)


CLAIMS = (
    Claim(
        "What is left out of the quadratic by truncation is at most half the next |λ| times the squared length.",
        _bound,
    ),
    Claim("What is left out is never negative.", _sign),
    Claim(
        "Under noise in the Hessian, the variance of a direction falls as 1/λ², so that small λ are noise.",
        _power,
        is_main=True,
    ),
)


def tables(records: Records) -> list[str]:
    """Return the tables of the network and of both lemmas."""
    cells = {name: record["cells"] for name, record in records.items()}
    notes = Notes()
    lines: list[str] = []
    if "network" in cells:
        lines += ["### The network", "", *_network(cells["network"]["network"], notes), ""]
    if "quadratic" in cells:
        lines += ["### Lemma 1: the truncated quadratic", "", *_truncation(cells["quadratic"], notes), ""]
        lines += ["### Lemma 1: an error along one eigenvector", "", *_shift(cells["quadratic"], notes), ""]
    if "noise" in cells:
        lines += ["### Lemma 2: noise in the Hessian", "", *_noise(cells["noise"], notes), ""]
    return [*lines, *notes.lines()]


def _network(cell: Cell, notes: Notes) -> list[str]:
    rows = [
        ("digits", "digits", ",d"),
        ("parameters", "parameters", ",d"),
        ("accuracy on training digits, given labels (%)", "accuracy_train_given", ".1f"),
        ("accuracy on test digits, true labels (%)", "accuracy_test_true", ".1f"),
        ("length of the gradient at the end", "gradient_norm", ".1e"),
        ("iterations of L-BFGS", "iterations", ",d"),
        ("largest eigenvalue", "largest", ".3g"),
        ("smallest eigenvalue", "smallest", ".2g"),
        ("smallest magnitude of an eigenvalue", "smallest_magnitude", ".1e"),
        ("negative eigenvalues", "negative", ",d"),
        ("magnitude of the eigenvalue left out", "beyond", ".0e"),
    ]
    return table(("the network", "value"), [(text, shown(cell, key, form, notes)) for text, key, form in rows])


def _truncation(cells: dict[str, Cell], notes: Notes) -> list[str]:
    keys = {
        "eigenvalue": ("magnitude of λₖ₊₁", ".2g"),
        "magnitude": ("magnitude of Q − Qₖ", ".2e"),
        "bound": ("paper's bound", ".2e"),
        "tight": ("bound beyond k", ".2e"),
        "largest_share_of_bound": ("largest share of the paper's bound", ".1e"),
        "largest_share_of_tight": ("of the bound beyond k", ".1e"),
        "negative": ("digits with Q < Qₖ", ",d"),
        "negative_beyond": ("λⱼ < 0 with j > k", ",d"),
    }
    rows = [
        (name.removeprefix("k="), *(shown(cell, key, form, notes) for key, (_, form) in keys.items()))
        for name, cell in cells.items()
        if name.startswith("k=")
    ]
    return table(("k", *(heading for heading, _ in keys.values())), rows)


def _shift(cells: dict[str, Cell], notes: Notes) -> list[str]:
    rows = []
    for name, cell in cells.items():
        if name.startswith("error, "):
            k = name.rpartition("=")[2]
            columns = [("eigenvalue", ".2g"), ("predicted", ".2e"), ("difference", ".0e"), ("objective", ".2e")]
            missed = shown(_percent(cells.get(f"k={k}")), "missed", ".2f", notes)
            rows.append((k, *(shown(cell, key, form, notes) for key, form in columns), missed))
    headings = ("λₖ₊₁", "λₖ₊₁ε²/2", "relative difference of Q", "change of the objective", "missed by θₖ (%)")
    return table(("k", *headings), rows)


def _percent(cell: Cell | None) -> Cell | None:
    return cell | {"missed": 100 * cell["missed"]} if cell and "missed" in cell else cell


def _noise(cells: dict[str, Cell], notes: Notes) -> list[str]:
    bands = bands_of(cells)
    rows = []
    for name, cell in sorted(cells.items(), key=lambda item: _place(item[1])):
        if "kind" in cell and "band" not in cell:
            ratios = [shown(cells.get(f"{name}, {band}"), "ratio", ".2g", notes) for band in bands]
            change = shown(cell, "change", ".2g", notes)
            about = f"{cell['damping']:g}", f"{cell['b']:,}", f"{100 * cell['definite']:.0f}"
            rows.append((cell["kind"], *about, change, *ratios))
    headings = ("noise", "damping", "b", "positive definite (%)", "relative change of H⁻¹u", *bands)
    lines = table(headings, rows)
    known = cells.get("alignment", {})
    if "slope_batches" in known:
        flat = round(known["slope_gaussian"], 2) + 0.0  # not -0.00
        lines += [
            "",
            f"Var⟨eₖ, δH y⟩ of mini-batches grows with |λₖ| to the power of {known['slope_batches']:.2f} (least "
            f"squares over {known['directions_batches']:,} directions); its 95th percentile is "
            f"{known['range_batches']:,.0f} times its 5th. For Gaussian noise the power is {flat:.2f}, and the ratio "
            f"{known['range_gaussian']:.2f}. To first order, the variance of H⁻¹u along eₖ therefore changes with |λₖ| "
            f"to the power of {known['slope_batches'] - 2:.2f} for mini-batches, and of {flat - 2:.2f} for Gaussian "
            "noise.",
        ]
    return lines


def bands_of(cells: dict[str, Cell]) -> list[str]:
    """Return the names of the bands of eigenvalues, from the largest."""
    return list(dict.fromkeys(cell["band"] for cell in cells.values() if "band" in cell))


def _place(cell: Cell) -> tuple[float, bool, int]:
    return cell.get("damping", 0.0), cell.get("kind") != BATCHES, cell.get("b", 0)


def figures(records: Records, *, small: bool) -> dict[str, Drawing]:
    """Draw the bounds of the first lemma against k, and the variances of the second against the eigenvalue."""
    drawn = dict[str, Drawing]()
    truncation = {
        int(name.removeprefix("k=")): cell
        for name, cell in records.get("quadratic", {}).get("cells", {}).items()
        if name.startswith("k=") and "magnitude" in cell
    }
    if truncation:
        titles = {"bound": "the paper's bound", "magnitude": "magnitude of Q − Qₖ"}
        curves = [
            Curve(title, list(truncation), [cell[key] for cell in truncation.values()]) for key, title in titles.items()
        ]
        panels = {"What truncation changes in Q(θ*), mean over digits": curves}
        drawn["quadratic"] = partial(curves_svg, panels, "k", "Q − Qₖ", log=True)
    cells = records.get("noise", {}).get("cells", {})
    panels = {}
    for damping in sorted({cell["damping"] for cell in cells.values() if "band" in cell}):
        sizes = sorted({cell["b"] for cell in cells.values() if cell.get("damping") == damping})
        size = sizes[len(sizes) // 2]
        panels[f"b = {size:,}, damping {damping:g}"] = _curves(cells, damping, size)
    if panels:
        drawn["noise"] = partial(curves_svg, panels, "|λ|, median of a band", "variance of H⁻¹u along e", log=True)
    return drawn


def _curves(cells: dict[str, Cell], damping: float, size: int) -> list[Curve]:
    bands = [cell for cell in cells.values() if "band" in cell]
    least = min(cell["damping"] for cell in bands)
    places = {cell["band"]: float(f"{cell['eigenvalue']:.1g}") for cell in bands if cell["damping"] == least}
    found = []
    for colour, kind in enumerate((BATCHES, GAUSSIAN)):
        own = [cell for cell in bands if (cell["kind"], cell["damping"], cell["b"]) == (kind, damping, size)]
        own.sort(key=lambda cell: places[cell["band"]])
        across = [places[cell["band"]] for cell in own]
        found.append(Curve(f"{kind}, measured", across, [c["measured"] for c in own], colour=colour))
        found.append(Curve(f"{kind}, Lemma 2", across, [c["predicted"] for c in own], colour=colour + 2))
    return found
