"""BLEU: the number is that of the formula, under the settings the paper states."""

import math
import sys

import pytest

from eigentrace.errors import InputError
from experiments.translation.parts.bleu import bleu, signature
from tests.helpers.expecting import refused


def test_two_sentences_by_hand():
    pytest.importorskip("sacrebleu")
    guesses = ["the cat sat on the mat", "there is a small dog"]
    references = ["the cat sat on a mat", "there is a small dog here"]
    # Of one to four words, 5, 3, 2 and 1 in the first sentence are also in its reference, 5, 4, 3 and 2 in the second.
    precisions = [10 / 11, 7 / 9, 5 / 7, 3 / 5]
    shorter = math.exp(1 - 12 / 11)
    expected = 100 * shorter * math.exp(sum(math.log(p) for p in precisions) / 4)
    assert bleu(guesses, references) == pytest.approx(expected)
    assert bleu(references, references) == pytest.approx(100)
    assert bleu(["The cat sat on a mat"], ["the cat sat on a mat"]) < 100


def test_the_settings_are_those_of_the_paper():
    pytest.importorskip("sacrebleu")
    said = signature()
    for setting in ("case:mixed", "eff:no", "tok:13a", "smooth:exp", "version:"):
        assert setting in said


def test_without_the_package_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with refused(InputError, "pip install sacrebleu"):
        bleu(["a"], ["a"])
