"""German-English sentence pairs: files, a shared subword vocabulary, padded batches, and the task.

The files are gzipped tables with a header and the columns `de` and `en`; there is no single public file of this kind.
"""

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import eigentrace as et
from eigentrace.disk.atomic import replacing
from eigentrace.errors import InputError
from eigentrace.task.parameters import Params
from experiments.shared.frame import Session
from experiments.translation.parts.cut import short_rows
from experiments.translation.parts.phrases import COUNTS, stand_ins
from experiments.translation.parts.withheld import withheld
from harness.files import made_once
from harness.models import Batch

FILES = {
    "train": "deen_train_clean.tsv.gz",
    "withheld": "deen_train_clean.tsv.gz",
    "dev": "deen_dev.tsv.gz",
    "test": "deen_test_newstest2016.tsv.gz",
    "crawl": "deen_noisy_commoncrawl.tsv.gz",
    "judged": "deen_paracrawl_human.tsv.gz",
    "comparable": "deen_comparable_multi30k.tsv.gz",
    "wrong_language": "xxen_paracrawl_wronglang.tsv.gz",
}
"""The files; two thirds of the first are used for training, the other third is withheld."""
_CLEAN = ("train", "withheld")
# The column with an annotation of each pair.
_SAID = {"judged": "label", "wrong_language": "lang", "test": "source", "train": "source"}
PAD, BEGIN, END, UNKNOWN = range(4)
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = 32_000
# Largest number of tokens of a sentence, END included; the few pairs with a longer side are left out.
LONGEST = 128
# The width of batches is rounded up to a multiple of this, for few shapes with little padding.
_ROUND = 4
SMALL_WORDS = 240
_SPACE = "▁"


@dataclass(frozen=True)
class Texts:
    """Sentence pairs as text."""

    german: list[str]
    english: list[str]
    verdicts: list[str]
    """An annotation of each pair: a human verdict, its language or its origin; may be empty."""

    def __len__(self) -> int:
        return len(self.german)

    def take(self, rows: Sequence[int] | np.ndarray) -> "Texts":
        """Return some of the pairs."""
        return Texts(*([column[row] for row in rows] for column in (self.german, self.english, self.verdicts)))

    def __add__(self, other: "Texts") -> "Texts":
        return Texts(self.german + other.german, self.english + other.english, self.verdicts + other.verdicts)

    @property
    def digest(self) -> str:
        """A digest of all texts."""
        joined = "\n".join((*self.german, *self.english))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs as tokens, both sides with END and padding; batches are trimmed to their longest sentence."""

    source: Tensor  # (N, S) int32
    target: Tensor  # (N, T) int32
    rows: np.ndarray  # (N,)
    """Rows of the pairs among the texts, from which pairs with a long side are left out."""

    @cached_property
    def source_lengths(self) -> np.ndarray:  # (N,)
        """Number of tokens of each source, on the CPU, where widths are computed."""
        return (self.source != PAD).sum(dim=1).cpu().numpy()

    @cached_property
    def target_lengths(self) -> np.ndarray:  # (N,)
        """Number of tokens of each target, over which its loss is summed."""
        return (self.target != PAD).sum(dim=1).cpu().numpy()

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> "Pairs":
        """Move the tokens to a device."""
        return Pairs(self.source.to(device), self.target.to(device), self.rows)

    def take(self, rows: np.ndarray, targets: np.ndarray | None = None) -> "Pairs":
        """Return some pairs, optionally with the targets of other rows."""
        sides = [
            table[torch.from_numpy(index).to(table.device)]
            for table, index in ((self.source, rows), (self.target, rows if targets is None else targets))
        ]
        return Pairs(sides[0], sides[1], self.rows[rows])

    def __add__(self, other: "Pairs") -> "Pairs":
        """Append pairs, padded to the larger width; rows are renumbered."""
        sides = []
        for first, second in ((self.source, other.source), (self.target, other.target)):
            width = max(first.shape[1], second.shape[1])
            sides.append(torch.cat([F.pad(side, (0, width - side.shape[1]), value=PAD) for side in (first, second)]))
        return Pairs(sides[0], sides[1], np.arange(len(sides[0])))

    def some(self, count: int) -> "Pairs":
        """Return a sample of the pairs, the same at every call."""
        return self.take(np.sort(np.random.default_rng(0).permutation(len(self))[:count]))

    @cached_property
    def lengths(self) -> np.ndarray:  # (N,)
        """Number of tokens of each pair's longer side."""
        return np.maximum(self.source_lengths, self.target_lengths)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return sources, decoder inputs (targets shifted by one) and targets."""
        index = torch.from_numpy(rows).to(self.source.device)
        source = self.source[index, : rounded(self.source_lengths[rows].max())].long()
        target = self.target[index, : rounded(self.target_lengths[rows].max())].long()
        return _shifted(source, target)


class Sentences:
    """A dataset of single pairs in a given order, for `et.Data`."""

    def __init__(self, pairs: Pairs, order: np.ndarray) -> None:
        # Trimmed once, since trimming dominates the time of reading single pairs.
        ordered = pairs.take(order)
        self.sides = [
            table[table != PAD].split(lengths.tolist())
            for table, lengths in (
                (ordered.source, ordered.source_lengths),
                (ordered.target, ordered.target_lengths),
            )
        ]

    def __len__(self) -> int:
        return len(self.sides[0])

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        return tuple(side[place] for side in self.sides)


@dataclass(frozen=True)
class Ordered:
    """Pairs as data, longest first, so that batches have pairs of similar length and the first is the largest."""

    data: et.Data
    order: np.ndarray
    """The pair of each row of the data."""

    @staticmethod
    def of(pairs: Pairs, batch_size: int) -> "Ordered":
        """Sort pairs by length."""
        pairs = pairs.to(torch.device("cpu"))
        order = np.argsort(-pairs.lengths, kind="stable")
        return Ordered(et.Data(Sentences(pairs, order), padded, batch_size), order)

    def back(self, scores: Tensor) -> np.ndarray:  # (N, ...)
        """Return scores of the data in the order of the pairs."""
        found = scores.detach().double().cpu().numpy()
        result = np.empty_like(found)
        result[self.order] = found
        return result


def padded(examples: list[tuple[Tensor, ...]]) -> Batch:
    """Collate pairs of different lengths."""
    sides = []
    for side in zip(*examples, strict=True):
        table = pad_sequence(list(side), batch_first=True, padding_value=PAD)
        sides.append(F.pad(table, (0, rounded(table.shape[1]) - table.shape[1]), value=PAD).long())
    return _shifted(*sides)


def _shifted(source: Tensor, target: Tensor) -> Batch:
    first = torch.full_like(target[:, :1], BEGIN)
    return source, torch.cat([first, target[:, :-1]], dim=1), target


def rounded(width: Any) -> int:
    """Round a number of tokens up to a width of batches."""
    return -(-int(width) // _ROUND) * _ROUND


def translation_task(model: nn.Module, params: Params = "trainable") -> et.Task:
    """Return the task of a translation model: a pair's loss is the sum over its target tokens, END included."""

    def output_loss(logits: Tensor, batch: Batch) -> Tensor:
        labels = batch[-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="none")
        return losses.view(labels.shape).sum(dim=1)

    return et.Task(
        model,
        params=params,
        outputs=lambda model, batch: model(batch[0], batch[1], batch[0] != PAD),
        output_loss=output_loss,
    )


