"""The starting point of docs/text_classifier.md: a small trained classifier, and a CSV with some wrong labels."""

import csv
import io
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from tests.helpers.make_folders import CLASSES, bert
from tests.helpers.places import DOCS

PAGE = DOCS / "text_classifier.md"
ROWS, WRONG = 160, 8


def commands() -> list[tuple[str, str]]:
    """Parse the commands of the page, each with the output that the page shows."""
    blocks = re.findall(r"```console\n\$ (.*?)```", PAGE.read_text(), re.DOTALL)
    return [tuple(block.split("\n", 1)) for block in blocks]


def build(folder: Path) -> np.ndarray:
    """Write `train.csv` and train `model`; return the rows whose label is wrong."""
    generator = np.random.default_rng(0)
    wrong = np.sort(generator.choice(ROWS, WRONG, replace=False))
    texts, labels = [], []
    for row in range(ROWS):
        animal = int(generator.integers(len(CLASSES)))
        texts.append(_sentence(generator, CLASSES[animal]))
        labels.append((animal + 1 + int(generator.integers(2))) % len(CLASSES) if row in wrong else animal)
    rows = [(f"s{row:03d}", text, CLASSES[label]) for row, (text, label) in enumerate(zip(texts, labels, strict=True))]
    (folder / "train.csv").write_text(_as_csv([("id", "text", "label"), *rows]))
    _train(folder / "model", texts, labels)
    return wrong


def _sentence(generator: np.random.Generator, animal: str) -> str:
    words = [
        "the", generator.choice(["red", "blue", "small", "big"]), animal, generator.choice(["sat", "ran", "flew"]),
        generator.choice(["on", "under", "over"]), "the", generator.choice(["mat", "tree", "house"]),
    ]  # fmt: skip
    more = f", and it {generator.choice(['sat', 'ran', 'flew'])}" if generator.random() < 0.3 else ""
    return " ".join(words) + more


def _as_csv(rows: list[tuple[str, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _train(folder: Path, texts: list[str], labels: list[int]) -> None:
    import transformers

    bert(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    inputs, targets = tokenizer(texts, padding=True, return_tensors="pt"), torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for rows in torch.randperm(len(texts), generator=generator).split(20):
            logits = model(**{name: values[rows] for name, values in inputs.items()}).logits
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, targets[rows]).backward()
            optimizer.step()
    model.save_pretrained(folder)


def shape(text):
    """Return an output without numbers, classes and sentences, which depend on the machine."""
    text = re.sub(r"-?\d[\d,.]*\d(e[+-]?\d+)?|-?\d+", "#", text)
    text = re.sub(r"\b(cat|dog|bird)\b", "class", text)
    text = re.sub(r"\bthe \w+ class \w+ \w+ the \w+(, and it \w+)?", "sentence", text)
    return [" ".join(line.split()) for line in text.strip().split("\n")]


def check_cleaned(folder, wrong):
    """Check that the cleaned file has the kept lines unchanged, and that dropped lines mostly had wrong labels."""
    decided = pq.read_table(folder / "decisions.parquet").to_pydict()
    dropped = [row for row, decision in enumerate(decided["decision"]) if decision == "drop"]
    header, *lines = (folder / "train.csv").read_bytes().splitlines(keepends=True)
    kept = [line for row, line in enumerate(lines) if row not in dropped]
    assert (folder / "train.kept.csv").read_bytes() == b"".join([header, *kept])
    assert len(dropped) == WRONG
    assert len({*dropped} & {*wrong.tolist()}) >= 0.75 * WRONG
