"""Two processes that share a batch: their averaged gradients are those of the whole batch in one process."""

import pytest
import torch
import torch.nn.functional as F

from support import distributed
from support.distributed import CASES, gradients, run, setting

NAMES = [f"{variant} {link}" for variant, link in CASES]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return run(distributed.replicated, tmp_path_factory.mktemp("replicated"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run(distributed.sharded, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def sharded_with_learned_temperature(tmp_path_factory):
    return run(distributed.sharded_with_learned_temperature, tmp_path_factory.mktemp("learned"))


def whole_batch(name, **options):
    """Gradients of one process."""
    model, features, targets, noise = setting(*name.split(), **options)
    model(features, targets, noise).backward()
    return gradients(model)


def assert_same(ranks, expected, tolerance=1e-11):
    for actual in ranks:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            error = float((actual[name] - value).abs().max() / value.abs().max())
            assert error < tolerance, f"{name}: {error:.2g}"


@pytest.mark.parametrize("name", NAMES)
def test_ddp_averages_to_the_whole_batch(replicated, name):
    assert_same([rank[name] for rank in replicated], whole_batch(name))


def test_ddp_with_a_rank_that_has_nothing_to_learn_from(replicated):
    # Its loss is 0 with zero gradients, so the average is half of the other's.
    model, features, targets, noise = setting("het-xl", "softmax")
    half = len(features) // 2
    (0.5 * model(features[:half], targets[:half], noise[:half])).backward()
    assert_same([rank["second rank empty"] for rank in replicated], gradients(model))


@pytest.mark.parametrize("name", NAMES)
def test_fsdp_averages_to_the_whole_batch(sharded, name):
    assert_same([rank[name] for rank in sharded], whole_batch(name, temperature=1.3))


@pytest.mark.parametrize("name", NAMES)
def test_fsdp_averages_to_the_whole_batch_with_a_learned_temperature(sharded_with_learned_temperature, name):
    assert_same([rank[name] for rank in sharded_with_learned_temperature], whole_batch(name))


def test_fsdp_of_log_probabilities(sharded):
    # Their backward pass goes through the blocks again, with parameters that were let go in between.
    model, features, targets, noise = setting("het-xl", "softmax", temperature=1.3)
    F.nll_loss(model(features, None, noise), targets).backward()
    assert_same([rank["log-probabilities"] for rank in sharded], gradients(model))


def test_fsdp_in_bfloat16(sharded):
    answers = [rank["bfloat16"] for rank in sharded]
    assert {value.dtype for value in answers[0].values()} == {torch.float32}
    assert_same(answers, whole_batch("het-xl softmax", temperature=1.3), 0.05)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_steps_leave_every_rank_with_the_same_parameters(kind, request):
    # Each rank draws its own noise; its gradients are averaged before the step.
    first, second = request.getfixturevalue(kind)
    for name, value in first["after"].items():
        assert torch.equal(value, second["after"][name]), name
        assert not torch.equal(value, first["before"][name]), name
        assert torch.isfinite(value).all(), name
