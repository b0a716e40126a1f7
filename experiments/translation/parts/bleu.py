"""BLEU with sacreBLEU's defaults, as in the paper: mixed case, 13a tokenisation, exponential smoothing."""

from collections.abc import Sequence
from typing import Any

from eigentrace.errors import InputError
from experiments.translation.parts.corpora import FILES, Corpora

SETS = ("newstest2016", "multi30k")
"""The test sets of BLEU, by prefix of the origin of a test sentence."""


def bleu_by_set(corpora: Corpora, tokens: Sequence[list[int]]) -> dict[str, float]:
    """Return the BLEU of translations of all test pairs, on each test set."""
    texts = corpora.texts("test").take(corpora.pairs("test").rows)
    guesses = corpora.subwords.text(list(tokens))
    found = {}
    for name in SETS:
        here = [place for place, said in enumerate(texts.verdicts) if said.startswith(name)]
        if not here:
            raise InputError(f"No sentence of {FILES['test']} has a source that begins with {name}: BLEU needs some.")
        found[name] = bleu([guesses[k] for k in here], [texts.english[k] for k in here])
    return found


def bleu(guesses: list[str], references: list[str]) -> float:
    """Return the BLEU of translations, in percent, each with one reference."""
    return float(_metric().corpus_score(guesses, [references]).score)


def signature() -> str:
    """Return sacreBLEU's signature of its settings."""
    metric = _metric()
    # The number of references is known only after computing a score.
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


def _metric() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise InputError("BLEU needs sacreBLEU: pip install sacrebleu.") from error
    return BLEU()
