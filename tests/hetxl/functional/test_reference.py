"""The plain evaluation against the authors' numbers, in both orders, and its own invariants."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hetxl.functional import IGNORE_INDEX, Affine, LogitDistribution, Targets, check_targets
from hetxl.functional.reference import mc_log_probs, mc_nll, mc_predict
from hetxl.integrations.flax import head_state, import_weights

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
FILES = sorted(path.stem for path in REFERENCE.glob("*.npz"))


def load(name):
    """A head with the weights of a reference file, and the file's arrays as float64 tensors."""
    with np.load(REFERENCE / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file}
    kind = "het-xl" if name.startswith("het_xl") else "het"
    head = import_weights(REFERENCE / f"{name}.npz", kind=kind, link="sigmoid" if "sigmoid" in name else "softmax")
    grads = head_state({key.removeprefix("grad_"): arrays[key] for key in arrays if key.startswith("grad_")})
    return head, arrays, grads


def relative_error(actual, expected):
    """The largest error of any element, relative to that element."""
    return float(((actual - expected).abs() / expected.abs()).detach().max())


def test_eight_reference_files_exist():
    assert len(FILES) == 8


def plain_loss(head, features, targets, noise, order):
    checked = check_targets(targets, features.shape[:-1], head.num_classes, head.link)
    return mc_nll(
        head.logit_distribution(features),
        noise,
        checked,
        temperature=head.temperature(),
        link=head.link,
        order=order,
    )


def fused_loss(head, features, targets, noise, order):
    return head.loss(features, targets, noise=noise, order=order)


@pytest.mark.parametrize("evaluate", [plain_loss, fused_loss])
@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("name", FILES)
def test_reproduces_the_authors_layer(name, order, evaluate):
    head, arrays, grads = load(name)
    features = arrays["features"].requires_grad_()
    noise = torch.cat((arrays["z"], arrays["z0"]), dim=-1)

    assert relative_error(head.temperature(), arrays["tau"]) <= 1e-12
    outputs = head(features, noise=noise, order=order)
    probs = outputs.exp() if head.link == "softmax" else outputs.sigmoid()
    assert relative_error(probs, arrays["probs"]) <= 1e-9
    assert relative_error(head.predict(features, noise=noise, order=order).probs, arrays["probs"]) <= 1e-9

    loss = evaluate(head, features, arrays["targets"], noise, order)
    assert relative_error(loss, arrays["loss"]) <= 1e-9
    loss.backward()
    assert features.grad is not None
    assert relative_error(features.grad, arrays["grad_features"]) <= 1e-9
    parameters = dict(head.named_parameters())
    assert parameters.keys() == grads.keys()
    for key, parameter in parameters.items():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, grads[key]) <= 1e-9, key


def deterministic(logits):
    """A distribution whose mean logits are given."""
    return LogitDistribution(logits, Affine(torch.eye(logits.shape[-1], dtype=logits.dtype)))


@pytest.mark.parametrize("temperature", [0.05, 1.0, 5.0])
def test_loss_without_noise_is_cross_entropy(temperature):
    logits, ids = torch.randn(6, 9, dtype=torch.float64), torch.randint(9, (6,))
    options = {"temperature": temperature, "link": "softmax", "order": "samples"}
    loss = mc_nll(deterministic(logits), None, Targets(ids=ids), **options)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits / temperature, ids))
    soft = torch.rand(6, 9, dtype=torch.float64).softmax(-1)
    loss = mc_nll(deterministic(logits), None, Targets(dense=soft), **options)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits / temperature, soft))


def test_without_noise_the_sigmoid_is_summed_binary_cross_entropy():
    logits = torch.randn(6, 9, dtype=torch.float64)
    labels = torch.randint(2, (6, 9)).double()
    loss = mc_nll(deterministic(logits), None, Targets(dense=labels), temperature=0.7, link="sigmoid", order="samples")
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits / 0.7, labels, reduction="sum") / 6
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_ignored_examples_count_for_nothing(link):
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, IGNORE_INDEX, 3, IGNORE_INDEX])
    options = {"temperature": 1.0, "link": link, "order": "samples"}
    losses = mc_nll(deterministic(logits), None, Targets(ids=ids), reduction="none", **options)
    assert losses[1] == losses[3] == 0
    mean = mc_nll(deterministic(logits), None, Targets(ids=ids), **options)
    torch.testing.assert_close(mean, losses[[0, 2]].mean())
    mean.backward()
    assert logits.grad is not None
    assert torch.all(logits.grad[[1, 3]] == 0)
    assert torch.all(logits.grad[[0, 2]] != 0)


def test_nothing_that_counts_gives_zero():
    logits = torch.randn(3, 5, requires_grad=True)
    ids = torch.full((3,), IGNORE_INDEX)
    loss = mc_nll(deterministic(logits), None, Targets(ids=ids), temperature=1.0, link="softmax", order="samples")
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert torch.all(logits.grad == 0)


def test_predict_entropies_of_a_uniform_prediction():
    logits = torch.zeros(2, 8)
    log_probs, entropy, expected = mc_predict(
        deterministic(logits), None, temperature=1.0, link="softmax", order="samples"
    )
    torch.testing.assert_close(log_probs.exp(), torch.full((2, 8), 1 / 8))
    torch.testing.assert_close(entropy, torch.full((2,), 8.0).log())
    torch.testing.assert_close(expected, entropy)
    _, entropy, _ = mc_predict(deterministic(logits), None, temperature=1.0, link="sigmoid", order="samples")
    torch.testing.assert_close(entropy, 8 * torch.full((2,), 2.0).log())


def test_log_probs_are_normalised():
    log_probs = mc_log_probs(
        deterministic(torch.randn(3, 6) * 30), None, temperature=0.1, link="softmax", order="samples"
    )
    torch.testing.assert_close(log_probs.logsumexp(-1), torch.zeros(3))
