"""A backbone with a head under Lightning: training, metrics, predictions, checkpoints, and two processes."""

import functools
import os
import time

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from hetxl import DetHead, HetXLHead, LearnedTemperature
from hetxl.functional import LabelLists
from hetxl.integrations.lightning import HeadMonitor, HetXLModule
from hetxl.metrics import summarise
from hetxl.optim import PRIORS, prior_penalties
from hetxl_train.data.labels import Labels
from hetxl_train.data.synthetic import FeatureSplit
from hetxl_train.distributed import destroy_process_group
from hetxl_train.evaluate import evaluate
from support.lightning_runs import QUIET, D, K, backbone, examples, loader, logged, trainer, whole

pytestmark = QUIET


def module(head=None, **options):
    torch.manual_seed(0)
    return HetXLModule(
        backbone(),
        head or HetXLHead(D, K, rank=2, train_samples=4, temperature=LearnedTemperature(init=1.0)),
        **({"learning_rate": 0.05} | options),
    )


def fit(model, folder, epochs=4, **options):
    run = trainer(folder, max_epochs=epochs, **options)
    run.fit(model, loader(*examples()), loader(*examples(64, seed=1)))
    return run


def test_training_lowers_the_validation_nll(tmp_path):
    model = module()
    untrained = trainer(tmp_path).validate(model, loader(*examples(64, seed=1)), verbose=False)[0]
    actual = logged(fit(model, tmp_path))
    assert untrained["val_nll"] > 1.5
    assert actual["val_nll"] < 0.8
    assert actual["val_precision@1"] > 0.8
    assert actual["train_loss"] < 1


def test_a_head_alone_has_its_own_defaults(tmp_path):
    torch.manual_seed(0)
    alone = HetXLModule(nn.Identity(), HetXLHead(D, K, rank=2, train_samples=4, standardize=True))
    assert (alone.recipe.learning_rate, alone.recipe.noise_start, alone.recipe.noise_learning_rate) == (0.02, 0.3, 0.3)
    network = HetXLModule(backbone(), HetXLHead(D, K, rank=2))
    assert (network.recipe.learning_rate, network.recipe.noise_start) == (0.002, 0)
    assert HetXLModule(nn.Identity(), DetHead(D, K)).recipe.noise_start == 0
    rows, labels = examples()
    run = trainer(tmp_path, max_epochs=4)
    run.fit(alone, loader(1000 * rows + 50, labels), loader(1000 * rows + 50, labels))
    torch.testing.assert_close(alone.head.standardize.mean, (1000 * rows + 50).mean(0), rtol=1e-4, atol=1e-2)
    assert logged(run)["train_loss"] < 1.2


def test_the_prior_of_a_head_alone_is_chosen_once(tmp_path):
    rows, _ = examples(200)
    scale = torch.tensor([10.0] * 2 + [0.3] * (D - 2))
    data = loader(rows * scale, (3 * rows[:, :2] @ torch.randn(2, K)).argmax(1))  # by the large directions
    torch.manual_seed(0)
    alone = HetXLModule(nn.Identity(), HetXLHead(D, K, rank=2, train_samples=4, standardize=True))
    run = trainer(tmp_path, max_epochs=20)
    run.fit(alone, data, data)
    assert alone.prior in PRIORS
    strengths = {penalty.strength for penalty in prior_penalties(alone.head, alone.prior, 200)}
    assert {penalty.strength for penalty in alone.penalties} == strengths
    assert len(alone.head.standardize.deviation.unique()) == 1  # their proportions are kept
    run.save_checkpoint(tmp_path / "half.ckpt")
    again = HetXLModule(nn.Identity(), HetXLHead(D, K, rank=2, train_samples=4, standardize=True))
    other = loader(rows * scale, torch.randint(K, (200,)))
    trainer(tmp_path, max_epochs=21).fit(again, other, other, ckpt_path=tmp_path / "half.ckpt")
    assert again.prior == alone.prior
    assert HetXLModule(nn.Identity(), DetHead(D, K), weight_decay=0.1).recipe.weight_decay == 0.1
    assert not HetXLModule(nn.Identity(), DetHead(D, K), weight_decay=0.1).has_prior


def test_the_first_steps_of_a_head_alone_have_no_noise(tmp_path):
    torch.manual_seed(0)
    alone = HetXLModule(nn.Identity(), HetXLHead(D, K, rank=2, train_samples=4), weight_decay=0.0, noise_start=0.5)
    before = [parameter.clone() for parameter in alone.head.covariance.parameters()]
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            now = list(module.head.covariance.parameters())
            seen.append(all(torch.equal(old, new) for old, new in zip(before, now, strict=True)))

    run = trainer(tmp_path, max_epochs=-1, max_steps=8, callbacks=[Watch()])
    run.fit(alone, loader(*examples()), loader(*examples(seed=1)))
    assert seen == [True] * 4 + [False] * 4


def test_the_same_seed_gives_the_same_weights(tmp_path):
    states = []
    for _ in range(2):
        model = module()
        torch.manual_seed(1)
        fit(model, tmp_path, epochs=1)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("stage", ["val", "test"])
