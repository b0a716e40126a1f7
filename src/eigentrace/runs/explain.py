"""Search for the strongest proponents and opponents of queries, by stored features or exact scores."""

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
from eigentrace.fits.refine import Refine
from eigentrace.numeric.top_k import Ranked, merged
from eigentrace.projection.engine import Compute
from eigentrace.runs.candidates import Eligible, Queries, by_features, candidates
from eigentrace.settings import check_counts, counted
from eigentrace.store.columns import DIGEST, FEATURES
from eigentrace.store.reader import RunReader
from eigentrace.store.write import measured

Exclude = Literal["self", "duplicates"] | None
EXACT, RESCORED, STORED, KEPT = "exact", "rescored", "stored tail", "kept directions only"
# Default number of candidates per query, and its minimum as a multiple of k. If at most twice as many examples are
# eligible, all of them are scored.
_SHORTLIST, _TIMES = 2000, 20
# Number of queries whose shortlists are scored together, and of exact scores in memory at a time.
_TOGETHER, _SCORES = 64, 2**24
_ROWS = 65_536  # rows whose eligibility is evaluated at a time


@dataclass(frozen=True)
class Side:
    """The top k proponents, or the top k opponents, of each query, strongest first.

    If fewer than k examples are eligible, the remaining entries are -1 (row, label, prediction), NaN (score) and None
    (id).
    """

    rows: np.ndarray  # (Q, k)
    scores: np.ndarray  # (Q, k)
    ids: np.ndarray | None  # (Q, k)
    labels: np.ndarray | None  # (Q, k)
    predictions: np.ndarray | None  # (Q, k)

    def __repr__(self) -> str:
        queries, k = self.rows.shape
        return f"<Side: the top {k} examples of {counted(queries, 'query')}>"


