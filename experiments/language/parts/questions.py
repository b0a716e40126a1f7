"""Questions with worked answers: files, tokens, and padded batches; made-up ones stand in for them at toy size.

The files are those of GSM8K, school mathematics: gzipped lines of JSON with the keys `question` and `answer`.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import eigentrace as et
from eigentrace.errors import InputError

FILES = {"train": "gsm8k_train.jsonl.gz", "test": "gsm8k_test.jsonl.gz"}
SUBFOLDER = "language"
"""The files may lie in this folder of the data."""
ORIGIN = (
    "They are train.jsonl and test.jsonl of GSM8K (github.com/openai/grade-school-math, folder "
    "grade_school_math/data), each compressed with gzip."
)
Batch = dict[str, Tensor]
Encode = Callable[[list[str]], list[list[int]]]
"""Converts texts to tokens, without any that begin or end a text."""
# Labels of tokens that are not predicted.
IGNORED = -100
# Any token will do for padding: it is masked, has no label, and comes last.
_PAD = 0
# The width of batches is rounded up to a multiple of this, for few shapes with little padding.
_ROUND = 8


@dataclass(frozen=True)
class Texts:
    """Questions and answers as text."""

    questions: list[str]
    answers: list[str]

    def __len__(self) -> int:
        return len(self.questions)

    def first(self, count: int) -> "Texts":
        """Return the first ones."""
        return Texts(self.questions[:count], self.answers[:count])


@dataclass(frozen=True)
class Examples:
    """Questions and answers as tokens: what is given, and what is predicted."""

    questions: list[Tensor]
    answers: list[Tensor]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.questions[row], self.answers[row]

    @cached_property
    def answer_lengths(self) -> np.ndarray:  # (N,)
        """Number of tokens of each answer, over which its loss is summed."""
        return np.array([len(answer) for answer in self.answers])

    @cached_property
    def lengths(self) -> np.ndarray:  # (N,)
        """Number of tokens of each question with its answer."""
        return np.array([len(question) for question in self.questions]) + self.answer_lengths

    def take(self, rows: np.ndarray, answers: np.ndarray | None = None) -> "Examples":
        """Return some examples, optionally with the answers of other rows."""
        others = rows if answers is None else answers
        return Examples([self.questions[row] for row in rows], [self.answers[row] for row in others])

    def batch(self, rows: np.ndarray, device: torch.device) -> Batch:
        """Return some examples as a batch."""
        return {key: tensor.to(device) for key, tensor in padded([self[row] for row in rows]).items()}


@dataclass(frozen=True)
class Ordered:
    """Examples as data, longest first, so that batches have examples of similar length and the first is the largest."""

    data: et.Data
    order: np.ndarray
    """The example of each row of the data."""

    @staticmethod
    def of(examples: Examples, batch_size: int) -> "Ordered":
        """Sort examples by length."""
        order = longest_first(examples)
        return Ordered(et.Data(examples.take(order), padded, batch_size), order)

    def back(self, scores: Tensor) -> np.ndarray:  # (N, ...)
        """Return scores of the data in the order of the examples."""
        found = scores.detach().double().cpu().numpy()
        result = np.empty_like(found)
        result[self.order] = found
        return result


def longest_first(examples: Examples) -> np.ndarray:
    """Return the rows of examples by length."""
    return np.argsort(-examples.lengths, kind="stable")


def padded(examples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Collate examples of different lengths; only tokens of answers have labels."""
    width = max(len(question) + len(answer) for question, answer in examples)
    shape = (len(examples), -(-width // _ROUND) * _ROUND)
    tokens, labels = torch.full(shape, _PAD), torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, (question, answer) in enumerate(examples):
        begin, end = len(question), len(question) + len(answer)
        tokens[row, :begin] = question
        tokens[row, begin:end] = labels[row, begin:end] = answer
        mask[row, :end] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def encoded(texts: Texts, encode: Encode, end: int, longest: int) -> Examples:
    """Return texts as tokens, each answer with an end, without examples that are too long.

    Args:
        texts: Questions and answers.
        encode: Converts texts to tokens.
        end: The token that ends an answer.
        longest: Largest number of tokens of an example.
    """
    questions = [torch.tensor(tokens) for tokens in encode([f"{text}\n" for text in texts.questions])]
    answers = [torch.tensor([*tokens, end]) for tokens in encode(texts.answers)]
    whole = Examples(questions, answers)
    return whole.take(np.flatnonzero(whole.lengths <= longest))


def read_texts(folder: Path, name: str) -> Texts:
    """Read a file.

    Args:
        folder: The folder of the data, in which it may lie in a folder of its own.
        name: "train" or "test".

    Raises:
        InputError: If the file is not there, or has other content.
    """
    file = FILES[name]
    path = next((place for place in (folder / SUBFOLDER / file, folder / file) if place.exists()), None)
    if path is None:
        raise InputError(f"{file} is not in the folder of the data, nor in its folder {SUBFOLDER}. {ORIGIN}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        try:
            rows = [json.loads(line) for line in lines]
            return Texts([row["question"] for row in rows], [row["answer"] for row in rows])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file} has other content ({error!r}), expected lines of JSON with question and answer. {ORIGIN}"
            ) from None


def made_up(count: int, seed: int) -> Texts:
    """Return sums in words, which replace a file."""
    chance = np.random.default_rng([seed, 5])
    names, things = ("Ada", "Ben", "Cleo", "Dan"), ("pens", "figs", "nuts")
    questions, answers = [], []
    for _ in range(count):
        name, thing = chance.choice(names), chance.choice(things)
        a, b = chance.integers(2, 60, 2)
        questions.append(f"{name} has {a} {thing}, gets {b}?")
        answers.append(f"{a}+{b}={a + b}" + (f" {thing}" if chance.random() < 0.5 else ""))
    return Texts(questions, answers)
