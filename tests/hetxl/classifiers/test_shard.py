"""Labels of a part of the classes, and their logits, against all classes at once."""

import pytest
import torch

from hetxl.classifiers.sharded import fingerprint, label_logits, local_ids, local_labels
from hetxl.functional import Affine, GaussianNoise, LabelLists, Targets
from hetxl.nn.classifier import NoisyFeatures
from support import sharded, sharded_predictions
from support.sharded import run
from support.sharded_predictions import PREDICTED, prediction

B, D, K, R, S = 5, 6, 7, 3, 4
HERE = range(2, 5)

NOISES = {
    "efficient": lambda: GaussianNoise(torch.randn(R, D), torch.randn(B, D), torch.rand(B, D)),
    "low_rank": lambda: GaussianNoise(torch.randn(B, R, D), None, torch.rand(B, D)),
    "full": lambda: GaussianNoise(torch.randn(B, D, D)),
    "diagonal": lambda: GaussianNoise(None, None, torch.rand(B, D), "diagonal"),
}


def test_ids_are_counted_from_the_first_class():
    assert local_ids(torch.tensor([0, 2, 4, 5, -100]), HERE).tolist() == [-1, 0, 2, -1, -1]


@pytest.mark.parametrize("form", ["ids", "dense", "lists"])
def test_labels_of_some_classes_are_those_columns(form):
    dense = torch.zeros(B, K)
    ids = torch.tensor([0, 2, 4, 6, 3])
    dense[torch.arange(B), ids] = 1.0
    targets = Targets(ids=ids) if form == "ids" else Targets(dense=dense)
    if form == "lists":
        dense[1, 5] = dense[1, 3] = 0.5
        targets = Targets(lists=LabelLists.from_sparse(dense.to_sparse()))
    local = local_labels(targets, HERE)
    matrix = local.lists.dense(len(HERE)) if local.dense is None else local.dense
    assert torch.equal(matrix, dense[:, 2:5])


def test_an_ignored_example_has_no_labels():
    local = local_labels(Targets(ids=torch.tensor([3, -100])), HERE)
    assert local.lists.dense(3).tolist() == [[0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [*NOISES, "none"])
def test_label_logits_are_those_of_the_distribution(kind, shared):
    noise = None if kind == "none" else NOISES[kind]()
    z = None if noise is None else torch.randn(*(() if shared else (B,)), S, noise.size)
    affine = Affine(torch.randn(K, D), torch.randn(K))
    noisy = NoisyFeatures(torch.randn(B, D), noise, z, None, 1.7, "softmax")
    ids = torch.tensor([0, 6, -1, 3, 3])
    expected = noisy.through(affine).sample(z) / 1.7  # [B, S, K]
    expected = expected[torch.arange(B), :, ids.clamp(min=0)]
    expected[2] = 0
    torch.testing.assert_close(label_logits(affine, noisy, ids), expected)


def test_the_gradient_of_few_rows_is_sparse():
    affine = Affine(torch.randn(K, D, requires_grad=True))
    noisy = NoisyFeatures(torch.randn(B, D), None, None, None, 1.0, "softmax")
    label_logits(affine, noisy, torch.tensor([0, 1, 1, 6, -1])).sum().backward()
    assert affine.weight.grad.is_sparse
    expected = torch.zeros(K, D).index_add_(0, torch.tensor([0, 1, 1, 6]), noisy.features[:4])
    torch.testing.assert_close(affine.weight.grad.to_dense(), expected)


def test_logits_are_summed_in_float32():
    affine = Affine(torch.randn(K, D).bfloat16())
    noisy = NoisyFeatures(torch.randn(B, D).bfloat16(), None, None, None, 1.0, "softmax")
    assert label_logits(affine, noisy, torch.arange(B)).dtype == torch.float32


def batch(**changes):
    torch.manual_seed(0)
    parts = {"features": torch.randn(B, D), "z": torch.randn(B, S, R + 1), "noise": NOISES["efficient"]()} | changes
    return NoisyFeatures(parts["features"], parts["noise"], parts["z"], None, torch.tensor(1.0), "softmax")


def differ(first, second):
    values, tolerances = fingerprint(*first)
    others, _ = fingerprint(*second)
    return bool(((values - others).abs() > tolerances).any())


def test_fingerprints_tell_batches_apart():
    ids = Targets(ids=torch.arange(B))
    same = batch(), ids
    assert not differ(same, (batch(features=batch().features * 1.001), ids))  # another machine's rounding
    assert differ(same, (batch(), Targets(ids=torch.arange(B).flip(0))))
    assert differ(same, (batch(features=torch.randn(B, D)), ids))
    assert differ(same, (batch(z=torch.randn(B, S, R + 1)), ids))
    assert differ(same, (batch(noise=GaussianNoise(torch.randn(R, D), torch.rand(B, D), torch.rand(B, D))), ids))
    lists = [Targets(lists=LabelLists.from_lists([[1], [index]])) for index in (2, 3)]
    assert differ((batch(), lists[0]), (batch(), lists[1]))
    rows = [Targets(dense=torch.rand(B, K)) for _ in range(2)]
    assert differ((batch(), rows[0]), (batch(), rows[1]))


def test_the_fingerprint_of_an_empty_batch():
    values, _ = fingerprint(batch(features=torch.zeros(0, D)), Targets(ids=torch.zeros(0, dtype=torch.int64)))
    assert values.isfinite().all()


RANKS = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run(sharded_predictions.predictions, RANKS, tmp_path_factory.mktemp("predictions"))


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_are_those_of_one_process(answers, name):
    expected = prediction(name, plain=True)
    for answer in answers:
        assert answer[name].keys() == expected.keys()
        for what, value in expected.items():
            if value is None:
                assert answer[name][what] is None, what
                continue
            message = f"{what} of {name}"
            torch.testing.assert_close(
                answer[name][what], value, rtol=1e-10, atol=1e-12, msg=lambda text, at=message: f"{at}: {text}"
            )


def test_predictions_are_equal_on_every_process(answers):
    for name in PREDICTED:
        for answer in answers[1:]:
            assert torch.equal(answer[name]["probs"], answers[0][name]["probs"])


def test_one_process_alone_may_print_a_prediction(answers):
    assert "correlation" in answers[0]["alone"]["line"]


def test_copied_model_equals_the_original(answers):
    copied, original = answers[0]["alone"]["copied"]
    assert copied == original


def test_a_loss_over_no_examples_is_zero(answers):
    assert answers[0]["alone"]["empty"] == 0


def test_parameters_may_be_set_as_those_of_any_module(answers):
    assert [len(answer["alone"]["bias"]) for answer in answers] == [3, 3, 3, 2]
    assert all((answer["alone"]["bias"] == -10).all() for answer in answers)


def test_weights_of_a_linear_layer_can_be_loaded(answers):
    for answer in answers:
        torch.testing.assert_close(*answer["alone"]["from linear"])


def test_a_prediction_of_the_top_classes_moves_little(answers):
    top_k, normals = 2, 3
    numbers = sharded.B * (
        2 * sharded.S + 2 + top_k + top_k * normals
    )  # normalisers, entropies, probabilities, covariance
    for answer in answers:
        assert answer["alone"]["traffic"] == (8 * (numbers + sharded.B * top_k), 6)


def test_half_precision_loss_is_near_the_exact_loss(answers):
    losses = {answer["alone"]["half"] for answer in answers}
    ((half, exact),) = losses
    assert half == pytest.approx(exact, rel=0.02)