def read_texts(path: Path, verdict: str = "label") -> Texts:
    """Read a gzipped table with a header.

    Args:
        path: The file. Its sources are in the column `de`, or `xx` where they are of other languages.
        verdict: The column that says something about each pair, if it is there.

    Raises:
        InputError: If the file is not there, or is no table of sentence pairs.
    """
    if not path.exists():
        raise InputError(f"{path.name} is not in the folder of the data. It is a gzipped table with columns de and en.")
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        head, *rows = [line.split("\t") for line in file.read().removesuffix("\n").split("\n")]
    source = "xx" if "xx" in head else "de"
    if not {source, "en"} <= set(head) or any(len(row) != len(head) for row in rows):
        raise InputError(f"{path.name} has columns {head}, expected de and en, and as many fields in every line.")
    german, english = ([row[head.index(name)] for row in rows] for name in (source, "en"))
    verdicts = [row[head.index(verdict)] for row in rows] if verdict in head else [""] * len(rows)
    return Texts(german, english, verdicts)


def small_texts(name: str) -> Texts:
    """Return the phrases that replace a file."""
    return Texts(*(list(column) for column in zip(*stand_ins(name), strict=True)))


@dataclass(frozen=True)
class Subwords:
    """A byte-pair vocabulary shared by both languages, learned once from some texts and cached in a folder."""

    learned_from: Texts
    size: int
    folder: Path

    @property
    def name(self) -> str:
        """A digest of everything that the vocabulary depends on."""
        return f"{self.learned_from.digest}_{self.size}"

    def pairs(self, texts: Texts) -> Pairs:
        """Return texts as tokens, cached, so that the tokenizer is needed only the first time."""
        path = self.folder / f"tokens_{self.name}_{texts.digest}.npz"

        def make() -> None:
            flat = self._flat(texts)
            with replacing(path) as unfinished, unfinished.open("wb") as file:
                np.savez_compressed(file, source=flat["source"], target=flat["target"], lengths=flat["lengths"])

        made_once(path, make)
        with np.load(path) as kept:
            return _table(**kept)

    def encoded(self, texts: Texts) -> Pairs:
        """Return texts as tokens, without the cache."""
        return _table(**self._flat(texts))

    def text(self, tokens: list[list[int]]) -> list[str]:
        """Convert tokens to text, without special tokens. Needs the vocabulary, but no tokenizer."""
        path = self.folder / f"subwords_{self.name}.json"
        if not path.exists():
            self._tokenizer()
        words = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        pieces = {number: "" if number < len(_SPECIAL) else word for word, number in words.items()}
        return ["".join(pieces[token] for token in one).replace(_SPACE, " ").strip() for one in tokens]

    def _flat(self, texts: Texts) -> dict[str, np.ndarray]:
        tokenizer = self._tokenizer()
        found: dict[str, np.ndarray] = {}
        lengths = []
        for name, side in (("source", texts.german), ("target", texts.english)):
            tokens = [[*one.ids, END] for one in tokenizer.encode_batch(side)]
            lengths.append([len(one) for one in tokens])
            found[name] = np.fromiter(chain.from_iterable(tokens), dtype=np.uint16)
        return found | {"lengths": np.array(lengths, dtype=np.int64).reshape(2, -1)}

    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        except ImportError as error:
            raise InputError(
                'Subwords need `tokenizers`: pip install -e ".[hf]", or run `python -m '
                "experiments.translation.prepare_pairs` where it is installed and bring the --cache folder along."
            ) from error
        path = self.folder / f"subwords_{self.name}.json"

        def make() -> None:
            tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL[UNKNOWN]))
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE)
            trainer = trainers.BpeTrainer(vocab_size=self.size, special_tokens=_SPECIAL, show_progress=False)
            tokenizer.train_from_iterator([*self.learned_from.german, *self.learned_from.english], trainer)
            with replacing(path) as unfinished:
                tokenizer.save(str(unfinished))

        made_once(path, make)
        return Tokenizer.from_file(str(path))


