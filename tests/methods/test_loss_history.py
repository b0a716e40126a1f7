"""Losses collected while training: the numbers, the files, and a model left as it was found."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import eigentrace as et
from eigentrace.errors import EigentraceWarning, InputError, MismatchError, NumericalError
from eigentrace.methods import loss_history
from tests.helpers.expecting import refused, warned
from tests.helpers.small import cross_entropy, examples, net


def step(model, batch=None, lr=0.5):
    loss = cross_entropy(model, batch or examples()).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p.sub_(lr * g)


def trained(tracker, model, epochs=4, **options):
    expected = []
    for _ in range(epochs):
        step(model)
        with torch.no_grad():
            expected.append(cross_entropy(model, examples()))
        tracker.record(model, **options)
    return torch.stack(expected)


@pytest.mark.parametrize("way", ["task", "factory", "own loss"])
def test_it_records_the_losses_of_a_plain_loop(way):
    model = net()
    made = {
        "task": et.classification(model),
        "factory": et.classification,
        "own loss": lambda m: et.Task(m, cross_entropy),
    }
    tracker = et.LossTracker(made[way], examples())
    expected = trained(tracker, model)
    assert tracker.steps == (0, 1, 2, 3)
    assert tracker.values.shape == (4, 12)
    assert torch.allclose(tracker.values, expected, rtol=1e-6)
    assert torch.allclose(tracker.mean(), expected.mean(dim=0), rtol=1e-6)
    assert torch.allclose(tracker.last(), expected[-1], rtol=1e-6)


def test_it_agrees_with_the_method_over_checkpoints():
    model, states = net(), []
    tracker = et.LossTracker(et.classification, examples())
    for _ in range(3):
        step(model)
        tracker.record(model)
        states.append(copy.deepcopy(model.state_dict()))
    method = et.MeanLoss(states).fit(et.classification(model), examples()).self_influence(examples())
    assert torch.allclose(tracker.mean(), method, rtol=1e-6)


class Restless(Dataset):
    """Data that draws from every random state when it is read, as careless transforms do."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        random.random(), np.random.rand(), torch.rand(1)
        return tuple(t[i] for t in examples())


def test_the_model_and_all_random_states_are_left_as_found():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model.train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    tracker = et.LossTracker(et.classification, Restless())
    tracker.record(model)
    assert [m.training for m in model] == [True, False, True, True]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[3].weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    # Dropout is off while it looks: twice the same.
    tracker.record(model)
    assert torch.equal(tracker.values[0], tracker.values[1])


def test_training_goes_the_same_way_with_and_without_it():
    def run(tracker):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        for _ in range(3):
            step(model)
            if tracker:
                tracker.record(model)
        return model.state_dict()

    plain, watched = run(None), run(et.LossTracker(et.classification, examples()))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_the_same_step_is_never_counted_twice():
    model = net()
    tracker = et.LossTracker(et.classification, examples())
    assert tracker.record(model, step=10)
    first = tracker.last()
    step(model)
    assert not tracker.record(model, step=10)
    assert torch.equal(tracker.last(), first)
    assert tracker.record(model, step=5)  # an earlier one, seen late
    assert tracker.steps == (5, 10)
    assert torch.equal(tracker.last(), first)


def test_recording_goes_on_after_a_restart(tmp_path):
    whole, model = et.LossTracker(et.classification, examples()), net()
    expected = trained(whole, model, epochs=4)

    model = net()
    trained(et.LossTracker(et.classification, examples(), tmp_path / "losses"), model, epochs=3)
    # Killed, and begun again from the second epoch: the third is on record, the fourth is not.
    model = net()
    step(model)
    step(model)
    again = et.LossTracker(et.classification, examples(), tmp_path / "losses")
    assert again.steps == (0, 1, 2)
    step(model)
    assert not again.record(model, step=2)
    step(model)
    assert again.record(model, step=3)
    assert torch.allclose(again.values, expected, rtol=1e-6)
    read = et.LossHistory.load(tmp_path / "losses")
    assert torch.equal(read.values, again.values)
    assert read.steps == (0, 1, 2, 3)
    assert sorted(p.name for p in (tmp_path / "losses").iterdir() if p.name.startswith(".")) == []


def test_a_step_cut_off_while_writing_is_written_again(tmp_path):
    tracker = et.LossTracker(et.classification, examples(), tmp_path / "losses")
    tracker.record(net(), step=1)
    left = tmp_path / "losses" / ".step-000000000002"
    left.mkdir()
    (left / "step-000000000002.safetensors").write_bytes(b"half of it")
    again = et.LossTracker(et.classification, examples(), tmp_path / "losses")
    assert again.steps == (1,)
    assert again.record(net(), step=2)
    assert et.LossHistory.load(tmp_path / "losses").steps == (1, 2)


def test_saving_at_the_end(tmp_path):
    tracker = et.LossTracker(et.classification, examples())
    trained(tracker, net())
    tracker.save(tmp_path / "losses")
    assert torch.equal(et.LossHistory.load(tmp_path / "losses").values, tracker.values)
    assert et.LossTracker(et.classification, examples(), tmp_path / "losses").steps == tracker.steps
    with refused(InputError, tmp_path / "losses"):
        tracker.save(tmp_path / "losses")


def test_a_record_of_other_data_is_refused(tmp_path):
    et.LossTracker(et.classification, examples(), tmp_path / "losses").record(net())
    with refused(MismatchError, tmp_path / "losses", "num_examples", 12, 9):
        et.LossTracker(et.classification, examples(9), tmp_path / "losses")
    x, y = examples()
    with refused(MismatchError, tmp_path / "losses", "first_examples"):
        et.LossTracker(et.classification, (x + 1, y), tmp_path / "losses")
    (tmp_path / "losses" / "step-000000000000.safetensors").write_bytes(b"damaged")
    with refused(MismatchError, tmp_path / "losses" / "step-000000000000.safetensors"):
        et.LossTracker(et.classification, examples(), tmp_path / "losses")


