"""A learned τ in the loop: rules against finite differences and the ordinary step, its prior, and frozen steps."""

import math

import pytest
import torch
from torch import nn

from hetxl._seeds import derive_seed
from hetxl.nn import FixedTemperature, LearnedTemperature
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.distributed import World
from hetxl_train.loaders import Parts
from hetxl_train.log import Log, read_log
from hetxl_train.loop import Trainer
from hetxl_train.tasks.classification import ClassificationTask
from hetxl_train.temperature.hypergradient import loss_gradients
from hetxl_train.temperature.rules import (
    RULES,
    BilevelRule,
    DirectRule,
    Validation,
    add_temperature_prior,
    freeze,
    held_out_examples,
    is_frozen,
    reset_state,
)
from support.training import QUIET, small

DATA = load_synthetic(rows=400, classes=6, features=4)
HEADS = ("det", "het", "het-h", "het-xl")


def trainer(tmp_path, validation=True, double=False, **options) -> Trainer:
    usual = {"rank": 2, "train_samples": 3, "noise_init": 1.0, "batch_size": 16, "learning_rate": 0.05, "warmup": 0}
    usual |= {"temperature": "learned", "temperature_learning_rate": 1.0, "backbone": "mlp", "width": 6, "features": 5}
    config = TrainConfig(**(usual | {"device": "cpu", "log_every": 1, "steps": 6} | options))
    dataset = DATA if validation else DATA.without("validation")
    task = ClassificationTask(config, dataset, World(torch.device("cpu")), QUIET, tmp_path)
    if double:
        task.model.double()
    return Trainer(task, Checkpoints(tmp_path / "checkpoints"), QUIET, UnreadableExamples())


def state(run_trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run_trainer.model.state_dict().items()}


