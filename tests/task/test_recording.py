"""Learning rates recorded at every step, in plain loops and by the Trainer."""

import copy
import json
import math
import shutil

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import EigentraceWarning, InputError, MismatchError
from tests.helpers.expecting import refused, warned

CALLBACK = "EigentraceTraining"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 4, generator=generator).double(), torch.randint(0, 3, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()


def steps(model, optimizer, number, scheduler=None):
    """Take steps, and return the learning rate of each group at each."""
    rates = []
    for _ in range(number):
        optimizer.zero_grad()
        gradients(model)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [list(rates) for rates in zip(*rates, strict=True)]


def rising_and_falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, (9 - step) / 6))


def groups_of(model):
    return [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adafactor"])
def test_what_is_recorded_is_the_sum_of_the_rates_of_all_steps(model, kind):
    options = {"momentum": 0.9, "dampening": 0.3} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(groups_of(model), lr=0.01, **options)
    record = et.TrainingRecord(optimizer)
    rates = steps(model, optimizer, 7, rising_and_falling(optimizer))
    assert record.lr_sums == pytest.approx([math.fsum(one) for one in rates], rel=1e-12)
    found = record.training(model, loss_scale=2.0)
    wanted = et.Training.from_optimizer(optimizer, model, rates, loss_scale=2.0)
    assert found.lr_sum == pytest.approx(wanted.lr_sum, rel=1e-12)
    layout = et.classification(model).layout
    assert torch.allclose(found.damping(layout), wanted.damping(layout), rtol=1e-12)
    assert (found.source, wanted.source) == ("recorded at 7 steps", "")
    assert "recorded at 7 steps" in repr(found)


def test_steps_of_accumulated_gradients_are_counted_once(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with et.TrainingRecord(optimizer) as record:
        for number in range(6):
            gradients(model)
            if number % 3 == 2:
                optimizer.step()
    optimizer.step()
    assert (record.steps, record.lr_sums) == (2, [pytest.approx(0.2)])


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_not_counted(model, fused):
    optimizer = torch.optim.AdamW(model.float().parameters(), lr=0.1, fused=fused)
    record, scaler = et.TrainingRecord(optimizer), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().sum()).backward()
        if number in (0, 3):
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert record.lr_sums == pytest.approx([0.3])
    assert record.training(model).lr_sum["0.weight"] == pytest.approx(0.3)


def test_a_schedule_of_momentum_counts_each_step_with_its_own(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)
    record, tau, momenta = et.TrainingRecord(optimizer), 0.0, set()
    for _ in range(8):
        group = optimizer.param_groups[0]
        momenta.add(group["momentum"])
        tau += group["lr"] / (1 - group["momentum"])
        steps(model, optimizer, 1, scheduler)
    assert len(momenta) > 2
    found = record.training(model).damping(et.classification(model).layout)
    assert torch.allclose(found, torch.full_like(found, 1 / tau))


def test_groups_that_are_added_later_begin_with_their_first_step(model):
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    record = et.TrainingRecord(optimizer)
    steps(model, optimizer, 2)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
    with refused(MismatchError, "SGD", 2, 1):
        record.training(model)
    steps(model, optimizer, 3)
    found = record.training(model).lr_sum
    assert found == pytest.approx({"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.9, "2.bias": 0.9})
    optimizer.param_groups.pop(0)
    with refused(MismatchError, "[2, 2]", "[2]", "lr_sum"):
        record.training(model)


def test_a_resumed_training_goes_on_with_the_sums(model, tmp_path):
    def make():
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        return optimizer, et.TrainingRecord(optimizer), rising_and_falling(optimizer)

    optimizer, record, scheduler = make()
    rates = steps(model, optimizer, 3, scheduler)
    torch.save([one.state_dict() for one in (optimizer, record, scheduler)], tmp_path / "saved.pt")
    optimizer, record, scheduler = make()
    states = torch.load(tmp_path / "saved.pt", weights_only=True)
    for one, state in zip((optimizer, record, scheduler), states, strict=True):
        one.load_state_dict(state)
    later = steps(model, optimizer, 4, scheduler)
    assert record.steps == 7
    assert record.lr_sums == pytest.approx([sum(a + b) for a, b in zip(rates, later, strict=True)], rel=1e-12)
    assert record.training(model).second_moments.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_record_that_misses_steps_is_refused(model, kind):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    early = et.TrainingRecord(optimizer)
    steps(model, optimizer, 2)
    late = et.TrainingRecord(optimizer)
    steps(model, optimizer, 1)
    with refused(MismatchError, kind, "load_state_dict"):
        late.training(model)
    late.load_state_dict(early.state_dict())
    assert late.training(model).lr_sum["0.bias"] == pytest.approx(0.03)
    if kind == "AdamW":  # which counts its steps
        early.remove()
        steps(model, optimizer, 1)
        with refused(MismatchError, kind, 4, 3, "load_state_dict"):
            early.training(model)


def test_a_wrapper_of_an_optimizer_is_seen_through(model):
    accelerate = pytest.importorskip("accelerate")
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    record = et.TrainingRecord(optimizer)
    steps(model, optimizer, 2)
    assert record.training(model).lr_sum["0.bias"] == pytest.approx(0.2)


def test_a_copy_of_the_optimizer_is_not_recorded(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = et.TrainingRecord(optimizer)
    gradients(model)
    copy.deepcopy(optimizer).step()
    assert record.steps == 0


def test_what_cannot_be_recorded_is_refused(model):
    with refused(InputError, "RMSprop", "second_moments"):
        et.TrainingRecord(torch.optim.RMSprop(model.parameters()))
    with refused(InputError, "Linear", "torch.optim"):
        et.TrainingRecord(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = et.TrainingRecord(optimizer)
    with refused(InputError, "SGD", "No step"):
        record.training(model)
    steps(model, optimizer, 1)
    with refused(MismatchError, "Linear"):
        record.training(nn.Linear(2, 2))


GROUP = {"parameters": 4, "lr_sum": 0.1, "effective": 0.1}
DAMAGE = [
    None, 3, [], {}, {"format": 1}, {"format": 2, "steps": 1, "groups": []}, {"format": 1, "steps": 1, "groups": 3},
    {"format": 1, "steps": -1, "groups": [GROUP]}, {"format": 1, "steps": 1.5, "groups": [GROUP]},
    {"format": 1, "steps": True, "groups": [GROUP]}, {"format": 1, "steps": 1, "groups": [[GROUP]]},
    *({"format": 1, "steps": 1, "groups": [GROUP | {"lr_sum": value}]}
      for value in (-0.1, math.nan, math.inf, "1", None, True, 10**400, [0.1])),
    *({"format": 1, "steps": 1, "groups": [GROUP | {"effective": value}]} for value in (-1.0, math.nan, None)),
]  # fmt: skip


def test_damaged_states_are_refused(model):
    record = et.TrainingRecord(torch.optim.SGD(model.parameters(), lr=0.1))
    for state in DAMAGE:
        with refused(MismatchError, "state_dict"):
            record.load_state_dict(state)
    with refused(MismatchError, "SGD", "[3]", "[4]"):
        record.load_state_dict({"format": 1, "steps": 1, "groups": [GROUP | {"parameters": 3}]})
    assert record.steps == 0


RATE, STEPS, WARM = 1e-3, 10, 4
# Warm-up from 0, and a linear decay.
RATES = [RATE * (step / WARM if step < WARM else (STEPS - step) / (STEPS - WARM)) for step in range(STEPS)]


def tiny():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def train(folder, callbacks, resume=None, **options):
    """Train a tiny GPT-2 for ten steps of two batches each."""
    transformers = pytest.importorskip("transformers")
    model = tiny()
    tokens = torch.randint(0, 20, (64, 6), generator=torch.Generator().manual_seed(1))
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": RATE,
        "warmup_steps": WARM, "lr_scheduler_type": "linear", "logging_steps": 8, "save_steps": 5, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **settings | options)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def observer():
    """A callback that notes the learning rate before each step."""
    transformers = pytest.importorskip("transformers")

    class Observer(transformers.TrainerCallback):
        def __init__(self):
            self.rates = []

        def on_pre_optimizer_step(self, args, state, control, optimizer, **found):
            self.rates.append(optimizer.param_groups[0]["lr"])

    return Observer()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Trainer that recorded, its folder, the callback and the rates that were seen."""
    folder, callback, seen = tmp_path_factory.mktemp("trained"), et.training_callback(), observer()
    trainer = train(folder, [callback, seen])
    return trainer, folder, callback, seen.rates


def without_record(source, target):
    """Copy a checkpoint without what the callback recorded."""
    shutil.copytree(source, target)
    state = json.loads((target / "trainer_state.json").read_text())
    del state["stateful_callbacks"][CALLBACK]
    (target / "trainer_state.json").write_text(json.dumps(state))
    return target


def test_the_trainer_records_every_rate(trained, tmp_path):
    trainer, folder, callback, seen = trained
    assert seen == pytest.approx(RATES)
    held = callback.record.training(trainer.model)
    read = et.Training.from_checkpoint(folder / "checkpoint-10", trainer.model)
    assert held.lr_sum == read.lr_sum
    assert read.lr_sum == pytest.approx(dict.fromkeys(read.lr_sum, sum(RATES)), rel=1e-12)
    assert read.source == held.source == "recorded at 10 steps"
    for name, moments in held.second_moments.items():
        assert torch.equal(moments, read.second_moments[name])
    early = et.Training.from_checkpoint(folder / "checkpoint-5", trainer.model)
    assert early.lr_sum == pytest.approx(dict.fromkeys(early.lr_sum, sum(RATES[:5])), rel=1e-12)
    # The first rate is logged at step 8, after the warm-up, of which it tells nothing.
    coarse = et.Training.from_checkpoint(without_record(folder / "checkpoint-10", tmp_path / "coarse"), trainer.model)
    assert coarse.source.startswith("interpolated")
    assert set(coarse.lr_sum.values()).pop() > 1.2 * sum(RATES)
    # The hook is gone with the end of the training.
    trainer.optimizer.step()
    assert callback.record.steps == 10


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_trainer_goes_on_with_the_sums(trained, tmp_path, restore):
    trainer, folder, _, _ = trained
    callback, seen = et.training_callback(), observer()
    resumed = train(
        tmp_path, [callback, seen], str(folder / "checkpoint-5"), restore_callback_states_from_checkpoint=restore
    )
    assert seen.rates == pytest.approx(RATES[5:])
    assert callback.record.training(resumed.model).source == "recorded at 10 steps"
    wanted = et.Training.from_checkpoint(folder / "checkpoint-10", trainer.model)
    read = et.Training.from_checkpoint(tmp_path / "checkpoint-10", resumed.model)
    assert read.lr_sum == wanted.lr_sum
    assert read.source == wanted.source


def test_a_training_that_goes_on_without_the_callback_is_interpolated(trained, tmp_path):
    trainer, folder, _, _ = trained
    train(tmp_path, [], str(folder / "checkpoint-5"))
    with warned(EigentraceWarning, "trainer_state.json", "training_callback"):
        found = et.Training.from_checkpoint(tmp_path / "checkpoint-10", trainer.model)
    assert found.source.startswith("interpolated")
    # Nor is it recorded from there on.
    callback = et.training_callback()
    with warned(EigentraceWarning, "from_checkpoint", 10):
        train(tmp_path, [callback], str(tmp_path / "checkpoint-10"), max_steps=12, save_steps=1)
    with refused(InputError, "resumed"):
        callback.record  # noqa: B018
    assert et.Training.from_checkpoint(tmp_path / "checkpoint-12", trainer.model).source.startswith("interpolated")


def test_a_checkpoint_without_a_record_can_be_resumed_with_the_callback(trained, tmp_path):
    _, folder, _, _ = trained
    start = without_record(folder / "checkpoint-5", tmp_path / "checkpoint-5")
    with warned(EigentraceWarning, "from_checkpoint", 5):
        train(tmp_path, [et.training_callback()], str(start))


def test_a_second_training_by_the_same_trainer_is_added(tmp_path):
    callback = et.training_callback()
    with refused(InputError, "begun"):
        callback.record  # noqa: B018
    trainer = train(tmp_path, [callback], max_steps=2, lr_scheduler_type="constant", warmup_steps=0)
    first = trainer.optimizer
    trainer.train()
    again = 2 if trainer.optimizer is first else 1
    assert callback.record.lr_sums == pytest.approx([2 * again * RATE] * 2)
    assert callback.record.training(trainer.model).source == f"recorded at {2 * again} steps"


def test_damaged_records_in_checkpoints_are_refused(trained, tmp_path):
    trainer, folder, _, _ = trained
    place = tmp_path / "checkpoint-10"
    shutil.copytree(folder / "checkpoint-10", place)
    good = json.loads((place / "trainer_state.json").read_text())
    group = good["stateful_callbacks"][CALLBACK]["attributes"]["recorded"]["sums"]["groups"][0]
    entries = [
        {"attributes": {"recorded": {"global_step": 10, "sums": sums}}} for sums in DAMAGE
    ] + [
        3, "x", {}, {"attributes": 1}, {"attributes": {"recorded": 1}}, {"attributes": {"recorded": {"sums": {}}}},
        {"attributes": {"recorded": {"global_step": 10, "sums": {"format": 1, "steps": 10, "groups": [group]}}}},
        {"attributes": {"recorded": {"global_step": 10, "sums": {"format": 1, "steps": 9, "groups": [group] * 2}}}},
        {"attributes": {"recorded": {"global_step": 10, "sums": {"format": 1, "steps": 10, "groups": []}}}},
    ]  # fmt: skip
    for entry in entries:
        state = good | {"stateful_callbacks": good["stateful_callbacks"] | {CALLBACK: entry}}
        (place / "trainer_state.json").write_text(json.dumps(state))
        with refused(MismatchError, place):
            et.Training.from_checkpoint(place, trainer.model)
    for text in ("", "{", "[]", '{"stateful_callbacks": 3}', "\x00", '{"global_step": 1' + "0" * 5000 + "}"):
        (place / "trainer_state.json").write_text(text)
        with refused(MismatchError, place):
            et.Training.from_checkpoint(place, trainer.model)


def test_a_damaged_record_is_refused_before_a_training_goes_on(trained, tmp_path):
    _, folder, _, _ = trained
    place = tmp_path / "checkpoint-5"
    shutil.copytree(folder / "checkpoint-5", place)
    state = json.loads((place / "trainer_state.json").read_text())
    for entry in (3, {"attributes": {"recorded": {"global_step": 5, "sums": {"format": 1, "steps": -5}}}}):
        state["stateful_callbacks"][CALLBACK] = entry
        (place / "trainer_state.json").write_text(json.dumps(state))
        with refused(MismatchError, "trainer_state.json", 5, CALLBACK):
            train(tmp_path, [et.training_callback()], str(place))


def test_steps_of_an_optimizer_that_was_loaded_are_missed_and_said():
    def step(optimizer):
        weight.grad = torch.ones(2)
        optimizer.step()

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
    earlier = et.TrainingRecord(optimizer)
    for _ in range(5):
        step(optimizer)
    model = torch.nn.ParameterDict({"w": weight})
    again = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
    record = et.TrainingRecord(again)
    again.load_state_dict(optimizer.state_dict())
    step(again)
    with refused(MismatchError, "had taken steps"):
        record.training(model)
    for order in ("record first", "optimizer first"):
        again = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
        record = et.TrainingRecord(again)
        if order == "record first":
            record.load_state_dict(earlier.state_dict())
        again.load_state_dict(optimizer.state_dict())
        if order == "optimizer first":
            record.load_state_dict(earlier.state_dict())
        step(again)
        assert record.lr_sums == pytest.approx([0.06])
        assert record.training(model).momentum == 0.9
