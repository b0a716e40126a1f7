"""BLEU with sacreBLEU's defaults, as in the paper: mixed case, 13a tokenisation, exponential smoothing."""

from typing import Any

from eigentrace.errors import InputError


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
