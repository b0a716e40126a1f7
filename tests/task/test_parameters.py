"""Which parameters are Θ: by words, by share, by pattern, by function; tied ones once."""

import numpy as np
import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import TaskError
from eigentrace.task.parameters import aliases_of, coverage_of, match_values, select_params
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.small import examples, fit


class Tied(nn.Module):
    """Embeddings of 12 numbers that the head uses again, a body of 12 + 4, and a frozen norm of 8."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embed.weight


EVERYTHING = ["embed.weight", "body.weight", "body.bias", "norm.weight", "norm.bias", "head.bias"]
SELECTIONS = {
    "trainable": ["embed.weight", "body.weight", "body.bias", "head.bias"],
    "all": EVERYTHING,
    # A tied head stands at the output, where it is used last, and not at its embedding.
    "last layer": ["embed.weight", "head.bias"],
    "top 5%": ["head.bias"],
    "last 30 %": ["embed.weight", "head.bias"],
    "top 40%": ["norm.bias", "embed.weight", "head.bias"],
    "top 100%": EVERYTHING,
    "body.*": ["body.weight", "body.bias"],
    "*.bias": ["body.bias", "norm.bias", "head.bias"],
    # A tied parameter goes by all of its names.
    "head.*": ["embed.weight", "head.bias"],
    "head.weight": ["embed.weight"],
}


@pytest.mark.parametrize(("params", "names"), SELECTIONS.items(), ids=SELECTIONS.keys())
def test_words_and_patterns(params, names):
    assert list(select_params(Tied(), params)) == [name for name in EVERYTHING if name in names]


def test_lists_and_functions():
    assert list(select_params(Tied(), ["norm.*", "body.bias"])) == ["body.bias", "norm.weight", "norm.bias"]
    assert list(select_params(Tied(), lambda name, p: p.ndim == 2)) == ["embed.weight", "body.weight"]


def test_selected_parameters_are_the_models_own():
    model = Tied()
    assert select_params(model, "head.weight")["embed.weight"] is model.head.weight


def test_aliases_list_each_parameter_once_with_all_of_its_names():
    names = [names for _, names in aliases_of(Tied())]
    assert names[0] == ["embed.weight", "head.weight"]
    assert names[1:] == [[name] for name in EVERYTHING[1:]]


def test_coverage_counts_tied_parameters_once():
    model = Tied()
    coverage = coverage_of(model, select_params(model, "body.*"))
    assert (coverage.selected, coverage.total) == (20, 12 + 20 + 8 + 3)
    expect_mentions(str(coverage), ["46.5%", 43, 20, 2])
    expect_mentions(str(et.Task(model, print, "all").coverage), ["100%", 43, 6])


def test_values_go_by_the_first_pattern_that_matches():
    names = {"a.weight": ["a.weight", "head.weight"], "a.bias": ["a.bias"], "b.weight": ["b.weight"]}
    assert match_values(names, 0.5, "l2") == match_values(names, np.float32(0.5), "l2") == dict.fromkeys(names, 0.5)
    assert match_values(names, {"head.*": 1.0}, "l2") == {"a.weight": 1.0, "a.bias": 0.0, "b.weight": 0.0}
    assert match_values(names, {"a.*": 1.0, "*.weight": 2}, "l2") == {"a.weight": 1.0, "a.bias": 1.0, "b.weight": 2}
    assert match_values(names, {"b.*": 3.0}, "l2") == {"a.weight": 0.0, "a.bias": 0.0, "b.weight": 3.0}


def test_long_lists_of_names_are_cut_in_messages():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    with refused(TaskError, "(0.weight, 0.bias, 1.weight, 1.bias, 2.weight, … 5 more)"):
        select_params(model, "none.*")


def test_parameters_outside_the_selection_may_be_of_any_type():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.int8), requires_grad=False)
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x @ self.table.to(x.dtype))

    fitted = fit(et.classification(Quantised()), method=et.ExactHessian(damping=0.1))
    assert fitted.task.coverage.selected == 9
    assert fitted.self_influence(examples()).isfinite().all()
