"""The callback in modules that know nothing of it: what it logs, whatever way the head is used."""

import copy
import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetxl
from hetxl import DetHead, HetXLHead
from hetxl.integrations.lightning import HeadMonitor, HetXLModule, noise_scale
from hetxl.integrations.lightning_metrics import draws
from support.lightning_runs import QUIET, D, K, backbone, examples, loader, logged, trainer, whole

pytestmark = QUIET


class Plain(pl.LightningModule):
    """Somebody's own module: a head somewhere in it, and a validation step of some kind."""

    def __init__(self, step="loss", head=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"body": backbone(), "fc": head or HetXLHead(D, K, rank=2, train_samples=4)})
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
    found = logged(monitored(module, tmp_path, HeadMonitor(prefix="head/", examples=5)))
    assert found.keys() == {"head/temperature", "head/noise_scale", "head/calibration_error"}
    head = module.model["fc"]
    inputs = examples()[0][80:85]  # of the last batch
    with torch.no_grad():
        assert found["head/temperature"] == pytest.approx(float(head.temperature()))
    assert found["head/temperature"] != 1
    # The features are those of before the last step.
    features = module.model["body"](inputs).detach()
    assert found["head/noise_scale"] == pytest.approx(noise_scale(head, features), rel=0.2)
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
    found = logged(monitored(module, tmp_path))
    expected = calibration_of(module, *examples(64, seed=1))
    assert found["calibration_error"] == pytest.approx(expected, abs=1e-5)


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
    found = logged(run)["calibration_error"]
    assert found == pytest.approx(calibration_of(module, inputs, rows), abs=1e-6)
    lists = [row.nonzero().flatten().tolist() for row in rows]
    run.validate(module, whole((inputs, lists)), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(found, abs=1e-6)


def test_it_agrees_with_the_module_that_measures_itself(tmp_path):
    torch.manual_seed(0)
    module = HetXLModule(backbone(), HetXLHead(D, K, rank=2))
    found = logged(monitored(module, tmp_path))
    assert found["calibration_error"] == found["val_calibration_error"]


def test_a_training_is_the_same_with_and_without_it(tmp_path):
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


def test_how_often(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    monitored(Plain(), tmp_path, HeadMonitor(every_n_steps=4, calibration=False), logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    found = {int(line["step"]): (line["temperature"], line["noise_scale"]) for line in lines if line["noise_scale"]}
    # Of six steps after the 4th, which Lightning repeats in its next line, and after the last.
    assert list(found) == [3, 4, 5]
    assert found[3] == found[4]
    assert found[4] != found[5]


def test_a_converted_model(tmp_path):
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
    found = logged(run)
    assert found.keys() == {"temperature", "noise_scale", "calibration_error"}
    assert found["noise_scale"] > 0


def test_targets_by_a_function_of_the_batch(tmp_path):
    module = Plain("outputs", DetHead(D, K))
    inputs, labels = examples(32)
    batch = {"x": inputs, "y": labels}
    with pytest.raises(TypeError, match=r"found the keys x, y; give HeadMonitor targets="):
        trainer(tmp_path, callbacks=[HeadMonitor()]).validate(module, whole(batch), verbose=False)
    run = trainer(tmp_path, callbacks=[HeadMonitor(targets=lambda batch: batch["y"])])
    run.validate(module, whole(batch), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(calibration_of(module, inputs, labels), abs=1e-6)
    # Other targets than the loss had: all of them what the head says.
    inside = {"x": inputs, "y": labels}
    answers = module.model["fc"].predict(module.model["body"](inputs)).labels
    module.step = "loss"
    run = trainer(tmp_path, callbacks=[HeadMonitor(targets=lambda _: answers)])
    run.validate(module, whole(inside), verbose=False)
    assert logged(run)["calibration_error"] == pytest.approx(calibration_of(module, inputs, answers), abs=1e-6)


def test_predictions_that_do_not_fit_the_targets(tmp_path):
    with pytest.raises(ValueError, match=r"targets must be class ids of shape \[1\].*HeadMonitor.*calibration=False"):
        monitored(Plain("part"), tmp_path)
    monitored(Plain("part"), tmp_path, HeadMonitor(calibration=False))


def test_a_validation_without_the_head(tmp_path):
    with pytest.warns(UserWarning, match="no validation step used the head"):
        monitored(Plain("nothing"), tmp_path)


def test_a_module_without_a_head_is_refused_before_it_trains(tmp_path):
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


def test_mixed_precision(tmp_path):
    found = logged(monitored(Plain(), tmp_path, precision="bf16-mixed"))
    assert found.keys() == {"temperature", "noise_scale", "calibration_error"}
    assert all(value == value for value in found.values())