@dataclass(frozen=True)
class Explanation:
    """The top k proponents and opponents of each query, and how they were scored."""

    proponents: Side
    """Highest scores first."""
    opponents: Side
    """Lowest scores first; if fewer than k examples have a negative score, positive ones follow."""
    how: str
    """"exact": every eligible example was scored exactly; "rescored": the scores are exact, but only candidates were
    scored; "stored tail": scores from stored features that approximate the tail; "kept directions only": scores from
    stored features without the tail."""
    unit: str | None
    """"nats", the predicted increase of the query's loss without the example; "cosine" in the metric; else None."""
    shortlist: int | None = None
    """Number of candidates per query that were rescored; None if no shortlist was used."""
    refine: int | str | None = None
    """Number of products with the curvature by which exact scores were refined; None if they were not."""

    def __repr__(self) -> str:
        queries, k = self.proponents.rows.shape
        unit = "" if self.unit is None else f", in {self.unit}"
        return f"<Explanation of {counted(queries, 'query')}: top {k} proponents and opponents, {self.told}{unit}>"

    @property
    def told(self) -> str:
        """How the examples were scored, as text: `how`, or the size of the shortlist, and whether by solves."""
        how = self.how if self.shortlist is None else f"exact scores of a shortlist of {self.shortlist:,}"
        if self.refine is None:
            return how
        rounds = self.refine if isinstance(self.refine, str) else counted(self.refine, "product")
        return f"{how}, refined ({rounds})"

    def table(self) -> pa.Table:
        """Return a table with one row per query and proponent or opponent."""
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
    refine: Any = None,
    device: Any = None,
) -> Explanation:
    """Return the top k proponents and opponents of each query.

    Args:
        run: A complete run.
        queries: One or more rows of the run, which need no model, or new examples, which need the model.
        k: Number of proponents, and of opponents, per query.
        fitted: The fit, needed for new examples and for exact scores.
        data: The examples that were scored, needed for exact scores.
        normalize: None, "gradient" (gradients scaled to length 1), "features" (their features scaled to length 1; by
            stored features only) or "metric" (cosine in the metric of the curvature). With None, examples with large
            gradients rank high for every query.
        same_label: Consider only examples with the query's own label.
        top_labels: Consider only examples with one of this many most probable labels of the query, as in the paper.
        exclude: "self" excludes the query's own row, "duplicates" also all its exact duplicates, None nothing.
        rescore: Rescore candidates exactly with the model, including the whole tail. If None, rescore if `fitted` and
            `data` are given and stored features do not give exact scores.
        shortlist: Number of candidates per query to rescore, half of them proponents and half opponents; if no more
            examples are eligible, all of them are scored. If None, max(2,000, 20·k), and all eligible examples are
            scored if there are at most twice as many.
        refine: Refine exact scores by products with the curvature: their number per query, "converged", or
            `eigentrace.Refine(...)`; see `Fitted.refined`. Needs the model; shortlists are drawn up without it.
        device: Device of the feature products; the CPU if None.
    """
    _check(k, shortlist, normalize, exclude)
    settings = None if refine is None else Refine.of(refine)
    rescore = _with_refine(rescore, normalize) if settings else rescore
    run.check_complete()
    asked = _asked(run, queries, fitted, data)
    allowed = _allowed(run, asked, _classes(run, asked, fitted, same_label, top_labels), exclude)
    model = _model(run, fitted, data, rescore, normalize, settings)
    k = min(k, run.num_rows)
    count = max(2 * k, shortlist or max(_SHORTLIST, _TIMES * k))
    few = count if shortlist else 2 * count
    chosen = allowed if same_label or top_labels else None
    how, listed = EXACT, None
    if model is None:
        ranked, how = by_features(run, asked, k, allowed, normalize, device), _how(run)
    elif not run.num_features or _most_eligible(run, chosen, few) <= few:
        ranked = _by_gradients(model, asked, k, allowed)
    else:
        lists = candidates(run, asked, -(-count // 2), allowed, normalize, device)
        ranked, how, listed = _rescored(model, asked, lists, k), RESCORED, lists.shape[1]
    return _explanation(run, ranked, normalize, (how, listed, settings.rounds if settings else None))


def _explanation(
    run: RunReader, ranked: Ranked, normalize: Normalize, told: tuple[str, int | None, int | str | None]
) -> Explanation:
    """Return the ranked examples with their scores in the unit of the run."""
    unit = "cosine" if normalize == "metric" else "nats" if run.manifest["has_curvature"] and not normalize else None
    divisor = float(run.manifest["num_train"]) if unit == "nats" else 1.0
    proponents = _side(run, ranked.proponents, ranked.proponent_scores / divisor)
    opponents = _side(run, ranked.opponents, ranked.opponent_scores / divisor)
    how, listed, refine = told
    return Explanation(proponents, opponents, how, unit, listed, refine)


def _with_refine(rescore: bool | None, normalize: Normalize) -> bool:
    """Return whether to rescore with `refine`: always; raise InputError if that cannot be."""
    if rescore is False or normalize in ("metric", "features"):
        given = "rescore=False" if rescore is False else f"normalize={normalize!r}"
        raise InputError(f"refine cannot be combined with {given}: it scores whole gradients. Leave one of them out.")
    return True


def _check(k: int, shortlist: int | None, normalize: Normalize, exclude: Exclude) -> None:
    check_counts(1, k=k)
    if shortlist is not None:
        check_counts(2, shortlist=shortlist)
    if normalize not in (None, "gradient", "features", "metric"):
        raise InputError(f"normalize must be None, 'gradient', 'features' or 'metric', got {normalize!r}.")
    if exclude not in (None, "self", "duplicates"):
        raise InputError(f"exclude must be None, 'self' or 'duplicates', got {exclude!r}.")


def _asked(run: RunReader, queries: Any, fitted: Fitted | None, data: Data | None) -> Queries:
    if isinstance(queries, Integral) or _are_rows(queries):
        return _asked_rows(run, np.atleast_1d(np.asarray(queries, dtype=np.int64)), data)
    if fitted is None:
        raise InputError(
            "New examples as queries need the model. Open the run with eigentrace.open_run(path, task, data), or pass "
            "rows of the run."
        )
    given = as_data(queries)
    found = measured(fitted, given, Compute(precision=run.manifest["compute"]["precision"]))
    return Queries(len(given), None, found.get(FEATURES), given, *(_numpy(found, name) for name in _KNOWN))


_KNOWN = ("label", DIGEST, "square_norm", "self_influence")


def _numpy(found: dict[str, Tensor], name: str) -> np.ndarray | None:
    return found[name].numpy() if name in found else None


def _are_rows(queries: Any) -> bool:
    if isinstance(queries, np.ndarray | Tensor):
        return queries.ndim == 1 and np.asarray(queries).dtype.kind in "iu"
    return isinstance(queries, Sequence) and len(queries) > 0 and all(isinstance(q, Integral) for q in queries)


def _asked_rows(run: RunReader, rows: np.ndarray, data: Data | None) -> Queries:
    def known(name: str) -> np.ndarray | None:
        return run.column(name, rows) if name in run.columns else None

    own = known("self_influence")  # raises InputError for rows that are not in the run
    norms = known("gradient_norm")
    return Queries(
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
    """A fit, its training data and settings, which score examples exactly."""

    fitted: Fitted
    data: Data
    compute: Compute
    normalize: Normalize
    refine: Refine | None

    def scores(self, asked: Data, rows: np.ndarray) -> Tensor:  # (n,) -> (Q, n)
        """Return the exact scores of rows of the data for queries, tail included."""
        train = self.data.take(rows)
        if self.refine is not None:
            options: dict[str, Any] = {"normalize": self.normalize, "compute": self.compute}
            return self.fitted.refined(train, asked, self.refine, curvature_data=self.data, **options).scores
        return self.fitted.influence(train, asked, normalize=self.normalize, compute=self.compute)


def _model(
    run: RunReader,
    fitted: Fitted | None,
    data: Data | None,
    wanted: bool | None,
    normalize: Normalize,
    refine: Refine | None,
) -> _Model | None:
    """Return the model for exact scores if it is available and wanted; None if stored features are to be used."""
    if normalize == "features" and wanted:
        raise InputError(
            "normalize='features' scores by stored features only, and rescore=True by whole gradients. Use "
            "normalize='gradient', or do not pass rescore=True."
        )
    if fitted is None or data is None or normalize == "features":
        _check_answerable(run, wanted, normalize)
        return None
    # Each member of an ensemble has its own gradients, and the run stores the gradient norm of only one member.
    many_lengths = normalize == "gradient" and _is_ensemble(run)
    if wanted is False and many_lengths:
        raise UnsupportedError(_MANY_LENGTHS)
    if not (wanted or (wanted is None and (many_lengths or _how(run) != EXACT or not run.num_features))):
        _check_features(run)
        return None
    compute = Compute(precision=run.manifest["compute"]["precision"])
    return _Model(fitted.unstored(), data, compute, normalize, refine)


def _check_answerable(run: RunReader, wanted: bool | None, normalize: Normalize) -> None:
    """Raise an error if the query cannot be answered from stored features alone."""
    if wanted:
        raise InputError(
            "rescore=True needs the model and the data. Open the run with eigentrace.open_run(path, task, data), or "
            "use rescore=False."
        )
    _check_features(run)
    if normalize == "gradient" and _is_ensemble(run):
        raise UnsupportedError(_MANY_LENGTHS)


def _check_features(run: RunReader) -> None:
    name = run.manifest["method"]["name"]
    if not run.scores_pairs:
        raise UnsupportedError(f"{name} scores single examples, not pairs: it has no proponents or opponents.")
    if not run.num_features:
        raise UnsupportedError(
            f"{name} stores no features, so its scores need the model and the data. Open the run with "
            "eigentrace.open_run(path, task, data), or use --exact on the command line."
        )


_MANY_LENGTHS = (
    "normalize='gradient' of an ensemble normalises the gradients of each member, which needs the model and the data. "
    "Open the run with eigentrace.open_run(path, task, data) and do not pass rescore=False, or use normalize='metric'."
)


def _is_ensemble(run: RunReader) -> bool:
    return run.manifest["method"]["name"] == "Ensemble"


def _how(run: RunReader) -> str:
    """Return which value of `Explanation.how` applies to scores from stored features alone."""
    if not run.holds_everything:
        return KEPT
    return STORED if run.manifest["method"].get("cut", {}).get("stored") else EXACT


def _most_eligible(run: RunReader, allowed: Eligible, enough: int) -> int:
    """Return the largest number of eligible examples of any query; not counted if there are at most `enough` rows."""
    if allowed is None or run.num_rows <= enough:
        return run.num_rows
    counts: Tensor | int = 0
    for first in range(0, run.num_rows, _ROWS):
        count = min(_ROWS, run.num_rows - first)
        may = allowed(first, count)
        counts = counts + (count if may is None else may.sum(dim=1))
    return int(torch.as_tensor(counts).max())


def _allowed(run: RunReader, asked: Queries, classes: Tensor | None, exclude: Exclude) -> Eligible:
    """Return the function that masks the examples eligible for each query; it reads labels and digests on demand."""
    own = None if asked.rows is None or exclude is None else asked.rows
    digests = None
    if exclude == "duplicates":
        if not run.has_digests or asked.digests is None:
            raise UnsupportedError(
                "exclude='duplicates' needs a digest of every example, but some contain objects without one. Use "
                "exclude='self'."
            )
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
    run: RunReader, asked: Queries, fitted: Fitted | None, same_label: bool, top_labels: int | None
) -> Tensor | None:  # (Q, c)
    """Return the classes whose examples are eligible for each query; None if all are."""
    if not same_label and top_labels is None:
        return None
    if same_label and top_labels is not None:
        raise InputError("same_label and top_labels cannot be combined. Pass only one of them.")
    if "label" not in run.columns:
        raise UnsupportedError("same_label and top_labels need a task with labels, but the run has no column 'label'.")
    if same_label:
        return torch.from_numpy(asked.labels)[:, None]
    check_counts(1, top_labels=top_labels)
    if fitted is None or asked.data is None:
        raise InputError(
            "top_labels needs the model and the data. Open the run with eigentrace.open_run(path, task, data)."
        )
    task, found = fitted.task, []
    with task.session():
        for batch in asked.data.batches():
            outputs = task.outputs(task.params, task.place(batch.values))
            found.append(outputs.topk(min(int(top_labels), outputs.shape[1]), dim=1).indices.cpu())  # type: ignore[arg-type]
    return torch.cat(found)[_places(asked)]


def _places(asked: Queries) -> Tensor:  # (Q,)
    """Return the position of each query in `asked.data`, in which the queries' rows are sorted and unique."""
    if asked.rows is None:
        return torch.arange(asked.count)
    return torch.from_numpy(np.unique(asked.rows, return_inverse=True)[1])


def _rescored(model: _Model, asked: Queries, lists: Tensor, k: int) -> Ranked:
    """Rank each query's own shortlist by exact scores."""
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


def _by_gradients(model: _Model, asked: Queries, k: int, allowed: Eligible) -> Ranked:
    """Rank all eligible examples by exact scores, computed for one range of rows at a time."""
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
