"""The callback in modules that do not use it: its logs, for every way to call the head."""

import copy
import csv
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetxl
from hetxl import DetHead, HetHead, HetXLHead, LearnedTemperature
from hetxl.integrations.lightning import (
    NOISE_CLASSES,
    CalibrationError,
    HeadMonitor,
    HetXLModule,
    draws,
    import_lightning,
    noise_scale,
)
from hetxl.metrics import calibration_error
from support.cases import VARIANTS, make
from support.lightning_runs import QUIET, D, K, backbone, examples, loader, logged, trainer, whole
from support.records import with_confidence

pytestmark = QUIET


class Plain(pl.LightningModule):
    """Somebody's own module: a head somewhere in it, and a validation step of some kind."""

    def __init__(self, step="loss", head=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "body": backbone(),
                "fc": head or HetXLHead(D, K, rank=2, train_samples=4, temperature=LearnedTemperature(init=1.0)),
            }
        )
        self.step = step

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return self.model["fc"](self.model["body"](inputs), targets=targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        features, head = self.model["body"](inputs), self.model["fc"]
        generator = draws(self.device, batch_idx)
        if self.step in ("loss", "both"):
            head(features, targets)
        if self.step in ("outputs", "both"):
            head(features, generator=generator)
        if self.step == "predict":
            head.predict(features, generator=generator)
        if self.step == "top":
            head.predict(features, top_k=2, generator=generator)
        if self.step == "part":
            head(features[:1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def calibration_of(module, inputs, labels):
    """By the module that measures itself."""
    twin = HetXLModule(module.model["body"], module.model["fc"])
    return trainer(Path()).validate(twin, loader(inputs, labels), verbose=False)[0]["val_calibration_error"]


def monitored(module, folder, *monitors, **options):
    run = trainer(folder, callbacks=list(monitors) or [HeadMonitor()], **options)
    run.fit(module, loader(*examples()), loader(*examples(64, seed=1)))
    return run


def test_temperature_and_noise_scale_of_the_last_step(tmp_path):
    module = Plain()
    actual = logged(monitored(module, tmp_path, HeadMonitor(prefix="head/", examples=5)))
    assert actual.keys() == {"head/temperature", "head/noise_scale", "head/calibration_error"}
    head = module.model["fc"]
    inputs = examples()[0][80:85]  # of the last batch
    with torch.no_grad():
        assert actual["head/temperature"] == pytest.approx(float(head.temperature()))
    assert actual["head/temperature"] != 1
    # The features are those of before the last step.
    features = module.model["body"](inputs).detach()
    assert actual["head/noise_scale"] == pytest.approx(noise_scale(head, features), rel=0.2)
    assert noise_scale(head, features) > 0.02


@pytest.mark.parametrize("step", ["loss", "outputs", "both", "predict", "top"])
def test_calibration_however_the_head_is_used(tmp_path, step):
    module = Plain(step, DetHead(D, K, temperature=0.2))
    inputs, labels = examples(64, seed=1)
    labels[::5] = -100
    run = trainer(tmp_path, callbacks=[HeadMonitor()])
    run.validate(module, loader(inputs, labels), verbose=False)
    assert logged(run) == {"calibration_error": pytest.approx(calibration_of(module, inputs, labels), abs=1e-6)}
    assert logged(run)["calibration_error"] > 0.05


@pytest.mark.parametrize("step", ["loss", "outputs", "both", "predict", "top"])
def test_calibration_of_a_head_with_noise(tmp_path, step):
    module = Plain(step, HetXLHead(D, K, rank=2, temperature=0.3, noise_init=2.0))
    actual = logged(monitored(module, tmp_path))
    expected = calibration_of(module, *examples(64, seed=1))
    assert actual["calibration_error"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("step", ["loss", "outputs"])
def test_calibration_with_class_probabilities(tmp_path, step):
    module = Plain(step, DetHead(D, K, temperature=0.2))
    inputs, labels = examples(64, seed=1)
    run = trainer(tmp_path, callbacks=[HeadMonitor()])
    run.validate(module, loader(inputs, 0.3 * torch.eye(K)[labels] + 0.7 / K), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(calibration_of(module, inputs, labels), abs=1e-6)


@pytest.mark.parametrize("step", ["loss", "outputs", "predict"])
def test_calibration_with_any_number_of_labels(tmp_path, step):
    module = Plain(step, DetHead(D, K, link="sigmoid"))
    inputs, rows = torch.randn(40, D), (torch.rand(40, K) < 0.5).float()
    run = trainer(tmp_path, callbacks=[HeadMonitor()])
    run.validate(module, loader(inputs, rows), verbose=False)
    actual = logged(run)["calibration_error"]
    assert actual == pytest.approx(calibration_of(module, inputs, rows), abs=1e-6)
    lists = [row.nonzero().flatten().tolist() for row in rows]
    run.validate(module, whole((inputs, lists)), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(actual, abs=1e-6)


def test_calibration_error_equals_the_modules_own(tmp_path):
    torch.manual_seed(0)
    module = HetXLModule(backbone(), HetXLHead(D, K, rank=2))
    actual = logged(monitored(module, tmp_path))
    assert actual["calibration_error"] == actual["val_calibration_error"]


def test_monitor_does_not_change_the_run(tmp_path):
    states = []
    for monitors in ([], [HeadMonitor()]):
        module = Plain("loss")
        torch.manual_seed(2)
        run = trainer(tmp_path, callbacks=monitors, max_epochs=2)
        # The loss of the validation step draws, as its module wants it; the callback does not.
        run.fit(module, loader(*examples(), shuffle=True), loader(*examples(64, seed=1)))
        states.append(module.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_nothing_is_left_on_the_head(tmp_path):
    module = Plain()
    monitor = HeadMonitor()
    copies = []

    class Copy(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            copies.append(copy.deepcopy(pl_module.model))

    monitored(module, tmp_path, Copy(), monitor)

    class Broken(Plain):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("broken")

    broken = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        monitored(broken, tmp_path, monitor)
    for head in (module.model["fc"], broken.model["fc"], copies[0]["fc"]):
        assert not head._forward_hooks
        assert "predict" not in vars(head)


def test_monitor_logs_every_n_steps(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    monitored(Plain(), tmp_path, HeadMonitor(every_n_steps=4, calibration=False), logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    actual = {int(line["step"]): (line["temperature"], line["noise_scale"]) for line in lines if line["noise_scale"]}
    # Of six steps after the 4th, which Lightning repeats in its next line, and after the last.
    assert list(actual) == [3, 4, 5]
    assert actual[3] == actual[4]
    assert actual[4] != actual[5]


def test_head_of_a_converted_model_is_logged(tmp_path):
    class Segmenter(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = hetxl.convert(nn.Sequential(nn.Conv2d(3, D, 3), nn.ReLU(), nn.Conv2d(D, K, 1)), rank=2)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["pixels"]), batch["labels"])

        def validation_step(self, batch, batch_idx):
            self.net(batch["pixels"])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Segmenter()
    batch = {"pixels": torch.randn(2, 3, 6, 6), "labels": torch.randint(K, (2, 4, 4))}
    run = trainer(tmp_path, callbacks=[HeadMonitor()])
    run.fit(module, whole(batch), whole(batch))
    actual = logged(run)
    assert actual.keys() == {"temperature", "noise_scale", "calibration_error"}
    assert actual["noise_scale"] > 0


def test_targets_by_a_function_of_the_batch(tmp_path):
    module = Plain("outputs", DetHead(D, K))
    inputs, labels = examples(32)
    batch = {"x": inputs, "y": labels}
    with pytest.raises(TypeError, match=r"found the keys x, y; pass targets="):
        trainer(tmp_path, callbacks=[HeadMonitor()]).validate(module, whole(batch), verbose=False)
    run = trainer(tmp_path, callbacks=[HeadMonitor(targets=lambda batch: batch["y"])])
    run.validate(module, whole(batch), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(calibration_of(module, inputs, labels), abs=1e-6)
    # Other targets than the loss had: all of them what the head says.
    inside = {"x": inputs, "y": labels}
    answers = module.model["fc"].predict(module.model["body"](inputs)).top_class
    module.step = "loss"
    run = trainer(tmp_path, callbacks=[HeadMonitor(targets=lambda _: answers)])
    run.validate(module, whole(inside), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(calibration_of(module, inputs, answers), abs=1e-6)


def test_predictions_that_do_not_fit_the_targets(tmp_path):
    with pytest.raises(ValueError, match=r"targets must be class ids of shape \[1\].*calibration=False to HeadMonitor"):
        monitored(Plain("part"), tmp_path)
    monitored(Plain("part"), tmp_path, HeadMonitor(calibration=False))


def test_a_validation_without_the_head(tmp_path):
    with pytest.warns(UserWarning, match="no validation step used the head"):
        monitored(Plain("nothing"), tmp_path)


def test_module_without_a_head_raises_before_training(tmp_path):
    class Headless(Plain):
        def __init__(self):
            super().__init__()
            self.model["fc"] = nn.Linear(D, K)

    with pytest.raises(ValueError, match="must contain a hetxl head"):
        monitored(Headless(), tmp_path)
    with pytest.raises(ValueError, match="every_n_steps must be at least 1"):
        HeadMonitor(every_n_steps=0)
    with pytest.raises(ValueError, match="examples must be at least 1"):
        HeadMonitor(examples=0)


def test_monitor_works_in_mixed_precision(tmp_path):
    actual = logged(monitored(Plain(), tmp_path, precision="bf16-mixed"))
    assert actual.keys() == {"temperature", "noise_scale", "calibration_error"}
    assert all(value == value for value in actual.values())


def test_the_calibration_error_is_that_of_evaluation():
    rng = np.random.default_rng(0)
    confidence, hit = rng.random(200).astype(np.float32), rng.random(200) < 0.6
    metric = CalibrationError()
    for start in range(0, 200, 64):
        metric.update(torch.from_numpy(confidence[start : start + 64]), torch.from_numpy(hit[start : start + 64]))
    assert float(metric.compute()) == pytest.approx(calibration_error(with_confidence(confidence, hit)), rel=1e-6)
    metric.reset()
    metric.update(torch.empty(0), torch.empty(0))
    assert torch.isnan(metric.compute())


def test_metric_is_not_in_the_state_dict():
    metric = CalibrationError()
    metric.update(torch.rand(3), torch.ones(3))
    assert metric.state_dict() == {}


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_noise_scale_is_the_spread_of_sampled_logits(variant, link):
    head = make(variant, link=link, temperature=0.5, noise_init=1.0)
    features = torch.randn(7, 5, dtype=torch.float64)
    actual = noise_scale(head, features)
    if head.covariance is None:
        assert actual == 0
        return
    with torch.no_grad():
        logits = head.logit_distribution(features).sample(torch.randn(20_000, head.covariance.size).double())
    expected = (logits / 0.5).var(-2).mean(-1).sqrt().median()
    assert actual == pytest.approx(float(expected), rel=0.02)


def test_noise_scale_of_many_classes_uses_a_sample_of_them():
    head = HetHead(4, 10 * NOISE_CLASSES, rank=2, temperature=1.0, residual="diagonal", noise_init=1.0)
    features = torch.randn(5, 4)
    with torch.no_grad():
        exact = head.logit_distribution(features).variance.mean(-1).sqrt().median()
    assert noise_scale(head, features) == pytest.approx(float(exact), rel=0.1)
    assert noise_scale(DetHead(4, 3), features) == 0


def test_draws_are_the_same_each_time_and_leave_no_trace():
    torch.manual_seed(3)
    first = torch.randn(4, generator=draws(torch.device("cpu"), 7))
    after = torch.randn(4)
    assert torch.equal(first, torch.randn(4, generator=draws(torch.device("cpu"), 7)))
    assert not torch.equal(first, torch.randn(4, generator=draws(torch.device("cpu"), 8)))
    torch.manual_seed(3)
    assert torch.equal(after, torch.randn(4))


def test_either_lightning_package_is_imported(monkeypatch):
    assert pl is import_lightning() is sys.modules["lightning.pytorch"]
    with monkeypatch.context() as patch:
        for name in ("lightning", "lightning.pytorch"):
            patch.setitem(sys.modules, name, None)  # as if it were not installed
        assert import_lightning().__name__ == "pytorch_lightning"
        patch.setitem(sys.modules, "pytorch_lightning", None)
        with pytest.raises(ImportError, match=r"pip install lightning"):
            import_lightning()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "lightning.pytorch")
        assert import_lightning().__name__ == "pytorch_lightning"  # it is in use, and the other is not
    assert import_lightning() is pl