def test_processes_that_begin_at_the_same_moment_share_a_record(tmp_path, monkeypatch):
    """As under torchrun: another process makes the directory after this one has seen that there is none."""
    write = loss_history.write_directory

    def late(path, manifest, files):
        write(path, manifest, files)
        write(path, manifest, files)

    monkeypatch.setattr(loss_history, "write_directory", late)
    tracker = et.LossTracker(et.classification, examples(), tmp_path / "losses")
    monkeypatch.undo()
    assert tracker.record(net(), 1)
    assert et.LossHistory.load(tmp_path / "losses").steps == (1,)


def test_what_is_refused(tmp_path):
    model = net()
    empty = et.LossTracker(et.classification, examples(), tmp_path / "losses")
    with refused(InputError, "record(model)"):
        empty.mean()
    with refused(InputError, tmp_path / "losses"):
        et.LossHistory.load(tmp_path / "losses")
    with refused(InputError, "record", "model"):
        empty.record()
    with refused(InputError, "step", 0, -1):
        empty.record(model, step=-1)
    with refused(InputError, "task", "Task", 3):
        et.LossTracker(3, examples())
    with refused(InputError, "Task", "Sequential"):
        et.LossTracker(lambda m: m, examples()).record(model)
    with refused(InputError, "record", "LossTracker", "eigentrace.classification"):
        et.LossTracker(et.classification(model), examples()).record(net())
    with refused(InputError, (2, 3), 1):
        et.LossHistory(torch.zeros(2, 3), (1,))
    x, y = examples()
    x[7] = torch.nan
    with refused(NumericalError, "row 7"):
        et.LossTracker(et.classification, (x, y)).record(model)


def test_wrappers_of_the_model_are_looked_through():
    model = net()
    tracker = et.LossTracker(et.classification(model), examples())
    assert tracker.record(nn.DataParallel(model))


class Classifier(nn.Module):
    """What the Trainer takes: a loss beside the logits."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, labels=None):
        logits = self.inner(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset):
    def __init__(self):
        self.x, self.y = examples(12)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


def run_trainer(folder, tracker, epochs, every=None, resume=False):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer itself needs accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
    )
    model = Classifier()
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), callbacks=[et.loss_callback(tracker, every)]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize(("every", "expected"), [(None, (3, 6)), (2, (2, 4, 6))])
def test_the_callback_as_the_trainer_calls_it(every, expected):
    """The Trainer's own dispatcher, stepping through two epochs of three steps."""
    called = pytest.importorskip("transformers.trainer_callback")
    tracker, model = et.LossTracker(et.classification, Rows()), Classifier()
    handler = called.CallbackHandler([et.loss_callback(tracker, every)], model, None, None, None)
    state, control = called.TrainerState(), called.TrainerControl()
    for _ in range(2):
        for _ in range(3):
            step(model.inner)
            state.global_step += 1
            handler.on_step_end(None, state, control)
        handler.on_epoch_end(None, state, control)
    assert tracker.steps == expected
    with torch.no_grad():
        assert torch.allclose(tracker.last(), cross_entropy(model.inner, examples(12)), atol=1e-6)
    state.is_world_process_zero, state.global_step = False, 12
    handler.on_step_end(None, state, control)
    handler.on_epoch_end(None, state, control)
    assert tracker.steps == expected


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_records_every_epoch_and_goes_on_after_a_restart(tmp_path):
    tracker = et.LossTracker(et.classification, Rows(), tmp_path / "losses")
    model = run_trainer(tmp_path / "run", tracker, epochs=2)
    assert tracker.steps == (3, 6)
    with torch.no_grad():
        expected = cross_entropy(model.inner, examples(12))
    assert torch.allclose(tracker.last(), expected, atol=1e-5)

    again = et.LossTracker(et.classification, Rows(), tmp_path / "losses")
    run_trainer(tmp_path / "run", again, epochs=3, resume=True)
    assert again.steps == (3, 6, 9)
    assert torch.equal(again.values[:2], tracker.values)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_records_every_so_many_steps(tmp_path):
    tracker = et.LossTracker(et.classification, Rows())
    run_trainer(tmp_path / "run", tracker, epochs=2, every=2)
    assert tracker.steps == (2, 4, 6)


@pytest.mark.parametrize("kept", [True, False], ids=["on disk", "in memory"])
def test_a_training_from_the_start_into_an_old_record_is_warned_about(tmp_path, kept):
    """Its steps would be taken for those on record, and the losses of the other training for its own."""
    called = pytest.importorskip("transformers.trainer_callback")
    tracker, model = et.LossTracker(et.classification, Rows(), tmp_path / "losses" if kept else None), Classifier()
    handler = called.CallbackHandler([et.loss_callback(tracker)], model, None, None, None)
    state, control = called.TrainerState(), called.TrainerControl()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handler.on_train_begin(None, state, control)
        state.global_step = 3
        handler.on_epoch_end(None, state, control)
        handler.on_train_begin(None, state, control)  # resumed from a checkpoint
    state.global_step = 0
    with warned(EigentraceWarning, 1, 3, 0, tmp_path / "losses" if kept else "LossTracker"):
        handler.on_train_begin(None, state, control)


def test_the_callback_refuses_no_steps():
    pytest.importorskip("transformers")
    with refused(InputError, "every", 1, 0):
        et.loss_callback(et.LossTracker(et.classification, examples()), 0)
