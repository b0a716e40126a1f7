"""Who is responsible: the strongest proponents and opponents of queries, by stored features, exactly where possible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from eigentrace.candidates import Asked, MayAnswer, Scored, by_features, candidates, lacks_tail
from eigentrace.compute import Compute
from eigentrace.data import Data, as_data
from eigentrace.ensemble import Ensemble
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.fitted import Fitted, Normalize
from eigentrace.projected import ProjectedFit
from eigentrace.search import Ranked
from eigentrace.settings import check_counts
from eigentrace.terms import FEATURES, measured

Exclude = Literal["self", "duplicates"] | None
EXACT, RESCORED, STORED, KEPT = "exact", "rescored", "stored tail", "kept directions only"
# Candidates per query unless told, and how many times what is asked for on one side they are at least. Twice as many
# are not worth a choice: everybody is scored.
_SHORTLIST, _TIMES = 2000, 20
# Queries whose shortlists are scored together, and scores by the model that are held at a time.
_TOGETHER, _SCORES = 64, 2**24
_ROWS = 65_536  # whose leave to answer is looked at together


@dataclass(frozen=True)
class Side:
    """The k strongest on one side of each query, strongest first.

    Where fewer were allowed, row, label and prediction are -1, the score NaN and the id None.
    """

    rows: np.ndarray  # (Q, k)
    scores: np.ndarray  # (Q, k)
    ids: np.ndarray | None  # (Q, k)
    labels: np.ndarray | None  # (Q, k)
    predictions: np.ndarray | None  # (Q, k)


@dataclass(frozen=True)
class Explanation:
    """What speaks for and against each query."""

    proponents: Side
    """The highest scores first."""
    opponents: Side
    """The lowest first: above zero where fewer than k examples speak against the query."""
    how: str
    """"exact": nobody stronger was overlooked; "rescored": the scores are exact, but of a shortlist only; "stored
    tail": by features that stand for the tail; or "kept directions only": without any tail."""
    unit: str | None
    """"nats", the predicted rise of the query's loss without the example; "cosine" in the metric; else None."""
    shortlist: int | None = None
    """Candidates per query that were scored again, where that was not everybody."""

    @property
    def told(self) -> str:
        """How, for people to read."""
        return self.how if self.shortlist is None else f"exact scores of a shortlist of {self.shortlist:,}"

    def table(self) -> pa.Table:
        """Return one row per query and answer."""
        parts: dict[str, list[np.ndarray]] = {}
        for name, side in (("proponent", self.proponents), ("opponent", self.opponents)):
            queries, k = side.rows.shape
            columns = {
                "query": np.repeat(np.arange(queries), k),
                "side": np.full(queries * k, name),
                "rank": np.tile(np.arange(1, k + 1), queries),
                "row": side.rows,
                "id": side.ids,
                "score": side.scores,
                "label": side.labels,
                "prediction": side.predictions,
            }
            found = (side.rows >= 0).reshape(-1)
            for key, values in columns.items():
                if values is not None:
                    parts.setdefault(key, []).append(values.reshape(-1)[found])
        return pa.table({key: np.concatenate(values) for key, values in parts.items()})

    def __str__(self) -> str:
        unit = "" if self.unit is None else f", in {self.unit}"
        lines = [f"{self.told}{unit}"]
        for query in range(len(self.proponents.rows)):
            lines.append(f"query {query}")
            for sign, side in (("+", self.proponents), ("-", self.opponents)):
                names = side.rows if side.ids is None else side.ids
                for name, value, row in zip(names[query], side.scores[query], side.rows[query], strict=True):
                    if row >= 0:
                        lines.append(f"  {sign} {value:12.5g}  {name}")
        return "\n".join(lines)


