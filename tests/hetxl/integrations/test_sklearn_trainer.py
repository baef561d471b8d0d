"""Training and predicting rows of numbers: what weights mean, and what noise must not depend on."""

import itertools

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from hetxl.integrations import sklearn as rows_module
from hetxl.integrations.sklearn import Examples, RowNetwork, RowTrainer, Step
from hetxl.nn import build_head
from hetxl.optim import Recipe

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(30, 4))
TARGETS = GENERATOR.integers(3, size=30)
EVERY = np.arange(30)


def trainer(head="het-xl", hidden=(), seed=0, **options):
    torch.manual_seed(0)
    module = build_head(head, hidden[-1] if hidden else 4, 3, rank=2, **options)
    return RowTrainer(RowNetwork(4, hidden, module).double(), Recipe(weight_decay=0.01), seed)


def examples(weight=None, features=X, targets=TARGETS):
    return Examples(features, targets, np.ones(len(targets)) if weight is None else weight)


def outputs(trained, features=X):
    return torch.cat(trained.predict(features, lambda head, features, noise: head(features, noise=noise)))


def test_a_network_standardises_and_goes_through_its_hidden_layers():
    network = trainer(hidden=(7, 5)).network
    network.mean.copy_(torch.tensor(X.mean(0)))
    network.scale.copy_(torch.tensor(X.std(0)))
    values = (X - X.mean(0)) / X.std(0)
    first, second = network.body[0], network.body[2]
    expected = second(first(torch.from_numpy(values)).relu()).relu()
    torch.testing.assert_close(network(torch.from_numpy(X)), expected)
    assert expected.shape == (30, 5)


def test_network_starts_with_equal_probabilities():
    torch.testing.assert_close(outputs(trainer(hidden=(5,))).exp(), torch.full((30, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_the_loss_falls(head):
    trained = trainer(head)
    labels = (X[:, 0] > 0).astype(np.int64)
    losses = [trained.epoch(examples(targets=labels), EVERY, 8, itertools.repeat(Step(0.05))) for _ in range(20)]
    assert losses[0] == pytest.approx(np.log(3), rel=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert trained.evaluate(examples(targets=labels), EVERY) < 0.5 * losses[0]


def test_weights_are_repetitions_while_one_batch_holds_all_rows():
    weight = GENERATOR.integers(0, 4, 30).astype(np.float64)
    weighted, repeated = trainer(), trainer()
    again = np.repeat(EVERY, weight.astype(int))
    several = examples(features=X[again], targets=TARGETS[again])
    for _ in range(20):
        # The step divides by the number of rows, so weights have a mean of one.
        rows = np.flatnonzero(weight)
        first = weighted.epoch(examples(weight / weight[rows].mean()), rows, 100, [Step(0.05)])
        second = repeated.epoch(several, np.arange(len(again)), 100, [Step(0.05)])
        assert first == pytest.approx(second, rel=1e-10)
    torch.testing.assert_close(outputs(weighted), outputs(repeated), rtol=1e-9, atol=1e-9)


def test_an_epoch_takes_one_rate_for_each_step():
    rates = iter([Step(0.1)] * 10)
    trainer().epoch(examples(), EVERY, 8, rates)
    assert len(list(rates)) == 6


def test_a_rate_of_zero_changes_nothing():
    trained = trainer()
    before = outputs(trained)
    trained.epoch(examples(), EVERY, 8, itertools.repeat(Step(0.0)))
    torch.testing.assert_close(outputs(trained), before, rtol=0, atol=0)


def test_steps_without_noise_leave_the_covariance_alone():
    trained = trainer(noise_init=1.0)
    classifier = trained.network.head.classifier.weight.clone()
    trained.epoch(examples(), EVERY, 100, [Step(1e-3, noise=False)])
    gradients = [parameter.grad for parameter in trained.network.head.covariance.parameters()]
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    assert not torch.equal(classifier, trained.network.head.classifier.weight)


def test_training_redraws_noise_and_predictions_do_not():
    trained = trainer(noise_init=1.0)
    trained.epoch(examples(), EVERY, 100, [Step(0.1)])
    first, second = (trained.epoch(examples(), EVERY, 100, [Step(0.0)]) for _ in range(2))
    assert first != second
    torch.testing.assert_close(outputs(trained), outputs(trained), rtol=0, atol=0)


def test_a_prediction_does_not_depend_on_the_other_rows(monkeypatch):
    trained = trainer(noise_init=1.0)
    trained.epoch(examples(), EVERY, 8, itertools.repeat(Step(0.1)))
    whole = outputs(trained)
    torch.testing.assert_close(outputs(trained, X[17:18]), whole[17:18])
    loss = trained.evaluate(examples(), EVERY)
    assert loss == pytest.approx(-whole[EVERY, TARGETS].mean().item())
    monkeypatch.setattr(rows_module, "BLOCK", 7)
    torch.testing.assert_close(outputs(trained), whole)
    assert trained.evaluate(examples(), EVERY) == pytest.approx(loss)


def test_sparse_rows_are_made_dense_batch_by_batch():
    dense, sparse = trainer(), trainer()
    for _ in range(3):
        dense.epoch(examples(), EVERY, 8, itertools.repeat(Step(0.1)))
        sparse.epoch(examples(features=csr_matrix(X)), EVERY, 8, itertools.repeat(Step(0.1)))
    torch.testing.assert_close(outputs(dense), outputs(sparse, csr_matrix(X)), rtol=0, atol=0)


def test_the_seed_decides_order_and_noise():
    same = [trainer(seed=1), trainer(seed=1), trainer(seed=2)]
    for trained in same:
        trained.epoch(examples(), EVERY, 8, itertools.repeat(Step(0.1)))
    torch.testing.assert_close(outputs(same[0]), outputs(same[1]), rtol=0, atol=0)
    assert not torch.equal(outputs(same[0]), outputs(same[2]))


def test_biases_do_not_decay():
    decayed, undecayed = trainer("det").optimizer.param_groups
    assert decayed["weight_decay"] == 0.01
    assert undecayed["weight_decay"] == 0
    assert {parameter.dim() for parameter in undecayed["params"]} == {1}
    assert {parameter.dim() for parameter in decayed["params"]} == {2}


def test_rescaling_lowers_the_loss_and_can_be_taken_back():
    trained = trainer(hidden=(8,))
    # Fitted so long to labels that are of no use to others that it is much too sure of them.
    for _ in range(60):
        trained.epoch(examples(), EVERY, 30, itertools.repeat(Step(0.05)))
    other = examples(targets=np.roll(TARGETS, 1))
    before, raw = trained.evaluate(other, EVERY), outputs(trained)
    scales = trained.rescale(other)
    assert scales.temperature > 2
    assert trained.evaluate(other, EVERY) < before - 0.5
    trained.unscale()
    assert torch.equal(outputs(trained), raw)
    trained.unscale()
    assert torch.equal(outputs(trained), raw)
