"""The record of a training: read from optimizers and from checkpoints of the Trainer, and the damping it gives."""

import json
import pickle

import pytest
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError, MismatchError, TaskError
from eigentrace.task.training_record import _sum_of_rates
from tests.helpers.expecting import refused


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(model, make, steps=7, schedule=lambda step: 1.0):
    """Take some steps, and return the optimizer and the learning rate of each step."""
    generator = torch.Generator().manual_seed(1)
    optimizer, rates = make(model.parameters()), []
    first = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = float(first) * schedule(step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        x, y = torch.randn(16, 4, generator=generator).double(), torch.randint(0, 3, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer, rates


def damping_of(record, model, **options):
    task = et.classification(model)
    return {n: record.damping(task.layout, **options)[task.layout.span(n)] for n in task.layout.names}


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_damped_by_the_sum_of_its_rates(model, nesterov):
    def make(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.02)

    optimizer, rates = trained(model, make, schedule=lambda step: 0.5**step)
    record = et.Training.from_optimizer(optimizer, model, rates)
    for found in damping_of(record, model).values():
        assert torch.allclose(found, torch.full_like(found, (1 - 0.9) / sum(rates) + 0.02))
    for found in damping_of(record, model, has_penalty=True).values():
        assert torch.allclose(found, torch.full_like(found, (1 - 0.9) / sum(rates)))


@pytest.mark.parametrize(("kind", "decoupled"), [("Adam", False), ("AdamW", True)])
def test_adam_is_damped_by_the_roots_of_its_second_moments(model, kind, decoupled):
    def make(params):
        return getattr(torch.optim, kind)(params, lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)

    optimizer, rates = trained(model, make)
    record = et.Training.from_optimizer(optimizer, model, rates, loss_scale=3.0)
    found = damping_of(record, model)
    for name, parameter in model.named_parameters():
        root = (optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.98**7)).sqrt().flatten()
        floor = 1e-3 * root.square().mean().sqrt()
        inverse = root.clamp_min(floor) + 1e-6
        wanted = inverse * (1 / sum(rates) + (0.01 if decoupled else 0.0)) + (0.0 if decoupled else 0.01)
        assert torch.allclose(found[name], 3 * wanted)
    assert record.decoupled == decoupled


def test_entries_that_were_never_updated_have_a_floor():
    moments = torch.tensor([[4.0, 4.0], [0.0, 0.0]]).double()
    task = et.Task(nn.Embedding(2, 2).double(), lambda m, b: m(b).sum((1, 2)))
    found = et.Training(2.0, second_moments={"weight": moments}).damping(task.layout)
    assert torch.allclose(found[:2], torch.tensor(1.0).double())
    assert (found[2:] > 1e-4).all()


def test_adafactor_is_read_from_its_factors(model):
    optimizer, rates = trained(model, lambda params: torch.optim.Adafactor(params, lr=1e-2))
    record = et.Training.from_optimizer(optimizer, model, rates)
    state = optimizer.state[model[0].weight]
    rows, columns = state["row_var"], state["col_var"]
    assert torch.allclose(record.second_moments["0.weight"], rows * columns / rows.mean())
    assert record.second_moments["0.bias"].shape == (6,)


def test_groups_have_rates_and_decays_of_their_own():
    lr, decay = {"a": 2.0, "b": 4.0}, {"a": 0.0, "b": 0.5}
    task = et.Task(_Two(), lambda m, b: m(b))
    found = et.Training(lr, weight_decay=decay).damping(task.layout)
    assert found.tolist() == [0.5, 0.75]
    with refused(MismatchError, "lr_sum", "b"):
        et.Training({"a": 2.0}).damping(task.layout)


def grouped(model, make, first):
    return make([{"params": model[0].parameters(), **first}, {"params": model[2].parameters()}])


def test_groups_of_an_optimizer_have_sums_of_their_own(model):
    optimizer = grouped(model, lambda groups: torch.optim.SGD(groups, lr=0.1), {"lr": 0.02})
    with refused(InputError, "SGD", "0.02", "[[...], [...]]"):
        et.Training.from_optimizer(optimizer, model, [0.1, 0.1])
    found = et.Training.from_optimizer(optimizer, model, [[0.02, 0.02], [0.1, 0.1]])
    assert found.lr_sum == pytest.approx({"0.weight": 0.04, "0.bias": 0.04, "2.weight": 0.2, "2.bias": 0.2})
    for wrong in ([[0.1, 0.1]], 0.1, ["a"]):
        with refused(InputError, "lrs"):
            et.Training.from_optimizer(optimizer, model, wrong)


def test_dampening_makes_the_steps_of_momentum_smaller(model):
    optimizer, rates = trained(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.9))
    found = damping_of(et.Training.from_optimizer(optimizer, model, rates), model)
    assert torch.allclose(found["0.bias"], torch.full_like(found["0.bias"], 1 / sum(rates)))


