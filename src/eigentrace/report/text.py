"""The table of methods for a terminal."""

from collections.abc import Sequence

from eigentrace.report.content import MethodRow

HEADINGS = ("method", "K", "AUC %", "AP %", "fit s", "score s")


def cells(row: MethodRow) -> tuple[str, ...]:
    """Write one method's values, in the order of `HEADINGS`."""
    return (
        row.method,
        "–" if row.keep is None else str(row.keep),
        f"{row.auc:.1f}",
        f"{row.ap:.1f}",
        f"{row.fit_seconds:.1f}",
        f"{row.score_seconds:.1f}",
    )


def methods_table(rows: Sequence[MethodRow]) -> str:
    """Lay the methods out as aligned plain text: names to the left, numbers to the right.

    >>> print(methods_table([MethodRow("Loss", None, 99.7, 99.0, 0.0, 1.25)]))
    method  K  AUC %  AP %  fit s  score s
    Loss    –   99.7  99.0    0.0      1.2
    """
    lines = [HEADINGS, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
