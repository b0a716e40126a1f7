"""The page about these instruments runs as it stands."""

import re

import torch
import torch.nn.functional as F
from torch import nn

import eigentrace.evaluate as ev
from tests.helpers.expecting import expect_mentions
from tests.helpers.places import DOCS

PAGE = DOCS / "evaluate.md"


def my_training(x, y, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, is_noisy = torch.randn(84, 4), torch.arange(80) % 8 == 0
    y = (x @ torch.randn(4, 3)).argmax(dim=1)
    y[:80][is_noisy] = (y[:80][is_noisy] + 1) % 3
    names = {"x": x[:80], "y": y[:80], "qx": x[80:], "qy": y[80:], "is_noisy": is_noisy}
    names |= {"my_training": my_training, "model": my_training(x[:80], y[:80], 0)}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    printed = capsys.readouterr().out
    expect_mentions(printed, ["gradient norm", "95%", "both"])
    assert names["truth"].outputs.shape == (10, 2, 4)
    assert names["left"].actual.shape == (4, 3)
    assert names["svg"].startswith("<svg")
    assert 0 <= names["check"].wins <= 1
    assert names["memorised"].values.shape == (80,)


def test_everything_public_is_documented():
    page = PAGE.read_text()
    for name in ev.__all__:
        assert (getattr(ev, name).__doc__ or "").strip()
    for name in ("compare", "Loop", "ManyModels", "SGD", "Subsets", "retrain", "Retrained", "lds", "leave_out"):
        assert f"ev.{name}" in page
    for name in ("retraining_curves", "counterfactual", "memorization"):
        assert f"ev.{name}" in page
