"""The README's code runs, and what the documents name exists."""

import ast
import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import eigentrace as et
from tests.helpers.places import ROOT


def test_readme_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(60, 8), torch.randint(0, 3, (60,))
    names = {"model": model, "train": TensorDataset(x, y), "queries": [(x[:2], y[:2])]}
    exec(code, names)
    assert len(names["suspects"]) == 20
    assert names["answer"].proponents.rows.shape == (2, 5)
    assert len(names["decisions"].dropped) == 3
    assert names["influence"].shape == (2, 60)
    assert et.open_run("runs/mine").is_complete


def test_guide_code_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("eigentrace.progress._chosen", [])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x, y = torch.randn(80, 3), torch.randint(0, 3, (80,))
    states = [{name: value + shift for name, value in model.state_dict().items()} for shift in (0.1, 0.2)]
    names = {"et": et, "F": nn.functional, "model": model, "dataset": TensorDataset(x, y), "queries": [(x[:2], y[:2])]}
    names |= {"first_state": states[0], "last_state": states[1], "folder": tmp_path}
    page = (ROOT / "docs" / "guide.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert f"# {capsys.readouterr().out}" in page
    assert names["cosine"].abs().max() <= 1 + 1e-5
    assert names["phi"].shape == (80, 10)
    assert len(names["small"].spectrum.eigenvalues) <= 5
    assert names["tracin"].self_influence(names["data"]).shape == (80,)


def test_code_of_the_page_on_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
    x, y = torch.randn(60, 6), torch.randint(0, 5, (60,))
    names = {"task": et.classification(model), "train": TensorDataset(x, y), "queries": [(x[:2], y[:2])]}
    names["sources"] = ["web", "book", "web"] * 20
    page = (ROOT / "docs" / "runs.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert names["by_source"].num_rows == 2
    assert names["table"].num_rows == 60
    assert names["answer"].how == "exact"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("name", et.__all__)
def test_everything_public_has_a_docstring(name):
    assert (getattr(et, name).__doc__ or "").strip()


def test_every_method_is_in_the_design_page():
    page = (ROOT / "docs" / "design.md").read_text()
    for name in (
        "Arnoldi",
        "EKFAC",
        "ExactHessian",
        "InverseArnoldi",
        "RandProj",
        "RandSelect",
        "TracIn",
        "Lissa",
        "Loss",
    ):
        assert f"| `{name}` |" in page


def test_every_setting_has_help():
    """A field's help is the string beneath it, from which reference pages are made, or in the class's docstring."""
    for path in (ROOT / "src" / "eigentrace" / "methods").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "fit" in {getattr(item, "name", None) for item in node.body}:
                args = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2]
                for field, after in itertools.pairwise(node.body):
                    if not isinstance(field, ast.AnnAssign):
                        continue
                    below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert below or f"    {field.target.id}: " in args, f"{path.name}: {ast.unparse(field)}"