def _table(source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> Pairs:
    """Return tokens padded to one length, without pairs that are too long or have an empty side."""
    rows = np.flatnonzero((lengths.max(axis=0) <= LONGEST) & (lengths.min(axis=0) > 1))
    sides = []
    for flat, size in zip((source, target), lengths, strict=True):
        table = np.full((len(rows), rounded(size[rows].max(initial=1))), PAD, dtype=np.int32)
        there = np.arange(table.shape[1]) < size[rows][:, None]
        keep = np.zeros(len(size), dtype=bool)
        keep[rows] = True
        table[there] = flat[np.repeat(keep, size)]
        sides.append(torch.from_numpy(table))
    return Pairs(sides[0], sides[1], rows)


@dataclass(frozen=True)
class Corpora:
    """All files of the experiments, read on first use."""

    folder: Path | None
    """The folder of the data; None to use phrases instead."""
    cache: Path
    small: bool

    @staticmethod
    def of(session: Session) -> "Corpora":
        """Return the corpora of a session; only at toy size may the folder be missing."""
        folder: Path | None = session.settings.data
        if folder is None and not session.small:
            raise InputError("Give the folder of the sentence pairs as --data, or try --small.")
        return Corpora(folder, session.settings.cache, session.small)

    def texts(self, name: str) -> Texts:
        """Read a file; at toy size, a part of it."""
        if self.folder is None:
            return small_texts(name)
        texts = self._clean[name] if name in _CLEAN else read_texts(self.folder / FILES[name], _SAID.get(name, ""))
        if not self.small:
            return texts
        count = COUNTS.get(name, COUNTS["dev"])
        return texts.take(short_rows(texts.german, texts.english, texts.verdicts, count))

    @cached_property
    def _clean(self) -> dict[str, Texts]:
        """The file that is split in two."""
        assert self.folder is not None
        texts = read_texts(self.folder / FILES["train"], _SAID["train"])
        away = withheld(texts.german, texts.english)
        return {name: texts.take(np.flatnonzero(away == (name == "withheld"))) for name in _CLEAN}

    @cached_property
    def subwords(self) -> Subwords:
        """The vocabulary, learned from the training pairs."""
        return Subwords(self.texts("train"), SMALL_WORDS if self.small else WORDS, self.cache)

    def pairs(self, name: str) -> Pairs:
        """Return a file's pairs as tokens."""
        subwords = self.subwords
        return subwords.pairs(subwords.learned_from if name == "train" else self.texts(name))
