"""Statistics of scores by group, such as source, language or annotator."""

from typing import Any

import numpy as np
import pyarrow as pa

from eigentrace.errors import InputError
from eigentrace.runs.ranking import Amounts, Table, as_numbers, ranks_of, scores_of, tell_unscored

# The share of rows that counts as the top of self-influence.
_TOP = "5%"


def groups(run: Table, column: str, influence: Any = None) -> pa.Table:
    """Return sums and means of scores per value of a column, the group with the largest sum first.

    Args:
        run: The run, or any object with its columns.
        column: The column of group names; rows without a value form the group null.
        influence: Scores of all rows for one query (N,) or for several (Q, N), which are summed too.

    Returns:
        A table with one row per group:

        - `group`, `count`
        - `sum_self_influence`, `mean_self_influence`, `median_self_influence`: without NaN
        - `mean_loss`, if the run has losses
        - `top_share`: the share of the group's rows that are among the top 5% of self-influence, .05 by chance
        - `sum_influence`, if `influence` is given: the sum over the group's rows and all queries, which determines the
          order of groups then
        - `influence`, if given for several queries: one sum per query

        Groups with equal sums are in the order of their first rows.
    """
    if column not in run.columns:
        raise InputError(f"The run has no column {column!r}. Its columns are {', '.join(run.columns)}.")
    names, codes = _encoded(run.column(column), column)
    if len(codes) != run.num_rows:
        raise InputError(f"Column {column!r} has {len(codes):,} values for {run.num_rows:,} rows.")
    total = len(names)
    own = scores_of(run, "self_influence")[1]
    tell_unscored(own, "self_influence", "they are counted, but excluded from sums, means and medians")
    sums, means = _sums(codes, own, total)
    top = ranks_of(own)
    limit = Amounts.of("top", _TOP).counts(np.array([len(own)]))[0]
    count = np.bincount(codes, minlength=total)
    found: dict[str, Any] = {
        "group": names,
        "count": count,
        "sum_self_influence": sums,
        "mean_self_influence": means,
        "median_self_influence": _medians(codes, own, total),
    }
    if "loss" in run.columns:
        found["mean_loss"] = _sums(codes, scores_of(run, "loss")[1], total)[1]
    found["top_share"] = np.bincount(codes[(top > 0) & (top <= limit)], minlength=total) / np.maximum(count, 1)
    if influence is not None:
        found |= _influences(codes, influence, total)
    order = np.argsort(-found.get("sum_influence", sums), kind="stable")
    return pa.table(found).take(pa.array(order))


def _encoded(values: Any, column: str) -> tuple[pa.Array, np.ndarray]:  # (G,), (N,)
    try:
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except pa.ArrowException as error:
        raise InputError(
            f"Column {column!r} contains values of several types and cannot define groups ({error}). Convert them to "
            "text."
        ) from None
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    encoded = array.dictionary_encode(null_encoding="encode")
    return encoded.dictionary, encoded.indices.to_numpy()


def _sums(codes: np.ndarray, values: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:  # (G,) x 2
    """Return the sum and the mean of each group's values without NaN; the mean of a group without values is NaN."""
    there = ~np.isnan(values)
    sums = np.bincount(codes[there], weights=values[there], minlength=total)
    counts = np.bincount(codes[there], minlength=total)
    return sums, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _medians(codes: np.ndarray, values: np.ndarray, total: int) -> np.ndarray:  # (G,)
    there = np.flatnonzero(~np.isnan(values))
    order = there[np.lexsort((values[there], codes[there]))]
    counts = np.bincount(codes[order], minlength=total)
    ends = np.cumsum(counts)
    ascending, has = values[order], counts > 0
    low, high = (ends - counts + (counts - 1) // 2)[has], (ends - counts + counts // 2)[has]
    medians = np.full(total, np.nan)
    medians[has] = (ascending[low] + ascending[high]) / 2
    return medians


def _influences(codes: np.ndarray, influence: Any, total: int) -> dict[str, Any]:
    """Return the sum of each group's scores over all queries, and for several queries also per query."""
    shape = tuple(np.shape(influence))
    if len(shape) not in (1, 2) or shape[-1] != len(codes):
        raise InputError(f"influence must have shape ({len(codes)},) or (queries, {len(codes)}), got {shape}.")
    rows = [influence] if len(shape) == 1 else influence
    sums = [np.bincount(codes, weights=as_numbers(row, "influence"), minlength=total) for row in rows]
    if len(shape) == 1:
        return {"sum_influence": sums[0]}
    table = np.stack(sums, axis=1) if sums else np.zeros((total, 0))  # (G, Q)
    per_query = pa.FixedSizeListArray.from_arrays(pa.array(table.ravel()), len(sums))
    return {"sum_influence": table.sum(axis=1), "influence": per_query}
