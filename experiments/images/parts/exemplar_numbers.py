"""Numbers to the images: shares by decile, random rows of a band, statistics of proponents and opponents."""

import numpy as np
import torch
from torch import Tensor, nn

from eigentrace.runs.explain import Explanation
from harness.measure import Cell

BANDS = {"90–100%": (0.9, 1.0), "40–60%": (0.4, 0.6), "0–10%": (0.0, 0.1)}
"""The quantiles that the paper shows, highest first."""


def deciles(values: np.ndarray, is_so: np.ndarray) -> list[float]:  # (N,), (N,) bool
    """Return the share of flagged examples in each tenth of a ranking, lowest values first.

    >>> deciles(np.arange(20), np.arange(20) >= 17)
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    """
    order = np.argsort(values, kind="stable")
    return [float(is_so[rows].mean()) for rows in np.array_split(order, 10)]


def bands(values: np.ndarray, across: int, seed: int) -> dict[str, list[tuple[int, float]]]:
    """Sample rows from the top, the middle (twice as many) and the bottom, each with its quantile."""
    generator = np.random.default_rng(seed)
    order = np.argsort(values, kind="stable")
    last = len(values) - 1
    found = {}
    for band, (low, high) in BANDS.items():
        places = np.arange(round(low * last), round(high * last) + 1)
        wanted = across * (2 if band == "40–60%" else 1)
        drawn = np.sort(generator.choice(places, min(wanted, len(places)), replace=False))[::-1]
        found[band] = [(int(order[place]), place / last) for place in drawn]
    return found


@torch.no_grad()
def predicted_right(model: nn.Module, inputs: Tensor, labels: Tensor) -> np.ndarray:  # (N,) bool
    """Return for which examples the prediction is the label."""
    parts = zip(inputs.split(1000), labels.split(1000), strict=True)
    return torch.cat([model(x).argmax(dim=1) == y for x, y in parts]).cpu().numpy()


def answers(
    found: Explanation, queries: np.ndarray, labels: np.ndarray, norms: np.ndarray, is_candidate: np.ndarray
) -> Cell:
    """Summarise the explanations of queries that are rows of the run.

    Args:
        found: The explanations, from which the queries are not excluded.
        queries: Rows of the queries, (Q,).
        labels: Labels of all rows.
        norms: Gradient norms of all rows.
        is_candidate: (Q,), whether the query itself passed the filter of labels.

    Returns:
        Of the others, without the query itself: the share with its label, how many different ones there are for each
        answer, mean gradient norm, and mean quantile of that norm among all rows. And how often a query that could be
        is its own highest proponent.
    """
    quantile = np.argsort(np.argsort(norms, kind="stable"), kind="stable") / max(1, len(norms) - 1)
    own_first = found.proponents.rows[:, 0] == queries
    cell: Cell = {"own_first": float(own_first[is_candidate].mean()) if is_candidate.any() else None}
    for name, side in (("proponents", found.proponents), ("opponents", found.opponents)):
        is_other = (side.rows >= 0) & (side.rows != queries[:, None])
        rows = side.rows[is_other]
        same = (labels[side.rows] == labels[queries][:, None])[is_other]
        cell |= {
            f"{name}_same_label": float(same.mean()),
            f"{name}_distinct": len(np.unique(rows)) / len(rows),
            f"{name}_norm": float(norms[rows].mean()),
            f"{name}_norm_quantile": float(quantile[rows].mean()),
        }
    return cell | {"candidates": int(is_candidate.sum()), "median_norm": float(np.median(norms))}