def test_parameters_that_were_not_trained_may_be_left_out(model):
    model[0].requires_grad_(False)
    optimizer, rates = trained(model, torch.optim.AdamW)
    record = et.Training.from_optimizer(optimizer, model, rates)
    assert record.second_moments.keys() == {"2.weight", "2.bias"}
    assert damping_of(record, model).keys() == {"2.weight", "2.bias"}
    with refused(MismatchError, "0.weight", "params="):
        record.damping(et.classification(model, params="all").layout)
    with refused(MismatchError, "AdamW", "no step"):
        et.Training.from_optimizer(torch.optim.AdamW(model.parameters()), model, rates)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_names_of_wrapped_models_are_those_of_the_task(model, wrap):
    optimizer, rates = trained(model, torch.optim.AdamW)
    wanted = et.Training.from_optimizer(optimizer, model, rates)
    wrapped = wrap(model)
    record = et.Training.from_optimizer(optimizer, wrapped, rates)
    for own in (model, wrapped):
        task = et.classification(own)
        assert torch.equal(record.damping(task.layout), wanted.damping(task.layout))


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1).double()), nn.Parameter(torch.ones(1).double())

    def forward(self, x):
        return x * self.a + self.b


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A tiny GPT-2, trained by the Trainer, which saved a checkpoint."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    tokens = torch.randint(0, 20, (32, 6))
    folder = tmp_path_factory.mktemp("trained")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=8, per_device_train_batch_size=4, learning_rate=1e-3, weight_decay=0.1, logging_steps=1,
        save_steps=8, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer, folder / "checkpoint-8"


def test_a_checkpoint_of_the_trainer_is_what_its_optimizer_is(trainer):
    trainer, folder = trainer
    rates = [1e-3 * (1 - step / 8) for step in range(8)]
    held = et.Training.from_optimizer(trainer.optimizer, trainer.model, rates)
    read = et.Training.from_checkpoint(folder, trainer.model)
    assert held.second_moments.keys() == read.second_moments.keys()
    for name, moments in held.second_moments.items():
        assert torch.equal(moments, read.second_moments[name]), name
    assert read.weight_decay == held.weight_decay
    assert {name for name, decay in read.weight_decay.items() if not decay} == {
        name for name in held.second_moments if "bias" in name or ".ln_" in name
    }
    assert (read.decoupled, read.eps, read.momentum) == (True, 1e-8, 0.0)
    sums = set(read.lr_sum.values())
    assert len(sums) == 1
    # Earlier versions of the Trainer log the rate after the step.
    assert sums.pop() == pytest.approx(sum(rates), rel=0.15)
    task = et.causal_lm(trainer.model, training=read)
    assert (read.damping(task.layout) > 0).all()


def test_damaged_and_foreign_checkpoints_are_refused(trainer, tmp_path):
    trainer, folder = trainer
    other = nn.Linear(3, 2)
    with refused(MismatchError, "Linear", "from_optimizer"):
        et.Training.from_checkpoint(folder, other)
    state = json.loads((folder / "trainer_state.json").read_text())
    (tmp_path / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes())
    (tmp_path / "trainer_state.json").write_text(json.dumps(state | {"log_history": []}))
    with refused(MismatchError, "logging_steps"):
        et.Training.from_checkpoint(tmp_path, trainer.model)
    (tmp_path / "trainer_state.json").write_text("{}")
    with refused(MismatchError, "global_step"):
        et.Training.from_checkpoint(tmp_path, trainer.model)


def test_any_damage_to_the_state_of_an_optimizer_is_refused(trainer, tmp_path):
    trainer, folder = trainer
    text = (folder / "trainer_state.json").read_text()
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    group = saved["param_groups"][0]
    broken = [
        {"param_groups": [1, 2]}, {"param_groups": [{}, {}]}, {"state": {}}, {"state": [1]}, {"state": {0: 1}},
        {"param_groups": [group | {"betas": 1}, saved["param_groups"][1]]},
        {"param_groups": [group | {"eps": "a"}, saved["param_groups"][1]]},
        {"param_groups": [group | {"initial_lr": None}, saved["param_groups"][1]]},
        {"state": saved["state"] | {0: {"step": 1, "exp_avg_sq": 3}}},
    ]  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(text)
    for change in broken:
        torch.save(saved | change, tmp_path / "optimizer.pt")
        with refused(MismatchError, "optimizer"):
            et.Training.from_checkpoint(tmp_path, trainer.model)
    (tmp_path / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes())
    for steps in ("1e400", "-3"):
        (tmp_path / "trainer_state.json").write_text(text.replace('"global_step": 8', f'"global_step": {steps}'))
        with refused((InputError, MismatchError), ""):
            et.Training.from_checkpoint(tmp_path, trainer.model)


