"""Datasets of texts, tokenized on access and padded to one of a few lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigentrace.formats.records import Records

_IGNORED = -100
Example = dict[str, Any]


@dataclass(frozen=True)
class TextDataset:
    """A map-style torch dataset of tokenized texts.

    With `labels` it is for classifiers, with `target` for seq2seq models, and otherwise for causal language models,
    whose labels are the tokens. A text without tokens becomes one padding token, which has no label.
    """

    records: Records
    tokenizer: Any
    text: str
    pair: str | None = None
    target: str | None = None
    labels: np.ndarray | None = None  # (N,)
    longest: int | None = None
    """Maximum number of tokens of a text, to which texts are truncated."""
    token_types: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def all_labels(self) -> np.ndarray | None:  # (N,)
        """Return the class of every row, or None without labels."""
        return self.labels

    def __getitem__(self, row: int) -> Example:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Example]:
        """Return several examples, tokenized in one call, which is several times faster than one by one."""
        names = [name for name in (self.text, self.pair, self.target) if name is not None]
        read = self.records.read(rows, list(dict.fromkeys(names)))
        columns = {name: read.column(name).to_pylist() for name in names}
        encoded = self._tokens(columns[self.text], None if self.pair is None else columns[self.pair])
        examples: list[Example] = [{"input_ids": _array(ids, self._filler)} for ids in encoded["input_ids"]]
        if self.token_types:
            for example, kinds in zip(examples, encoded["token_type_ids"], strict=True):
                example["token_type_ids"] = _array(kinds, 0)
        if self.target is not None:
            targets = self._tokens(None, None, text_target=columns[self.target])["input_ids"]
            for example, ids in zip(examples, targets, strict=True):
                example["labels"] = _array(ids, _IGNORED)
        if self.labels is not None:
            for example, label in zip(examples, self.labels[np.asarray(rows)].tolist(), strict=True):
                example["labels"] = label
        return examples

    def collate(self, examples: list[Example]) -> dict[str, Tensor]:
        """Return a batch of examples, padded on the right, with an attention mask."""
        ids = [example["input_ids"] for example in examples]
        length = padded_length(max(map(len, ids)), self.longest)
        batch = {
            "input_ids": _padded(ids, length, self._filler),
            "attention_mask": _padded([np.ones_like(one) for one in ids], length, 0),
        }
        if self.token_types:
            batch["token_type_ids"] = _padded([example["token_type_ids"] for example in examples], length, 0)
        if self.labels is not None:
            return batch | {"labels": torch.tensor([example["labels"] for example in examples])}
        if self.target is None:
            return batch | {"labels": _padded(ids, length, _IGNORED)}
        labels = [example["labels"] for example in examples]
        return batch | {"labels": _padded(labels, padded_length(max(map(len, labels)), self.longest), _IGNORED)}

    @property
    def _filler(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def _tokens(self, texts: list[str] | None, pairs: list[str] | None, **target: list[str]) -> Any:
        return self.tokenizer(
            texts,
            pairs,
            **target,
            truncation=self.longest is not None,
            max_length=self.longest,
            return_attention_mask=False,
            return_token_type_ids=self.token_types,
        )


def _array(numbers: list[int], filler: int) -> np.ndarray:
    return np.asarray(numbers or [filler], dtype=np.int64)


def padded_length(longest: int, limit: int | None = None) -> int:
    """Return the smallest of 8, 16, 24, 32, 48, 64, 96, 128, 192, … that is at least `longest`, capped at `limit`.

    Few distinct lengths keep kernel selection and compilation rare, because both are done once per length.

    >>> [padded_length(n) for n in (1, 8, 17, 33, 65, 97, 400)]
    [8, 8, 24, 48, 96, 128, 512]
    >>> padded_length(17, limit=20)
    20
    """
    length = 8
    while length < longest:
        power = 1 << (length.bit_length() - 1)
        length = power * 3 // 2 if length == power and power > 8 else 2 * power
    return length if limit is None else max(min(length, limit), longest)


def _padded(rows: list[np.ndarray], length: int, filler: int) -> Tensor:  # (B, T)
    padded = np.full((len(rows), length), filler, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