def test_metrics_are_those_of_evaluation(tmp_path, stage):
    inputs, labels = examples(90, seed=2)
    labels[::7] = -100
    model = module(DetHead(D, K, temperature=0.3))  # without noise there is one answer, whatever the batches
    run = trainer(tmp_path)
    call = run.validate if stage == "val" else run.test
    actual = call(model, loader(inputs, labels, batch_size=13), verbose=False)[0]
    split = FeatureSplit(inputs, Labels(labels.numpy()))
    expected = summarise(evaluate(model.backbone, model.head, split, confusions=False).records)
    names = ("nll", "precision@1", "precision@5", "calibration_error")
    assert actual.keys() == {f"{stage}_{name}" for name in names}
    for name in names:
        assert actual[f"{stage}_{name}"] == pytest.approx(expected[name], abs=1e-5)


def test_evaluation_is_repeatable_and_leaves_the_draws_of_training_alone(tmp_path):
    model, batches = module(), loader(*examples(32), generator=torch.Generator())
    torch.manual_seed(5)
    first = trainer(tmp_path).validate(model, batches, verbose=False)
    after = torch.randn(3)
    assert trainer(tmp_path).validate(model, batches, verbose=False) == first
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3), after)


@pytest.mark.parametrize("form", ["rows", "lists", "sparse"])
def test_any_number_of_labels(tmp_path, form):
    torch.manual_seed(0)
    model = module(HetXLHead(D, K, rank=2, link="sigmoid"))
    inputs, rows = torch.randn(12, D), (torch.rand(12, K) < 0.4).float()
    lists = [row.nonzero().flatten().tolist() for row in rows]
    targets = {"rows": rows, "lists": lists, "sparse": rows.to_sparse()}[form]
    actual = trainer(tmp_path).validate(model, whole((inputs, targets)), verbose=False)[0]
    with torch.no_grad():
        expected = float(model.head(model.backbone(inputs), LabelLists.from_lists(lists), num_samples=4096))
    assert actual["val_nll"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("shape", [(12,), (4, 3)])
def test_validation_accepts_class_probabilities(tmp_path, shape):
    model = module(DetHead(D, K))
    inputs, rows = torch.randn(*shape, D), (2 * torch.randn(*shape, K)).softmax(-1)
    rows[0] = torch.eye(K)[1]
    actual = trainer(tmp_path).validate(model, whole((inputs, rows)), verbose=False)[0]
    hard = trainer(tmp_path).validate(model, whole((inputs, rows.argmax(-1))), verbose=False)[0]
    with torch.no_grad():
        expected = float(model.head(model.backbone(inputs), rows))
    assert actual["val_nll"] == pytest.approx(expected, abs=1e-5)
    assert {name: value for name, value in actual.items() if name != "val_nll"} == {
        name: value for name, value in hard.items() if name != "val_nll"
    }


def test_module_trains_on_class_probabilities(tmp_path):
    (inputs, labels), (others, needed) = examples(), examples(64, seed=1)
    model, run = module(), trainer(tmp_path, max_epochs=4, callbacks=[HeadMonitor()])
    smooth = [0.3 * torch.eye(K)[ids] + 0.7 / K for ids in (labels, needed)]  # the label has less than half
    run.fit(model, loader(inputs, smooth[0]), loader(others, smooth[1]))
    actual = logged(run)
    assert actual["val_precision@1"] > 0.7
    assert actual["calibration_error"] == pytest.approx(actual["val_calibration_error"], abs=1e-6)
    assert 1.61 < actual["val_nll"] < 1.75  # their entropy is 1.618


def test_validation_accepts_token_labels(tmp_path):
    model = module(DetHead(D, K))
    inputs, labels = torch.randn(4, 5, D), torch.randint(K, (4, 5))
    actual = trainer(tmp_path).validate(model, whole((inputs, labels)), verbose=False)[0]
    with torch.no_grad():
        expected = float(model.head(model.backbone(inputs), labels))
    assert actual["val_nll"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("top_k", [None, 3])
def test_predict_returns_probabilities_and_uncertainty(tmp_path, top_k):
    inputs, labels = examples(20)
    model = module(top_k=top_k)
    for batches in (loader(inputs, labels, batch_size=8), whole(inputs)):
        actual = trainer(tmp_path).predict(model, batches) or []
        merged = {name: torch.cat([part[name] for part in actual]) for name in actual[0]}
        assert merged["entropy"].shape == merged["mutual_information"].shape == (20,)
        assert merged["probs"].shape == (20, top_k or K)
        if top_k is None:
            torch.testing.assert_close(merged["probs"].sum(-1), torch.ones(20))
            assert "classes" not in merged
        else:
            assert merged["classes"].shape == (20, 3)
            assert (merged["probs"].diff(dim=-1) <= 0).all()
    assert model(inputs).shape == (20, K)


def test_parameter_groups_and_schedule(tmp_path):
    rates = []

    class Recorder(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    model = module(weight_decay=0.3, warmup=0.25)
    run = fit(model, tmp_path, epochs=2, callbacks=[Recorder()])
    groups = {group["name"]: group for group in run.optimizers[0].param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "decayed": 0.3,
        "plain": 0.0,
        "temperature": 0.0,
    }
    assert groups["temperature"]["names"] == ["head.temperature.raw"]
    assert {"backbone.1.weight", "head.classifier.bias"} <= set(groups["plain"]["names"])
    rates = np.array(rates)
    assert rates.shape == (12, 3)
    np.testing.assert_allclose(rates[:, 2], 0.1 * rates[:, 0])
    np.testing.assert_allclose(rates[:3, 0], [0.05 / 3, 0.1 / 3, 0.05])  # a quarter of 12 steps
    assert (np.diff(rates[3:, 0]) < 0).all()
    assert isinstance(run.optimizers[0], torch.optim.AdamW)


def test_custom_optimiser_is_used(tmp_path):
    model = module(optimizer=functools.partial(torch.optim.SGD, momentum=0.9), schedule="constant", warmup=2)
    run = fit(model, tmp_path, epochs=1)
    optimizer = run.optimizers[0]
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.005])


def test_clipping_under_a_gradient_scaler_is_possible(tmp_path):
    # Lightning refuses to clip for an optimiser that scales by itself, as fused ones do.
    model = module()
    model.trainer = run = trainer(tmp_path, max_steps=3, max_epochs=-1)
    assert model.configure_optimizers()["optimizer"].defaults["fused"]
    run.strategy.precision_plugin.precision = "16-mixed"
    assert not model.configure_optimizers()["optimizer"].defaults["fused"]


def test_an_unknown_number_of_steps(tmp_path):
    model = module()
    model.trainer = trainer(tmp_path, max_epochs=-1, max_steps=-1)
    with pytest.raises(ValueError, match=r"schedule='cosine' with warmup=0\.05 needs the number of steps"):
        model.configure_optimizers()
    model = module(schedule="constant", warmup=3)
    model.trainer = trainer(tmp_path, max_epochs=-1, max_steps=-1)
    share = model.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [share(step) for step in (0, 1, 2, 3, 1000)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_a_checkpoint_gives_the_same_predictions(tmp_path):
    model = module(HetXLHead(D, K, rank=2), weight_decay=0.2, top_k=2)
    run = fit(model, tmp_path, epochs=1)
    run.save_checkpoint(tmp_path / "last.ckpt")
    torch.manual_seed(9)
    again = HetXLModule.load_from_checkpoint(
        tmp_path / "last.ckpt", backbone=backbone(), head=HetXLHead(D, K, rank=2), map_location="cpu"
    )
    assert (again.recipe, again.top_k) == (model.recipe, 2)
    batches = loader(*examples(10))
    first, second = (trainer(tmp_path).predict(each, batches)[0] for each in (model, again))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    run = trainer(tmp_path, max_epochs=2)
    run.fit(again, loader(*examples()), batches, ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"head": nn.Linear(D, K)}, TypeError, "head must be a head of hetxl, .* found Linear"),
        ({"learning_rate": 0.0}, ValueError, r"learning_rate must be positive, found 0\.0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0"),
        ({"warmup": -1.0}, ValueError, "warmup must be at least 0"),
        ({"schedule": "cosin"}, ValueError, "did you mean 'cosine'"),
    ],
)
def test_invalid_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        module(**options)


