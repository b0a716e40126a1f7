"""Small runs for tests of the page: digits as images, and pairs of sentences with injection attempts."""

import json
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import torch
from safetensors.torch import save_file
from torch import nn

import eigentrace as et
from eigentrace.demo.digits import load_digits, relabel
from eigentrace.demo.inputs import CLASSES
from eigentrace.errors import ConvergenceWarning
from eigentrace.loading import from_config, make_inputs
from eigentrace.loading.trust import trust_run
from tests.helpers import make_folders, tiny_digits

HOSTILE = (
    "<script>alert(1)</script>",
    "</textarea><img src=x onerror=alert(1)>",
    "</script><script>window.owned = true</script>",
    '"><svg onload=alert(1)> \' " & &lt;b&gt;',
    "javascript:alert(1) {{constructor.constructor('alert(1)')()}} ${alert(1)}",
    "a\u202egnp.txt \ufffd line\u2028break",
)
"""Texts that must be displayed unchanged and never executed."""
SOURCES = ("web", "books", "<b>forum</b>")


def digit_run(folder: Path) -> Path:
    """Train a tiny network on 200 digits, 40 of them mislabeled, score them, and return the run's directory.

    It has ids, the columns `corrupted`, `true_label` and `scanner`, and a request whose paths are relative to the run.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    images = digits.train_images[: tiny_digits.COUNT]
    labels = relabel(digits.train_labels[: tiny_digits.COUNT], 0.2, 10, generator).labels
    model = tiny_digits.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    asked = {"function": f"{tiny_digits.__file__}:make", "args": {"folder": "{run}"}}
    _score(run, {"input": asked, "fit": {}, "score": {}}, CLASSES, {**weights, "given_labels": labels})
    return run


def pair_run(folder: Path) -> Path:
    """Score pairs of sentences with a tiny encoder-decoder, and return the run's directory.

    The first rows have hostile ids and hostile texts, alternately as source and target; the last text has 3,000
    characters. The TSV file also has the columns `id` and `source`.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    make_folders.t5(folder / "model")
    texts, targets = make_folders.sentences(50), make_folders.sentences(50, seed=1)
    for row, words in enumerate(HOSTILE):
        (texts if row % 2 == 0 else targets)[row] = words
    texts[10] = 'two lines\nof one text, with a\ttab and "quotes"'
    texts[11] = "ÜBER große Bäume 日本語 עברית 🐈"
    texts[-1] = "begin " + "the_cat_sat_" * 250 + " end"  # three words to the tokenizer
    ids = [f"<i>{row}</i>" if row < 3 else f"pair-{row}" for row in range(len(texts))]
    table = pa.table({"id": ids, "text": texts, "target": targets, "source": [SOURCES[row % 3] for row in range(50)]})
    pa.csv.write_csv(table, folder / "pairs.tsv", pa.csv.WriteOptions(delimiter="\t"))
    asked = {"model": str(folder / "model"), "dataset": str(folder / "pairs.tsv"), "task": "seq2seq", "id": "id"}
    _score(run, from_config(None, {"input": asked | {"device": "cpu"}}), None)
    return run


def _score(run: Path, how: dict, classes: tuple[str, ...] | None, network: dict | None = None) -> None:
    (run / "request.json").write_text(json.dumps(how))
    kept = run.parent / "network.safetensors"  # moved into the run later: scoring needs an empty directory
    if network is not None:
        save_file(network, kept)
    trust_run(how["input"], run)
    inputs = make_inputs(how, run.parent, trust=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = et.Arnoldi(steps=12, keep=6).fit(inputs.task, inputs.data)
    columns = inputs.columns.select([name for name in inputs.columns.column_names if name != "id"])
    et.score(fitted, inputs.data, run, columns=columns, how=how | {"classes": classes and list(classes)})
    if network is not None:
        kept.rename(run / kept.name)