def run(tmp_path, run_trainer: Trainer) -> list[float]:
    """τ after every step."""
    log = Log(tmp_path / "log.jsonl", run_trainer.progress.step)
    try:
        run_trainer.train(log, lambda: {"nll": 1.0})
    finally:
        log.close()
    return [line["temperature"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "step"]


class Doubled:
    """A split whose inputs are in double precision."""

    def __init__(self, split):
        self.split, self.labels, self.workers = split, split.labels, False

    def __len__(self):
        return len(self.split)

    def fetch(self, rows, seeds=None):
        batch = self.split.fetch(rows, seeds)
        return batch._replace(inputs=batch.inputs.double())


class Observed(BilevelRule):
    """Leaves τ alone but for a shift before the last step, and keeps what it finds after it."""

    def observe(self, shift: float, last: int) -> None:
        self.shift, self.last = shift, last

    def after_step(self, step: int, moves: bool) -> None:
        if step == self.last - 1:
            with torch.no_grad():
                self.raw.add_(self.shift)
        if step == self.last:
            held_out = list(self.validation.held_out)
            self.gradient = float(self.hypergradient(step))
            self.validation.held_out = held_out
            self.loss = mean_loss(self, step)
        self.mixed, self.validation.held_out = [], []


def mean_loss(rule: BilevelRule, step: int) -> float:
    """The validation loss as the rule sees it."""
    rule.model.backbone.eval()
    total, count = 0.0, 0
    for number, batch in enumerate(rule.validation.batches(step)):
        rule.noise.manual_seed(derive_seed(rule.config.seed, step, number, 17))
        with torch.no_grad():
            total += float(rule.model(batch.inputs, batch.targets, reduction="sum", generator=rule.noise))
        count += len(batch)
    return total / count


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", [{}, {"clip": 0.05, "accumulate": 2, "dropout": 0.3, "temperature_held_out": 0.25}])
def test_the_gradient_in_the_loop_is_that_one_step_ahead(tmp_path, monkeypatch, head, options):
    # After whole steps of the loop: parts, dropout, clipping and AdamW included.
    monkeypatch.setitem(RULES, "bilevel", Observed)

    def observed(shift: float) -> Observed:
        run_trainer = trainer(tmp_path, head=head, temperature_method="bilevel", steps=3, double=True, **options)
        run_trainer.task.split = Doubled(run_trainer.task.split)
        if run_trainer.task.rule.validation.split is not None:
            run_trainer.task.rule.validation.split = Doubled(run_trainer.task.rule.validation.split)
        run_trainer.task.rule.observe(shift, last=2)
        run_trainer._save = lambda loss_sum: None  # τ has no moments to store
        run_trainer.checkpoints.update = lambda *_: None
        run_trainer.train(None, lambda: {"nll": 1.0})
        return run_trainer.task.rule  # pyright: ignore[reportReturnType]

    size = 1e-5
    expected = (observed(size).loss - observed(-size).loss) / (2 * size)
    assert observed(0.0).gradient == pytest.approx(expected, rel=1e-4, abs=1e-8)


class OnTheBatch(DirectRule):
    """Validates on what was just trained on, with the same draws."""

    def see(self, batch, seed) -> None:
        self.seen, self.seed = batch, seed

    def gradients(self, step, parameters):
        _, gradients = loss_gradients(self.model, self.seen, parameters, generator=self.seed())
        return [value / len(self.seen) for value in gradients]


@pytest.mark.parametrize("head", HEADS)
def test_the_simple_gradient_on_the_training_batch_is_the_ordinary_one(tmp_path, monkeypatch, head):
    monkeypatch.setitem(RULES, "gradient", OnTheBatch)
    ordinary = trainer(tmp_path, head=head, steps=3)
    simple = trainer(tmp_path, head=head, steps=3, temperature_method="gradient")
    for run_trainer in (ordinary, simple):
        run_trainer.train(None, lambda: {"nll": 1.0})
    for name, value in state(ordinary).items():
        torch.testing.assert_close(state(simple)[name], value, rtol=0, atol=1e-6)
    assert float(simple.model.head.temperature().detach()) != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("method", ["gradient", "bilevel"])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_killed_run_equals_an_uninterrupted_one(tmp_path, method, share):
    options = {"temperature_method": method, "temperature_held_out": share, "steps": 6, "evaluate_every": 1}
    whole = trainer(tmp_path / "whole", **options)
    assert len(set(run(tmp_path / "whole", whole))) == 6
    answers = iter([1.0, 1.0, 1.0])
    killed = trainer(tmp_path / "killed", **options)
    with pytest.raises(StopIteration):  # at the fourth evaluation, after four checkpoints
        killed.train(None, lambda: {"nll": next(answers)})
    again = trainer(tmp_path / "killed", **options)
    checkpoint, _ = again.checkpoints.latest()
    assert checkpoint.step == 4
    again.restore(checkpoint)
    again.train(None, lambda: {"nll": 1.0})
    for name, value in state(whole).items():
        assert torch.equal(state(again)[name], value), name


def test_a_held_out_share_is_not_trained_on(tmp_path):
    run_trainer = trainer(tmp_path, temperature_method="gradient", temperature_held_out=0.25, steps=1, accumulate=2)
    assert run_trainer.task.examples == 12
    validation, seen = run_trainer.task.rule.validation, []
    run_trainer.task.rule.see = lambda batch, seed: seen.append(
        (len(batch), [len(part) for part in validation.held_out])
    )
    run_trainer.train(None, lambda: {"nll": 1.0})
    assert seen == [(6, [2]), (6, [2, 2])]
    assert validation.held_out == []


def test_rows_that_could_not_be_read_leave_one_to_train_on():
    config = TrainConfig(temperature="learned", temperature_method="gradient", temperature_held_out=0.5, batch_size=8)
    validation = Validation(config, None, Parts(8, 1), torch.device("cpu"))
    split = DATA.splits["train"]
    for count, trained, held in ((8, 4, 4), (3, 1, 2), (1, 1, 0), (0, 0, 0)):
        fetched = split.fetch(torch.arange(count).numpy())
        inputs, targets = validation.divide(fetched, split)
        assert (len(inputs), len(targets)) == (trained, trained)
        assert sum(len(part) for part in validation.held_out) == held
        validation.held_out = []


@pytest.mark.parametrize("method", ["gradient", "bilevel"])
def test_holding_and_the_prior_apply(tmp_path, method):
    held = run(tmp_path / "held", trainer(tmp_path / "held", temperature_method=method, temperature_hold=0.5))
    assert held[:3] == [pytest.approx(1.0)] * 3
    assert held[3] != pytest.approx(1.0, abs=1e-4)
    options = {"temperature_method": method, "steps": 40, "temperature_init": 2.0}
    drawn = run(tmp_path / "drawn", trainer(tmp_path / "drawn", temperature_prior=100.0, **options))
    assert abs(drawn[-1] - 1) < 0.15


def test_invalid_temperature_rules_raise(tmp_path):
    with pytest.raises(ValueError, match="needs a validation split"):
        trainer(tmp_path, validation=False, temperature_method="gradient")
    assert (
        trainer(tmp_path, validation=False, temperature_method="gradient", temperature_held_out=0.25).task.rule
        is not None
    )
    assert trainer(tmp_path).task.rule is None
    config = TrainConfig(temperature="learned", temperature_method="bilevel", temperature_held_out=0.01, batch_size=8)
    with pytest.raises(ValueError, match="takes 0 of the 8 examples"):
        held_out_examples(config, 1)


@pytest.mark.parametrize(("share", "frozen"), [(0.0, 0), (0.05, 5), (0.5, 50), (1.0, 100)])
def test_the_first_share_of_the_steps_is_frozen(share, frozen):
    config = small(temperature_hold=share)
    assert [is_frozen(step, 100, config) for step in range(100)] == [step < frozen for step in range(100)]


@pytest.mark.parametrize("init", [0.3, 1.0, 2.525])
def test_the_gradient_of_the_prior(init):
    temperature = LearnedTemperature(init=init)
    temperature.raw.grad = torch.tensor([0.5])
    add_temperature_prior(temperature, 3.0)
    slope = (init - temperature.low) * (temperature.high - init) / (temperature.high - temperature.low)
    expected = 3.0 * 2 * math.log(init) / init * slope
    assert float(temperature.raw.grad) == pytest.approx(0.5 + expected, abs=1e-5)
    temperature.raw.grad = None
    add_temperature_prior(temperature, 3.0)
    assert temperature.raw.grad is not None
    assert float(temperature.raw.grad) == pytest.approx(expected, abs=1e-5)


def test_a_prior_needs_a_learned_temperature():
    add_temperature_prior(FixedTemperature(2.0), 1.0)
    temperature = LearnedTemperature().requires_grad_(False)
    add_temperature_prior(temperature, 1.0)
    assert temperature.raw.grad is None


def test_a_frozen_temperature_does_not_move_and_leaves_no_state():
    temperature, other = LearnedTemperature(init=2.0), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*temperature.parameters(), other], lr=0.1, weight_decay=0.0)
    reset_state(temperature, optimizer)  # before any step there is no state
    for parameter in (temperature.raw, other):
        parameter.grad = torch.ones(1)
    freeze(temperature)
    optimizer.step()
    reset_state(temperature, optimizer)
    assert temperature().item() == pytest.approx(2.0)
    assert other.item() == pytest.approx(0.9)
    assert all((value == 0).all() for value in optimizer.state[temperature.raw].values())
    assert float(optimizer.state[other]["step"]) == 1