def two_processes(rank, folder):
    """Trains and validates in one of two processes, and stores what it logged."""
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")  # as torchrun does
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = module(DetHead(D, K, temperature=LearnedTemperature()))
    inputs, labels = examples(64, seed=1)
    labels[1::2] = (labels[1::2] + 1) % K  # the second process has wrong labels alone
    run = trainer(folder, devices=2, strategy="ddp", callbacks=[HeadMonitor()])
    run.fit(model, loader(*examples()), loader(inputs, labels, batch_size=8))
    torch.save({"logged": logged(run), "steps": run.global_step, "state": model.state_dict()}, folder / f"{rank}.pt")
    destroy_process_group()


# Python 3.12 warns of threads; the new processes use none of them.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_train_one_model_and_measure_all_examples(tmp_path):
    # Forked, so that nothing is imported again.
    context = mp.start_processes(two_processes, args=(tmp_path,), nprocs=2, join=False, start_method="fork")
    deadline = time.monotonic() + 60
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "two processes took more than a minute"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["steps"] == 3  # 96 examples in batches of twice 16
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    model = module(DetHead(D, K, temperature=LearnedTemperature()))
    model.load_state_dict(first["state"])
    inputs, labels = examples(64, seed=1)
    labels[1::2] = (labels[1::2] + 1) % K
    expected = trainer(tmp_path).validate(model, loader(inputs, labels), verbose=False)[0]
    for actual in (first["logged"], second["logged"]):
        assert actual["calibration_error"] == pytest.approx(expected["val_calibration_error"], abs=1e-5)
        assert actual["temperature"] == pytest.approx(float(model.head.temperature().detach()))
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, abs=1e-5)
