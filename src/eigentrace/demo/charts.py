"""Plots as inline SVG, with the colours of the page's style sheet, in light and dark mode."""

import math
from collections.abc import Sequence

import numpy as np

from eigentrace.errors import InputError
from eigentrace.rendering.svg import LogScale, count_ticks, grid, image, line, text, tick_labels

# Size of both plots. They are 340 to 520 pixels wide on the page, so text of 13 units has 10 to 15 pixels.
WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 428, 30, 252
_NUM_BINS = 48
# Maximum length of a log axis: smaller scores are drawn at its end.
_MAX_DECADES = 10
_BELOW_WIDTH = 30  # width reserved for the bar of scores ≤ 0, which a log axis cannot show


def spectrum_svg(eigenvalues: np.ndarray, residuals: np.ndarray | None = None) -> str:  # (K,), (K,)
    """Draw |λ| on a log axis, with negative eigenvalues as diamonds in another colour.

    Args:
        eigenvalues: In the order to draw them, usually by descending |λ|.
        residuals: Error bound of each eigenvalue, drawn as a bar.

    Raises:
        InputError: If there is nothing to draw, a value is not finite or the lengths differ.
    """
    magnitudes = np.abs(eigenvalues)
    if eigenvalues.ndim != 1 or not magnitudes.any() or not np.isfinite(magnitudes).all():
        raise InputError(
            f"A spectrum needs finite eigenvalues that are not all zero, got {eigenvalues.size} of shape "
            f"{eigenvalues.shape}, {int(np.isfinite(magnitudes).sum())} of them finite: check the fit."
        )
    if residuals is not None and residuals.shape != eigenvalues.shape:
        raise InputError(
            f"Got {residuals.size} residuals for {eigenvalues.size} eigenvalues: pass one for each, or None."
        )
    scale = _around(magnitudes[magnitudes > 0], start=_BOTTOM, end=_TOP)
    gap = (_RIGHT - _LEFT) / len(eigenvalues)
    centres = [_LEFT + gap * (i + 0.5) for i in range(len(eigenvalues))]
    parts = [_log_grid(scale)]
    if residuals is not None:
        parts += [
            line(
                "error",
                x,
                scale.position(abs(value) + bound),
                x,
                scale.position(max(abs(value) - bound, 1e-300)),
            )
            for x, value, bound in zip(centres, eigenvalues, residuals, strict=True)
            if math.isfinite(bound)
        ]
    parts += [
        _marker(x, scale.position(max(abs(value), 1e-300)), i + 1, value)
        for i, (x, value) in enumerate(zip(centres, eigenvalues, strict=True))
    ]
    parts.append(_index_axis(centres))
    num_negative = int((eigenvalues < 0).sum())
    summary = (
        f"{len(eigenvalues)} eigenvalues, {num_negative} of them negative; the largest magnitude is "
        f"{magnitudes.max():.3g}, the smallest {magnitudes.min():.3g}."
    )
    return image(f"Spectrum of the curvature. {summary}", WIDTH, HEIGHT, parts)


def histogram_svg(scores: np.ndarray, is_wrong: np.ndarray) -> str:  # (N,), (N,) bool
    """Draw histograms of self-influence for right and wrong labels, overlaid on one log axis.

    Scores of zero or less, which a log axis cannot show, are counted in a separate bar on the left.

    Raises:
        InputError: If a score is not finite or the lengths differ.
    """
    if scores.shape != is_wrong.shape or not np.isfinite(scores).all():
        raise InputError(
            f"A histogram needs finite scores and one flag for each, got shapes {scores.shape} and "
            f"{is_wrong.shape} with {int(np.isfinite(scores).sum())} finite scores: leave out the examples with other "
            "scores."
        )
    positive = scores[scores > 0]
    has_below = len(positive) < len(scores)
    left = _LEFT + _BELOW_WIDTH if has_below else _LEFT
    scale = _around(positive, start=left, end=_RIGHT)
    edges = np.geomspace(scale.low, scale.high, _NUM_BINS + 1)
    groups = {"right": scores[~is_wrong], "wrong": scores[is_wrong]}
    # By rounding, an extreme score may lie slightly outside of the edges computed from it.
    counts = {k: np.histogram(np.clip(v[v > 0], edges[0], edges[-1]), edges)[0] for k, v in groups.items()}
    below = {k: int((v <= 0).sum()) for k, v in groups.items()}
    highest = max(1, *(int(c.max()) for c in counts.values()), *below.values())

    parts = [_count_grid(highest)]
    for name in groups:
        if below[name]:
            parts.append(_steps(name, [_LEFT, _LEFT + _BELOW_WIDTH - 8], [below[name]], highest))
        parts.append(_steps(name, [scale.position(edge) for edge in edges], counts[name].tolist(), highest))
    parts.append(_score_axis(scale, has_below))  # last, over the outlines where they run along the bottom
    summary = (
        f"Median {_median(groups['right'])} for {len(groups['right'])} examples with the right label, "
        f"{_median(groups['wrong'])} for {len(groups['wrong'])} with a wrong one; "
        f"{sum(below.values())} are zero or less."
    )
    return image(f"Self-influence of the training examples. {summary}", WIDTH, HEIGHT, parts)


