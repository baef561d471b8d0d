"""Predictions of four processes that share the classes are those of one."""

import pytest
import torch

from support import sharded_predictions
from support.sharded import B, S, run
from support.sharded_predictions import PREDICTED, prediction

RANKS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(sharded_predictions.predictions, RANKS, tmp_path_factory.mktemp("predictions"))


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_are_those_of_one_process(found, name):
    expected = prediction(name, plain=True)
    for answer in found:
        assert answer[name].keys() == expected.keys()
        for what, value in expected.items():
            if value is None:
                assert answer[name][what] is None, what
                continue
            message = f"{what} of {name}"
            torch.testing.assert_close(
                answer[name][what], value, rtol=1e-10, atol=1e-12, msg=lambda text, at=message: f"{at}: {text}"
            )


def test_every_process_says_the_same(found):
    for name in PREDICTED:
        for answer in found[1:]:
            assert torch.equal(answer[name]["probs"], found[0][name]["probs"])


def test_one_process_alone_may_print_a_prediction(found):
    assert "correlation" in found[0]["alone"]["line"]


def test_a_copied_model_goes_on(found):
    copied, original = found[0]["alone"]["copied"]
    assert copied == original


def test_a_loss_over_no_examples_is_zero(found):
    assert found[0]["alone"]["empty"] == 0


def test_parameters_may_be_set_as_those_of_any_module(found):
    assert [len(answer["alone"]["bias"]) for answer in found] == [3, 3, 3, 2]
    assert all((answer["alone"]["bias"] == -10).all() for answer in found)


def test_the_weights_of_a_linear_layer_go_in(found):
    for answer in found:
        torch.testing.assert_close(*answer["alone"]["from linear"])


def test_a_prediction_of_the_top_classes_moves_little(found):
    top_k, normals = 2, 3
    numbers = B * (2 * S + 2 + top_k + top_k * normals)  # normalisers, entropies, probabilities, covariance
    for answer in found:
        assert answer["alone"]["traffic"] == (8 * (numbers + B * top_k), 6)


def test_half_precision(found):
    losses = {answer["alone"]["half"] for answer in found}
    ((half, exact),) = losses
    assert half == pytest.approx(exact, rel=0.02)