def explain(
    run: Scored,
    queries: Any,
    k: int = 10,
    *,
    normalize: Normalize = None,
    same_label: bool = False,
    top_labels: int | None = None,
    exclude: Exclude = "self",
    rescore: bool | None = None,
    shortlist: int | None = None,
    device: Any = None,
) -> Explanation:
    """Find the k strongest proponents and opponents of each query.

    Args:
        run: A complete run.
        queries: Rows of the run (a number or several), which need no model; or new examples, which do.
        k: How many on either side.
        normalize: None, "gradient" (gradients of length one) or "metric" (cosine in the metric of the curvature):
            without it, examples with large gradients answer every question.
        same_label: Consider only examples with the query's own label.
        top_labels: Consider only examples whose label is among the query's so many most probable, as the paper does.
        exclude: "self" leaves the query's own row out, "duplicates" all examples of the same content too, None nobody.
        rescore: Score candidates again by the model, with the whole tail; None does so wherever model and data are at
            hand and features hold less than that.
        shortlist: Candidates per query that are scored again, half of them on either side; everybody who may answer,
            where there are no more than that. If None 2,000, at least 20·k, and everybody where there are no more than
            twice as many.
        device: Where products are computed; the CPU if None.
    """
    _check(k, shortlist, normalize, exclude)
    asked = _asked(run, queries)
    allowed = _allowed(run, asked, same_label, top_labels, exclude)
    rescore = _rescores(run, rescore, normalize)
    k = min(k, run.num_rows)
    count = max(2 * k, shortlist or max(_SHORTLIST, _TIMES * k))
    few = count if shortlist else 2 * count
    chosen = allowed if same_label or top_labels else None
    how, listed = EXACT, None
    if not rescore:
        ranked, how = by_features(run, asked, k, allowed, normalize, device), _how(run)
    elif not run.num_features or _most_answers(run, chosen, few) <= few:
        ranked = _by_gradients(run, asked, k, allowed, normalize)
    else:
        lists = candidates(run, asked, -(-count // 2), allowed, normalize, device)
        ranked, how, listed = _rescored(run, asked, lists, k, normalize), RESCORED, lists.shape[1]
    nats = run.manifest["has_curvature"] and normalize is None
    divisor = float(run.manifest["num_train"]) if nats else 1.0
    unit = "cosine" if normalize == "metric" else "nats" if nats else None
    return Explanation(
        _side(run, ranked.proponents, ranked.proponent_scores / divisor),
        _side(run, ranked.opponents, ranked.opponent_scores / divisor),
        how,
        unit,
        listed,
    )


def _check(k: int, shortlist: int | None, normalize: Normalize, exclude: Exclude) -> None:
    check_counts(1, k=k)
    if shortlist is not None:
        check_counts(2, shortlist=shortlist)
    if normalize not in (None, "gradient", "metric"):
        raise InputError(f"normalize must be None, 'gradient' or 'metric', got {normalize!r}.")
    if exclude not in (None, "self", "duplicates"):
        raise InputError(f"exclude must be None, 'self' or 'duplicates', got {exclude!r}.")


def _asked(run: Scored, queries: Any) -> Asked:
    if isinstance(queries, Integral) or _are_rows(queries):
        return _asked_rows(run, np.atleast_1d(np.asarray(queries, dtype=np.int64)))
    if run.fitted is None:
        raise InputError(
            "New examples need the model: open the run with eigentrace.open_run(path, task, data), or ask about rows "
            "of the run by their numbers."
        )
    data = as_data(queries)
    found = measured(run.fitted, data, Compute(precision=run.manifest["compute"]["precision"]))
    return Asked(len(data), None, found.get(FEATURES), data, *(_numpy(found, name) for name in _KNOWN))


_KNOWN = ("label", "digest", "square_norm", "self_influence")


def _numpy(found: dict[str, Tensor], name: str) -> np.ndarray | None:
    return found[name].numpy() if name in found else None


def _are_rows(queries: Any) -> bool:
    if isinstance(queries, np.ndarray | Tensor):
        return queries.ndim == 1 and np.asarray(queries).dtype.kind in "iu"
    return isinstance(queries, Sequence) and len(queries) > 0 and all(isinstance(q, Integral) for q in queries)


def _asked_rows(run: Scored, rows: np.ndarray) -> Asked:
    outside = rows[(rows < 0) | (rows >= run.num_rows)]
    if len(outside):
        raise InputError(f"Row {outside[0]} is not in this run, which has rows 0 to {run.num_rows - 1}.")
    features = run.features_of(rows) if run.num_features else None
    data = None
    if run.data is not None:
        data = run.data.take(np.unique(rows))
    labels = run.column("label")[rows] if "label" in run.columns else None
    digests = run.digests[rows] if run.digests is not None else None
    norms, own = run.column("gradient_norm")[rows] ** 2, run.column("self_influence")[rows]
    return Asked(len(rows), rows, features, data, labels, digests, norms, own)


def _rescores(run: Scored, wanted: bool | None, normalize: Normalize) -> bool:
    possible = run.fitted is not None and run.data is not None
    if wanted and not possible:
        raise InputError(
            "Scoring a shortlist again needs the model and the data: open the run with eigentrace.open_run(path, task, "
            "data), or use rescore=False."
        )
    if not possible and not run.num_features:
        raise UnsupportedError(
            f"{run.manifest['method']['name']} stores no features, so its scores need the model and the data: open the "
            "run with eigentrace.open_run(path, task, data)."
        )
    # The members of an ensemble have gradients of their own, and the run holds the length of one of them.
    many_lengths = normalize == "gradient" and run.manifest["method"]["name"] == "Ensemble"
    if many_lengths and (wanted is False or not possible):
        raise UnsupportedError(
            "Gradients of each member of an ensemble are normalised by themselves, which needs the model and the data: "
            "open the run with eigentrace.open_run(path, task, data) and let it rescore, or use normalize='metric'."
        )
    if wanted is not None:
        return wanted
    return possible and (many_lengths or _how(run) != EXACT or not run.num_features)


def _how(run: Scored) -> str:
    """Say how much of the score the stored features alone can give."""
    if lacks_tail(run):
        return KEPT
    return STORED if run.manifest["method"].get("cut", {}).get("stored") else EXACT


def _most_answers(run: Scored, allowed: MayAnswer, enough: int) -> int:
    """Count the examples that the freest query may be answered by, where they may be as few as that."""
    if allowed is None or run.num_rows <= enough:
        return run.num_rows
    counts: Tensor | int = 0
    for first in range(0, run.num_rows, _ROWS):
        counts = counts + allowed(first, min(_ROWS, run.num_rows - first)).sum(dim=1)
    return int(torch.as_tensor(counts).max())


def _allowed(run: Scored, asked: Asked, same_label: bool, top_labels: int | None, exclude: Exclude) -> MayAnswer:
    """Make the rule that says which examples a query may be answered by."""
    classes = _classes(run, asked, same_label, top_labels)
    labels = torch.from_numpy(run.column("label")) if classes is not None else None
    own = None if asked.rows is None or exclude is None else torch.from_numpy(asked.rows)[:, None]
    digests = asked_digests = None
    if exclude == "duplicates":
        if run.digests is None or asked.digests is None:
            raise UnsupportedError("The examples hold objects without a digest, so duplicates are not known.")
        digests, asked_digests = torch.from_numpy(run.digests), torch.from_numpy(asked.digests)[:, None]
    if classes is None and own is None and digests is None:
        return None

    def allowed(first: int, count: int) -> Tensor:  # (Q, n)
        here = torch.ones(asked.count, count, dtype=torch.bool)
        if labels is not None and classes is not None:
            here &= (labels[first : first + count][None, :, None] == classes[:, None]).any(dim=2)
        if own is not None:
            here &= torch.arange(first, first + count) != own
        if digests is not None:
            here &= digests[first : first + count] != asked_digests
        return here

    return allowed


def _classes(run: Scored, asked: Asked, same_label: bool, top_labels: int | None) -> Tensor | None:  # (Q, c)
    if not same_label and top_labels is None:
        return None
    if same_label and top_labels is not None:
        raise InputError("same_label and top_labels exclude each other: give one of them.")
    if "label" not in run.columns:
        raise UnsupportedError("The task of this run has no classes, so answers cannot be restricted to some.")
    if same_label:
        return torch.from_numpy(asked.labels)[:, None]
    check_counts(1, top_labels=top_labels)
    if run.fitted is None or asked.data is None:
        raise InputError("top_labels needs the model and the queries' data: eigentrace.open_run(path, task, data).")
    task, found = run.fitted.task, []
    with task.session():
        for batch in asked.data.batches():
            outputs = task.outputs(task.params, task.place(batch.values))
            found.append(outputs.topk(min(int(top_labels), outputs.shape[1]), dim=1).indices.cpu())  # type: ignore[arg-type]
    classes = torch.cat(found)
    return classes if asked.rows is None else classes[torch.from_numpy(np.unique(asked.rows, return_inverse=True)[1])]


def _whole(fitted: Fitted) -> Fitted:
    """Return the fit with its tail as it is, not as features stand for it."""
    if isinstance(fitted, Ensemble):
        return replace(fitted, members=tuple(_whole(member) for member in fitted.members))
    return fitted.unstored() if isinstance(fitted, ProjectedFit) else fitted


def _scores(run: Scored, asked: Data, train: Data, normalize: Normalize) -> Tensor:  # (Q, n)
    compute = Compute(precision=run.manifest["compute"]["precision"])
    return _whole(run.fitted).influence(train, asked, normalize=normalize, compute=compute)  # type: ignore[arg-type]


def _different(asked: Asked) -> np.ndarray:  # (Q,)
    """Return where each query is in its data, which holds rows that are asked about twice, or out of order, once."""
    return np.arange(asked.count) if asked.rows is None else np.unique(asked.rows, return_inverse=True)[1]


def _rescored(run: Scored, asked: Asked, lists: Tensor, k: int, normalize: Normalize) -> Ranked:
    """Rank each query's shortlist by exact scores; no query sees another's list."""
    lists = lists.sort(dim=1).values
    lists[:, 1:] = lists[:, 1:].masked_fill(lists[:, 1:] == lists[:, :-1], -1)
    places = torch.from_numpy(_different(asked))
    scores = torch.full(lists.shape, torch.nan, dtype=torch.float64)
    for first in range(0, int(places.max()) + 1, _TOGETHER):
        here = ((places >= first) & (places < first + _TOGETHER)).nonzero().flatten()
        rows = lists[here].unique()
        rows = rows[rows >= 0]
        if len(rows):
            some = asked.data.take(np.unique(places[here].numpy()))  # type: ignore[union-attr]
            found = _scores(run, some, run.data.take(rows.numpy()), normalize)  # type: ignore[union-attr]
            place = torch.searchsorted(rows, lists[here].clamp_min(0)).clamp_max(len(rows) - 1)
            scores[here] = found[places[here] - first].double().gather(1, place)
    return _ranked(scores, lists, k)


def _by_gradients(run: Scored, asked: Asked, k: int, allowed: MayAnswer, normalize: Normalize) -> Ranked:
    """Score everybody who may answer by the model, a stretch of rows at a time."""
    places, step = torch.from_numpy(_different(asked)), max(1, _SCORES // asked.count)
    nobody = torch.full((asked.count, k), -1), torch.full((asked.count, k), torch.nan, dtype=torch.float64)
    best = Ranked(*nobody, *nobody)
    for first in range(0, run.num_rows, step):
        stretch = range(first, min(first + step, run.num_rows))
        rows = torch.arange(stretch.start, stretch.stop).expand(asked.count, -1)
        if allowed is not None:
            rows = rows.masked_fill(~allowed(first, len(stretch)), -1)
        here = (rows >= 0).any(dim=0).nonzero().flatten()
        if len(here):
            some = run.data.take((first + here).numpy())  # type: ignore[union-attr]
            scores = _scores(run, asked.data, some, normalize)[places].double()  # type: ignore[arg-type]
            best = _ranked(scores, rows[:, here], k, best)
    return best


def _ranked(scores: Tensor, rows: Tensor, k: int, before: Ranked | None = None) -> Ranked:
    """Take the k highest and lowest of what has a row, and of what was found before; equal scores in row order."""
    held: list[tuple[Tensor, Tensor]] = [(rows[:, :0], scores[:, :0])] * 2
    if before is not None:
        held = [(before.proponents, before.proponent_scores), (before.opponents, before.opponent_scores)]
    sides = []
    for sign, (old_rows, old_scores) in zip((-1.0, 1.0), held, strict=True):
        every, values = torch.cat([old_rows, rows], dim=1), torch.cat([old_scores, scores], dim=1)
        order = (sign * values).masked_fill(every < 0, torch.inf).sort(dim=1, stable=True).indices[:, :k]
        found = every.gather(1, order)
        sides += [found, values.gather(1, order).masked_fill(found < 0, torch.nan)]
    return Ranked(*sides)


def _side(run: Scored, rows: Tensor, scores: Tensor) -> Side:
    index, columns = rows.cpu().numpy(), run.columns

    def pick(name: str) -> np.ndarray | None:
        return np.where(index < 0, -1, run.column(name)[index]) if name in columns else None

    ids = None if run.names is None else run.names.of(index)
    return Side(index, scores.cpu().numpy(), ids, pick("label"), pick("prediction"))