def _around(values: np.ndarray, start: float, end: float) -> LogScale:
    """Return a log axis over the values with a margin, at most about `_MAX_DECADES` decades long."""
    if not len(values):
        return LogScale(0.1, 10.0, start, end)
    high = float(values.max())
    low = max(float(values.min()), high / 10.0**_MAX_DECADES)
    # Any range of a factor of 6.3 > 2.5² contains at least two of 1, 2, 5, 10, …, so every axis has two labels.
    margin = max((high / low) ** 0.04 * 1.1, math.sqrt(6.3 * low / high))
    return LogScale(low / margin, high * margin, start, end)


def _marker(x: float, y: float, number: int, value: float) -> str:
    label = f"<title>λ{number} = {value:.4g}</title>"
    if value < 0:
        return f'<path class="negative" d="M{x:.1f} {y - 4.6:.1f}l4.6 4.6-4.6 4.6-4.6-4.6z">{label}</path>'
    return f'<circle class="positive" cx="{x:.1f}" cy="{y:.1f}" r="3.4">{label}</circle>'


def _steps(name: str, edges: Sequence[float], counts: Sequence[int], highest: int) -> str:
    """Return the outline of a histogram, closed along the bottom so that it can be filled."""
    path = [f"M{edges[0]:.1f} {_BOTTOM}"]
    for right, count in zip(edges[1:], counts, strict=True):
        path.append(f"V{_count_position(count, highest):.1f}H{right:.1f}")
    return f'<path class="area {name}" d="{"".join(path)}V{_BOTTOM}z"/>'


def _count_position(count: float, highest: int) -> float:
    return _BOTTOM - count / highest * (_BOTTOM - _TOP)


def _log_grid(scale: LogScale) -> str:
    heights = [scale.position(value) for value in scale.ticks()]
    rows = grid(_LEFT, _RIGHT, zip(heights, tick_labels(scale.ticks()), strict=True))
    return "".join(rows) + text(_LEFT - 8, 12, "|λ|", "end")


def _count_grid(highest: int) -> str:
    rows = grid(_LEFT, _RIGHT, ((_count_position(count, highest), f"{count:,}") for count in count_ticks(highest)))
    return "".join(rows) + text(0, 12, "examples", "start")


def _index_axis(centres: Sequence[float]) -> str:
    numbers = sorted({1, *(n for n in count_ticks(len(centres)) if n)})
    labels = [text(centres[n - 1], _BOTTOM + 18, str(n), "middle") for n in numbers]
    return "".join(labels) + line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM) + _axis_name("eigenvalue, by size")


def _score_axis(scale: LogScale, has_below: bool) -> str:
    ticks = scale.ticks()
    labels = [
        line("axis", scale.position(value), _BOTTOM, scale.position(value), _BOTTOM + 5)
        + text(scale.position(value), _BOTTOM + 18, label, "middle")
        for value, label in zip(ticks, tick_labels(ticks), strict=True)
    ]
    if has_below:
        labels.append(text(_LEFT + (_BELOW_WIDTH - 8) / 2, _BOTTOM + 18, "≤ 0", "middle"))
    return "".join(labels) + line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM) + _axis_name("self-influence")


def _axis_name(name: str) -> str:
    return text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, name, "middle")


def _median(values: np.ndarray) -> str:
    return f"{np.median(values):.3g}" if len(values) else "none"
