"""Data from a known model: the labels are that model's, and its loss is the best."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetxl.functional import sobol
from hetxl_train.data import synthetic
from hetxl_train.data.synthetic import FeatureSplit, draw_labels, load_synthetic, true_head, true_nll

SMALL = {"features": 4, "classes": 6, "rank": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


def noisy_logits(head, features, samples):
    """Logits [n, S, K] by the formula W (x + ε) + b, written out, with draws of their own."""
    rng = np.random.default_rng(7)
    values = {name: value.double().numpy() for name, value in head.state_dict().items()}
    x = features.double().numpy()
    scale = x @ values["covariance.scale.weight"].T + values["covariance.scale.bias"]
    raw = x @ values["covariance.residual.weight"].T + values["covariance.residual.bias"]
    residual = np.log1p(np.exp(raw)) + 1e-3
    factors = rng.standard_normal((len(x), samples, len(values["covariance.factor"]))) @ values["covariance.factor"]
    noise = factors * scale[:, None] + rng.standard_normal((len(x), samples, 1)) * residual[:, None]
    logits = (x[:, None] + noise) @ values["classifier.weight"].T + values["classifier.bias"]
    return torch.from_numpy(logits)


def inputs_of(split):
    return split.fetch(np.arange(len(split))).inputs


def targets_of(split) -> Any:
    return split.labels.take(np.arange(len(split)))


def dense(labels, classes):
    lists = labels.take(np.arange(len(labels)))
    return torch.zeros(len(labels), classes).index_put((lists.examples, lists.classes), torch.tensor(1.0))


def chi_square(observed, expected):
    return float(((observed - expected).square() / expected).sum())


def test_label_frequencies_match_the_model():
    # 5 degrees of freedom in each of two halves: above 35.6 once in 10,000 times (10 degrees), if the model is true.
    head = true_head(**SMALL)
    features = torch.from_numpy(np.random.default_rng(1).standard_normal((20_000, 4), dtype=np.float32))
    observed = F.one_hot(draw_labels(head, features).take(np.arange(20_000)), 6).double()
    averaged = torch.cat([noisy_logits(head, part, 64).softmax(-1).mean(1) for part in features.split(4000)])
    noiseless = head.predict(features, method="deterministic").probs.double()
    # Halves by how large the noise is: a model with the right noise on average only would fail.
    loud = head.logit_distribution(features).noise.residual.norm(dim=-1)
    halves = (loud > loud.median(), loud <= loud.median())
    true, wrong = (
        sum(chi_square(observed[half].sum(0), probs[half].sum(0)) for half in halves) for probs in (averaged, noiseless)
    )
    assert true < 35.6
    assert wrong > 100


def test_multi_label_frequencies_match_the_model_and_share_the_noise():
    head = true_head(**SMALL, multi_label=True)
    features = torch.from_numpy(np.random.default_rng(1).standard_normal((20_000, 4), dtype=np.float32))
    observed = dense(draw_labels(head, features), 6).double()
    marginal, pairs = torch.zeros(20_000, 6), torch.zeros(6, 6, dtype=torch.float64)
    for number, part in enumerate(features.split(4000)):
        probs = noisy_logits(head, part, 64).sigmoid()
        marginal[number * 4000 : (number + 1) * 4000] = probs.mean(1)
        pairs += torch.einsum("nsi,nsj->ij", probs, probs) / 64
    # Counts of 20,000: their standard deviation is at most √20,000 / 2 = 71.
    assert (observed.sum(0) - marginal.sum(0)).abs().max() < 4 * 71
    both, apart = observed.T @ observed, marginal.double().T @ marginal.double()
    off = ~torch.eye(6, dtype=torch.bool)
    assert (both - pairs)[off].abs().max() < 4 * 71
    assert (both - apart)[off].abs().max() > 8 * 71


@pytest.mark.parametrize("multi_label", [False, True])
def test_best_nll_is_the_loss_of_the_true_model(multi_label):
    dataset = load_synthetic(**SMALL, rows=40_000, multi_label=multi_label)
    head, test = true_head(**SMALL, multi_label=multi_label), dataset.splits["test"]
    inputs, targets = inputs_of(test), targets_of(test)

    logits = noisy_logits(head, inputs, 512)
    if multi_label:
        probs, labels = logits.sigmoid().mean(1), dense(test.labels, 6).double()
        plain = F.binary_cross_entropy(probs, labels, reduction="none").sum(-1).mean()
    else:
        plain = F.nll_loss(logits.softmax(-1).mean(1).log(), targets)
    assert dataset.best_nll == pytest.approx(float(plain), abs=0.01)

    noise = sobol(1, 512, 3, generator=torch.Generator().manual_seed(0))[0]

    def loss(change):
        other = copy.deepcopy(head)
        change(other)
        return float(other.loss(inputs, targets, noise=noise))

    assert loss(lambda other: None) == pytest.approx(dataset.best_nll, abs=0.01)
    changes = [
        lambda other: other.covariance.factor.mul_(0.4),
        lambda other: other.covariance.factor.mul_(2.5),
        lambda other: other.covariance.residual.bias.add_(3),
        lambda other: other.covariance.scale.weight.copy_(other.covariance.scale.weight.flip(0)),
        lambda other: other.classifier.weight.mul_(0.4),
        lambda other: other.classifier.bias.add_(torch.linspace(-4, 4, 6)),
    ]
    for number, change in enumerate(changes):
        assert loss(change) > dataset.best_nll + 0.01, number


def test_linear_classifier_is_far_from_the_best_loss():
    dataset = load_synthetic(rows=40_000)
    assert 2.05 < dataset.best_nll < 2.3
    inputs, targets = inputs_of(dataset.splits["train"]), targets_of(dataset.splits["train"])
    linear = torch.nn.Linear(16, 100)
    optimiser = torch.optim.Adam(linear.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, total_iters=300)
    for _ in range(300):
        batch = torch.randint(len(inputs), (1024,))
        optimiser.zero_grad()
        F.cross_entropy(linear(inputs[batch]), targets[batch]).backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        loss = F.cross_entropy(linear(inputs_of(dataset.splits["test"])), targets_of(dataset.splits["test"]))
    assert dataset.best_nll + 0.3 < loss < dataset.best_nll + 0.7


@pytest.mark.parametrize("multi_label", [False, True])
def test_equal_seeds_give_equal_data(multi_label):
    options = SMALL | {"rows": 400, "multi_label": multi_label}
    first, again, other = load_synthetic(**options), load_synthetic(**options), load_synthetic(**options, seed=1)
    assert first.best_nll == again.best_nll != other.best_nll
    assert first.notes == again.notes
    for name, split in first.splits.items():
        assert torch.equal(inputs_of(split), inputs_of(again.splits[name]))
        np.testing.assert_array_equal(split.labels.ids, again.splits[name].labels.ids)
        assert not torch.equal(inputs_of(split), inputs_of(other.splits[name]))
    assert first.multi_label == multi_label


def test_global_generator_is_unchanged():
    before = torch.get_rng_state()
    load_synthetic(**SMALL, rows=100)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_rows_extend_the_data():
    few, many = (load_synthetic(**SMALL, rows=rows).splits["train"] for rows in (100, 1000))
    assert torch.equal(inputs_of(few), inputs_of(many)[:90])
    np.testing.assert_array_equal(few.labels.ids, many.labels.ids[:90])


def test_labels_do_not_depend_on_block_size():
    head = true_head(classes=3000)
    features = torch.from_numpy(np.random.default_rng(1).standard_normal((900, 16), dtype=np.float32))
    whole = draw_labels(head, features).ids  # blocks of 699
    np.testing.assert_array_equal(whole[:50], draw_labels(head, features[:50]).ids)
    assert len(whole) == 900


def test_splits_have_their_sizes():
    dataset = load_synthetic(**SMALL, rows=1000)
    assert {name: len(split) for name, split in dataset.splits.items()} == {
        "train": 900,
        "validation": 50,
        "test": 50,
    }
    assert dataset.name == "synthetic"
    assert dataset.input.kind == "features"
    assert dataset.input.shape == (4,)
    assert list(dataset.class_names) == ["0", "1", "2", "3", "4", "5"]
    split = dataset.splits["test"]
    rows = np.array([7, 0, 7])
    fetched = split.fetch(rows)
    assert torch.equal(fetched.inputs, inputs_of(split)[rows])
    assert fetched.inputs.dtype == torch.float32
    np.testing.assert_array_equal(fetched.rows, rows)


@pytest.mark.parametrize("classes", [100, 1000])
def test_multi_label_rows_have_a_few_labels(classes):
    features = torch.from_numpy(np.random.default_rng(1).standard_normal((2000, 16), dtype=np.float32))
    labels = draw_labels(true_head(classes=classes, multi_label=True), features)
    assert 2 < len(labels.ids) / 2000 < 4


def test_more_noise_raises_the_best_loss():
    losses = [load_synthetic(**SMALL, rows=4000, noise=noise).best_nll for noise in (1e-9, 0.1, 0.5, 1.0, 3.0, 1e6)]
    assert np.isfinite(losses).all()
    assert losses[1:] == sorted(losses[1:])


def test_the_loss_of_a_few_rows_and_of_uneven_blocks():
    head = true_head(**SMALL)
    features = torch.randn(1500, 4)
    split = FeatureSplit(features, draw_labels(head, features))
    loss = true_nll(head, split, rows=1500, samples=256)
    with torch.no_grad():
        assert loss == pytest.approx(float(head.loss(features, targets_of(split), num_samples=256)), abs=0.01)
        expected = head.loss(features[:3], split.labels.take(np.arange(3)), num_samples=4096)
    assert true_nll(head, split, rows=3, samples=4096) == pytest.approx(float(expected), abs=0.05)


def test_many_classes_use_fewer_rows_and_samples():
    assert synthetic._effort(10_000, 100, False) == (10_000, 1024)
    assert synthetic._effort(10_000, 100, True) == (10_000, 512)
    assert synthetic._effort(50_000, 10, False) == (10_000, 1024)
    assert synthetic._effort(300, 10, False) == (300, 1024)
    assert synthetic._effort(10_000, 100_000, False) == (2_000, 256)
    assert synthetic._effort(10_000, 100_000, True) == (2_000, 256)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": 0}, ValueError, "features must be at least 1, found 0"),
        ({"classes": 1}, ValueError, "classes must be at least 2, found 1"),
        ({"rank": 0}, ValueError, "rank must be at least 1, found 0"),
        ({"rows": 19}, ValueError, "rows must be at least 20, found 19"),
        ({"rows": 1e5}, TypeError, "rows must be an integer"),
        ({"noise": 0}, ValueError, "noise must be positive and finite, found 0"),
        ({"noise": float("nan")}, ValueError, "noise must be positive and finite, found nan"),
        ({"noise": "much"}, TypeError, "noise must be a positive number, found 'much'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
    ],
)
def test_invalid_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        load_synthetic(**options)
