"""Who is responsible: the strongest proponents and opponents of queries, by stored features, exactly where possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from eigentrace.data import Data, as_data
from eigentrace.errors import InputError, UnsupportedError
from eigentrace.fits.fitted import Fitted, Normalize
from eigentrace.numeric.top_k import Ranked, merged
from eigentrace.projection.engine import Compute
from eigentrace.runs.candidates import Asked, MayAnswer, by_features, candidates
from eigentrace.settings import check_counts
from eigentrace.store.columns import DIGEST, FEATURES
from eigentrace.store.reader import RunReader
from eigentrace.store.write import measured

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
    run: RunReader,
    queries: Any,
    k: int = 10,
    *,
    fitted: Fitted | None = None,
    data: Data | None = None,
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
        fitted: The fit, where the model is at hand.
        data: The examples that were scored, where they are at hand.
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
    run.check_complete()
    asked = _asked(run, queries, fitted, data)
    allowed = _allowed(run, asked, _classes(run, asked, fitted, same_label, top_labels), exclude)
    model = _model(run, fitted, data, rescore, normalize)
    k = min(k, run.num_rows)
    count = max(2 * k, shortlist or max(_SHORTLIST, _TIMES * k))
    few = count if shortlist else 2 * count
    chosen = allowed if same_label or top_labels else None
    how, listed = EXACT, None
    if model is None:
        ranked, how = by_features(run, asked, k, allowed, normalize, device), _how(run)
    elif not run.num_features or _most_answers(run, chosen, few) <= few:
        ranked = _by_gradients(model, asked, k, allowed)
    else:
        lists = candidates(run, asked, -(-count // 2), allowed, normalize, device)
        ranked, how, listed = _rescored(model, asked, lists, k), RESCORED, lists.shape[1]
    unit = "cosine" if normalize == "metric" else "nats" if run.manifest["has_curvature"] and not normalize else None
    divisor = float(run.manifest["num_train"]) if unit == "nats" else 1.0
    proponents = _side(run, ranked.proponents, ranked.proponent_scores / divisor)
    return Explanation(proponents, _side(run, ranked.opponents, ranked.opponent_scores / divisor), how, unit, listed)


def _check(k: int, shortlist: int | None, normalize: Normalize, exclude: Exclude) -> None:
    check_counts(1, k=k)
    if shortlist is not None:
        check_counts(2, shortlist=shortlist)
    if normalize not in (None, "gradient", "metric"):
        raise InputError(f"normalize must be None, 'gradient' or 'metric', got {normalize!r}.")
    if exclude not in (None, "self", "duplicates"):
        raise InputError(f"exclude must be None, 'self' or 'duplicates', got {exclude!r}.")


def _asked(run: RunReader, queries: Any, fitted: Fitted | None, data: Data | None) -> Asked:
    if isinstance(queries, Integral) or _are_rows(queries):
        return _asked_rows(run, np.atleast_1d(np.asarray(queries, dtype=np.int64)), data)
    if fitted is None:
        raise InputError(
            "New examples need the model: open the run with eigentrace.open_run(path, task, data), or ask about rows "
            "of the run by their numbers."
        )
    given = as_data(queries)
    found = measured(fitted, given, Compute(precision=run.manifest["compute"]["precision"]))
    return Asked(len(given), None, found.get(FEATURES), given, *(_numpy(found, name) for name in _KNOWN))


_KNOWN = ("label", DIGEST, "square_norm", "self_influence")


def _numpy(found: dict[str, Tensor], name: str) -> np.ndarray | None:
    return found[name].numpy() if name in found else None


def _are_rows(queries: Any) -> bool:
    if isinstance(queries, np.ndarray | Tensor):
        return queries.ndim == 1 and np.asarray(queries).dtype.kind in "iu"
    return isinstance(queries, Sequence) and len(queries) > 0 and all(isinstance(q, Integral) for q in queries)


def _asked_rows(run: RunReader, rows: np.ndarray, data: Data | None) -> Asked:
    def known(name: str) -> np.ndarray | None:
        return run.column(name, rows) if name in run.columns else None

    own = known("self_influence")  # a row that is not there is refused here
    norms = known("gradient_norm")
    return Asked(
        count=len(rows),
        rows=rows,
        features=run.features_of(rows) if run.num_features else None,
        data=None if data is None else data.take(np.unique(rows)),
        labels=known("label"),
        digests=run.digests(rows),
        square_norms=None if norms is None else norms**2,
        self_influence=own,
    )


@dataclass(frozen=True)
class _Model:
    """What scores examples exactly."""

    fitted: Fitted
    data: Data
    compute: Compute
    normalize: Normalize

    def scores(self, asked: Data, rows: np.ndarray) -> Tensor:  # (n,) -> (Q, n)
        """Score rows of the data for queries, with the whole tail."""
        train = self.data.take(rows)
        return self.fitted.influence(train, asked, normalize=self.normalize, compute=self.compute)


def _model(
    run: RunReader, fitted: Fitted | None, data: Data | None, wanted: bool | None, normalize: Normalize
) -> _Model | None:
    """Return what scores exactly, if it is at hand and wanted; None where stored features are to answer."""
    if fitted is None or data is None:
        _check_answerable(run, wanted, normalize)
        return None
    # Members of an ensemble have gradients of their own, and the run holds the length of one of them.
    many_lengths = normalize == "gradient" and _is_ensemble(run)
    if wanted is False and many_lengths:
        raise UnsupportedError(_MANY_LENGTHS)
    if not (wanted or (wanted is None and (many_lengths or _how(run) != EXACT or not run.num_features))):
        _check_features(run)
        return None
    return _Model(fitted.unstored(), data, Compute(precision=run.manifest["compute"]["precision"]), normalize)


def _check_answerable(run: RunReader, wanted: bool | None, normalize: Normalize) -> None:
    """Stop if stored features cannot answer, where they are all there is."""
    if wanted:
        raise InputError(
            "Scoring a shortlist again needs the model and the data: open the run with eigentrace.open_run(path, task, "
            "data), or use rescore=False."
        )
    _check_features(run)
    if normalize == "gradient" and _is_ensemble(run):
        raise UnsupportedError(_MANY_LENGTHS)


def _check_features(run: RunReader) -> None:
    name = run.manifest["method"]["name"]
    if not run.scores_pairs:
        raise UnsupportedError(f"{name} scores single examples, not pairs, and stores no features: there is no answer.")
    if not run.num_features:
        raise UnsupportedError(
            f"{name} stores no features, so its scores need the model and the data: open the run with "
            "eigentrace.open_run(path, task, data), or ask with --exact on the command line."
        )


_MANY_LENGTHS = (
    "Gradients of each member of an ensemble are normalised by themselves, which needs the model and the data: "
    "open the run with eigentrace.open_run(path, task, data) and let it rescore, or use normalize='metric'."
)


def _is_ensemble(run: RunReader) -> bool:
    return run.manifest["method"]["name"] == "Ensemble"


def _how(run: RunReader) -> str:
    """Say how much of the score the stored features alone can give."""
    if not run.holds_everything:
        return KEPT
    return STORED if run.manifest["method"].get("cut", {}).get("stored") else EXACT


def _most_answers(run: RunReader, allowed: MayAnswer, enough: int) -> int:
    """Count the examples that the freest query may be answered by, where they may be as few as that."""
    if allowed is None or run.num_rows <= enough:
        return run.num_rows
    counts: Tensor | int = 0
    for first in range(0, run.num_rows, _ROWS):
        count = min(_ROWS, run.num_rows - first)
        may = allowed(first, count)
        counts = counts + (count if may is None else may.sum(dim=1))
    return int(torch.as_tensor(counts).max())


def _allowed(run: RunReader, asked: Asked, classes: Tensor | None, exclude: Exclude) -> MayAnswer:
    """Make the rule that says which examples a query may be answered by; it reads what it needs of the rows at hand."""
    own = None if asked.rows is None or exclude is None else asked.rows
    digests = None
    if exclude == "duplicates":
        if not run.has_digests or asked.digests is None:
            raise UnsupportedError("The examples hold objects without a digest, so duplicates are not known.")
        digests = torch.from_numpy(asked.digests)[:, None]
    if classes is None and own is None and digests is None:
        return None

    def allowed(first: int, count: int) -> Tensor | None:  # (Q, n)
        rows = range(first, first + count)
        asking = () if own is None else np.flatnonzero((own >= first) & (own < first + count))
        if classes is None and digests is None and not len(asking):
            return None
        here = torch.ones(asked.count, count, dtype=torch.bool)
        if classes is not None:
            labels = torch.from_numpy(run.column("label", rows))
            here &= (labels[None, :, None] == classes[:, None]).any(dim=2)
        if own is not None and len(asking):
            here[asking, own[asking] - first] = False
        if digests is not None:
            here &= torch.from_numpy(run.digests(rows)) != digests
        return here

    return allowed


def _classes(
    run: RunReader, asked: Asked, fitted: Fitted | None, same_label: bool, top_labels: int | None
) -> Tensor | None:  # (Q, c)
    """Return the classes whose examples may answer each query; None if all may."""
    if not same_label and top_labels is None:
        return None
    if same_label and top_labels is not None:
        raise InputError("same_label and top_labels exclude each other: give one of them.")
    if "label" not in run.columns:
        raise UnsupportedError("The task of this run has no classes, so answers cannot be restricted to some.")
    if same_label:
        return torch.from_numpy(asked.labels)[:, None]
    check_counts(1, top_labels=top_labels)
    if fitted is None or asked.data is None:
        raise InputError("top_labels needs the model and the queries' data: eigentrace.open_run(path, task, data).")
    task, found = fitted.task, []
    with task.session():
        for batch in asked.data.batches():
            outputs = task.outputs(task.params, task.place(batch.values))
            found.append(outputs.topk(min(int(top_labels), outputs.shape[1]), dim=1).indices.cpu())  # type: ignore[arg-type]
    return torch.cat(found)[_places(asked)]


def _places(asked: Asked) -> Tensor:  # (Q,)
    """Return where each query is in its data, which holds rows that are asked about twice, or out of order, once."""
    if asked.rows is None:
        return torch.arange(asked.count)
    return torch.from_numpy(np.unique(asked.rows, return_inverse=True)[1])


def _rescored(model: _Model, asked: Asked, lists: Tensor, k: int) -> Ranked:
    """Rank each query's shortlist by exact scores; no query sees another's list."""
    lists = lists.sort(dim=1).values
    lists[:, 1:] = lists[:, 1:].masked_fill(lists[:, 1:] == lists[:, :-1], -1)
    places = _places(asked)
    scores = torch.full(lists.shape, torch.nan, dtype=torch.float64)
    for first in range(0, int(places.max()) + 1, _TOGETHER):
        here = ((places >= first) & (places < first + _TOGETHER)).nonzero().flatten()
        rows = lists[here].unique()
        rows = rows[rows >= 0]
        if len(rows):
            some = asked.data.take(np.unique(places[here].numpy()))  # type: ignore[union-attr]
            found = model.scores(some, rows.numpy())
            place = torch.searchsorted(rows, lists[here].clamp_min(0)).clamp_max(len(rows) - 1)
            scores[here] = found[places[here] - first].double().gather(1, place)
    return merged(scores, lists, k)


def _by_gradients(model: _Model, asked: Asked, k: int, allowed: MayAnswer) -> Ranked:
    """Score everybody who may answer by the model, a stretch of rows at a time."""
    places, step, total = _places(asked), max(1, _SCORES // asked.count), len(model.data)
    nobody = torch.full((asked.count, k), -1), torch.full((asked.count, k), torch.nan, dtype=torch.float64)
    best = Ranked(*nobody, *nobody)
    for first in range(0, total, step):
        stretch = range(first, min(first + step, total))
        rows = torch.arange(stretch.start, stretch.stop).expand(asked.count, -1)
        may = None if allowed is None else allowed(first, len(stretch))
        if may is not None:
            rows = rows.masked_fill(~may, -1)
        here = (rows >= 0).any(dim=0).nonzero().flatten()
        if len(here):
            scores = model.scores(asked.data, (first + here).numpy())[places].double()  # type: ignore[arg-type]
            best = merged(scores, rows[:, here], k, best)
    return best


def _side(run: RunReader, rows: Tensor, scores: Tensor) -> Side:
    index = rows.cpu().numpy()

    def pick(name: str) -> np.ndarray | None:
        return np.where(index < 0, -1, run.column(name, index.clip(min=0))) if name in run.columns else None

    ids = None if run.ids is None else run.ids.of(index)
    return Side(index, scores.cpu().numpy(), ids, pick("label"), pick("prediction"))