def test_rates_between_known_ones_are_interpolated():
    # Logged rates that rise later begin at 0: 0 2 4 2 4 6 8 4, and then 0. The fourth was logged twice.
    logged = [(4, 2.0), (3, 4.0), (7, 8.0), (4, 2.0)]
    assert _sum_of_rates(logged, 8, 6.0, 0.0) == pytest.approx(30)
    # Falling ones begin at that of the optimizer: 6 5 4 2 1.6 1.2 .8 .4
    assert _sum_of_rates([(3, 4.0), (4, 2.0)], 8, 6.0, 0.0) == pytest.approx(21.0)
    assert _sum_of_rates([(10, 2.0)], 10**15, 2.0, 2.0) == pytest.approx(2e15)
    # One rate of 900 steps of a linear decay, as with the Trainer's default of 500 steps between logs.
    rates = [1 - step / 900 for step in range(900)]
    assert _sum_of_rates([(500, rates[499])], 900, 1.0, 0.0) == pytest.approx(sum(rates))
    # A warm-up that is logged.
    rates = [min(step / 100, 1.0) for step in range(900)]
    logged = [(step, rates[step - 1]) for step in range(10, 901, 10)]
    assert _sum_of_rates(logged, 900, 1.0, 1.0) == pytest.approx(sum(rates), rel=1e-3)


def test_groups_of_a_checkpoint_share_a_schedule(trainer, tmp_path):
    trainer, folder = trainer
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    saved["param_groups"][1]["initial_lr"] *= 3
    torch.save(saved, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text((folder / "trainer_state.json").read_text())
    found = et.Training.from_checkpoint(tmp_path, trainer.model).lr_sum
    assert found["transformer.ln_f.bias"] == pytest.approx(3 * found["transformer.wte.weight"])


class _Runs:
    def __reduce__(self):
        return (exec, ("open('ran', 'w').close()",))


def test_no_pickle_of_a_checkpoint_is_run(trainer, tmp_path, monkeypatch):
    trainer, folder = trainer
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_state.json").write_bytes((folder / "trainer_state.json").read_bytes())
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps(_Runs()))
    with refused(MismatchError, "optimizer.pt"):
        et.Training.from_checkpoint(tmp_path, trainer.model)
    torch.save({"state": {}, "param_groups": [_Runs()]}, tmp_path / "optimizer.pt")
    with refused(MismatchError, "optimizer.pt"):
        et.Training.from_checkpoint(tmp_path, trainer.model)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_is_refused_with_a_way_out(model):
    for settings in ({"lr_sum": 0.0}, {"momentum": 1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"loss_scale": 0.0}):
        with refused(InputError, *settings):
            et.Training(**({"lr_sum": 1.0} | settings))
    with refused(TaskError, "training", "dict"):
        et.classification(model, training={"lr": 1.0})
    optimizer, rates = trained(model, lambda params: torch.optim.RMSprop(params, lr=1e-3))
    with refused(InputError, "RMSprop", "second_moments"):
        et.Training.from_optimizer(optimizer, model, rates)
    optimizer, rates = trained(model, lambda params: torch.optim.Adam(params, lr=1e-3))
    with refused(MismatchError, "Linear"):
        et.Training.from_optimizer(optimizer, nn.Linear(2, 2), rates)
    with refused(InputError, "Linear", "torch.optim"):
        et.Training.from_optimizer(nn.Linear(2, 2), model, rates)
    moments = {name: torch.full_like(p, torch.nan) for name, p in model.named_parameters()}
    with refused(InputError, "0.weight", "finite"):
        et.Training(1.0, second_moments=moments).damping(et.classification(model).layout)
    with refused(MismatchError, "0.weight", "float"):
        et.Training(1.0, second_moments={"0.weight": 1.0}).damping(et.classification(model).layout)
    with refused(MismatchError, "0.weight", "(6, 4)"):
        moments = {name: torch.ones(2) for name, _ in model.named_parameters()}
        et.Training(1.0, second_moments=moments).damping(et.classification(model).layout)
