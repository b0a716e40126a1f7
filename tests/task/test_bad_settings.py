"""Wrong arguments of a task must be refused, mentioning the argument and what arrived."""

import pytest
import torch.nn.functional as F

import eigentrace as et
from eigentrace.errors import InputError, TaskError
from tests.helpers.expecting import refused
from tests.helpers.small import CHEAP, cross_entropy, examples, fit, net, table


def task(params="trainable", **options):
    return et.Task(net(), cross_entropy, params, **options)


BOTH = ("`loss`", "`outputs`", "`output_loss`")
TASKS = {
    "no match": (lambda: task(params="head.*"), ("params='head.*'", 4, "0.weight")),
    "one unmatched": (lambda: task(params=["0.*", "no.*"]), ("params", "['no.*']", "0.weight")),
    "empty list": (lambda: task(params=[]), ("params=[]", 4)),
    "no function hit": (lambda: task(params=lambda name, p: False), ("params=<function", 4)),
    "None": (lambda: task(params=None), ("params", "NoneType")),
    "parameters": (lambda: task(params=list(net().parameters())), ("params", "['Parameter']")),
    "negative l2": (lambda: task(l2=-1.0), ("l2", -1.0)),
    "nan l2": (lambda: task(l2=float("nan")), ("l2", "nan")),
    "text l2": (lambda: task(l2={"0.*": "0.1"}), ("l2", "'0.1'", "'0.*'")),
    "unmatched l2": (lambda: task(l2={"no.*": 1.0}), ("l2", "'no.*'", "0.weight")),
    "two losses": (
        lambda: task(outputs=cross_entropy, output_loss=cross_entropy),
        (*BOTH, "['loss', 'outputs', 'output_loss']"),
    ),
    "no loss": (lambda: et.Task(net()), (*BOTH, "[]")),
    "half a loss": (lambda: et.Task(net(), outputs=cross_entropy), (*BOTH, "['outputs']")),
    "loss no function": (lambda: et.Task(net(), "mse"), ("loss", "str")),
    "measurement": (lambda: task(measurement=1), ("measurement", "int")),
    "reduction": (lambda: et.seq2seq(net(), reduction="none"), ("reduction", "'sum'", "'mean'", "'none'")),
}


@pytest.mark.parametrize(("make", "mentions"), table(TASKS))
def test_task_is_refused(make, mentions):
    with refused(TaskError, *mentions):
        make()


def test_model_instead_of_task_is_refused():
    with refused(InputError, "fit", "Task", "Sequential", "eigentrace.classification(model)"):
        CHEAP.fit(net(), examples())


CLASSES = {  # outputs of a model with three, and labels of (inputs, classes)
    "several classes": (lambda o: o, lambda b: F.one_hot(b[1], 3), ("`labels`", "torch.int64 (12, 3)")),
    "targets": (lambda o: o, lambda b: b[0][:, 0], ("`labels`", "(B,)", "torch.float32 (12,)")),
    "a list": (lambda o: o, lambda b: b[1].tolist(), ("`labels`", "list")),
    "one logit": (lambda o: o[:, :1], lambda b: b[1] > 0, ("`labels`", "(12, classes)", "(12, 1)")),
    "pixels": (lambda o: o[:, :, None], lambda b: b[1], ("`labels`", "(12, classes)", "(12, 3, 1)")),
}


@pytest.mark.parametrize(("view", "labels", "mentions"), table(CLASSES))
def test_classes_that_a_run_cannot_record_are_refused_before_anything_is_written(view, labels, mentions, tmp_path):
    task = et.Task(
        net(),
        outputs=lambda m, b: view(m(b[0])),
        output_loss=lambda o, b: o.flatten(1).square().sum(dim=1),
        labels=labels,
    )
    with refused(TaskError, *mentions):
        et.score(fit(task), examples(), tmp_path / "run")
