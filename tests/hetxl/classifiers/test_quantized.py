"""W in fewer bytes: near the full one, and no more memory than it says."""

import pytest
import torch
from torch import nn

from hetxl import DetHead, HetXLHead
from hetxl.classifiers import AdaptiveClassifier, LinearClassifier, QuantizedClassifier

D, K = 32, 500
ERRORS = {"bf16": 2**-8, "int8": 1 / 127}


def setting(weight, link="softmax", **options):
    torch.manual_seed(0)
    full = HetXLHead(D, K, rank=3, link=link, classifier=LinearClassifier(D, K, **options))
    small = HetXLHead(D, K, rank=3, link=link, classifier=QuantizedClassifier(full.classifier, weight))
    small.covariance.load_state_dict(full.covariance.state_dict())
    return full, small, torch.randn(6, D)


@pytest.mark.parametrize("weight", ERRORS)
def test_rows_are_near_those_of_the_full_weight(weight):
    full, small, _ = setting(weight)
    expected = full.classifier.weight.detach()
    rows = small.classifier.affine().weight[slice(3, 90)]
    assert rows.dtype == torch.float32
    error = (rows - expected[3:90]).abs()
    assert (error <= ERRORS[weight] * expected[3:90].abs().amax(-1, keepdim=True)).all()
    assert error.max() > 0
    chosen = torch.tensor([[4, 499], [0, 7]])
    torch.testing.assert_close(
        small.classifier.affine().weight[chosen], small.classifier.affine().weight[slice(None)][chosen]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_of_a_weight_in_half_precision(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(D, K, dtype=dtype)
    nn.init.normal_(linear.weight, std=0.05)
    classifier = QuantizedClassifier(linear, "int8")
    assert classifier.codes.min() >= -127
    rows = classifier.affine().weight[slice(None)]
    assert rows.dtype == dtype
    expected = linear.weight.detach().float()
    error = (rows.float() - expected).abs()
    assert (error <= (1 / 127 + torch.finfo(dtype).eps) * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("weight", ERRORS)
def test_predictions_are_near_those_of_the_full_weight(weight, link, normalized):
    full, small, features = setting(weight, link, normalized=normalized)
    noise = torch.randn(6, 40, 4)
    for top_k in (None, 5):
        expected, prediction = (head.predict(features, top_k, noise=noise) for head in (full, small))
        torch.testing.assert_close(prediction.probs, expected.probs, rtol=0.1, atol=1e-4)
    assert prediction.covariance.shape == (6, 5, 5)
    whole = small.predict(features, noise=noise)
    assert whole.logit_variance.shape == (6, K)
    torch.testing.assert_close(small(features, noise=noise).shape, (6, K))
    logits = small.classifier(features)
    torch.testing.assert_close(logits, full.classifier(features), rtol=0, atol=0.2)
    chosen = torch.randint(K, (6, 3))
    torch.testing.assert_close(small.classifier.logits_of(features, chosen), logits.gather(-1, chosen))


def test_int8_classifier_takes_a_quarter_of_the_memory_and_round_trips():
    full, small, features = setting("int8")
    size = sum(value.numel() * value.element_size() for value in small.classifier.buffers())
    assert size < 0.25 * full.classifier.weight.numel() * 4 + 8 * K + 1
    other = QuantizedClassifier(LinearClassifier(D, K), "int8")
    other.load_state_dict(small.classifier.state_dict())
    assert torch.equal(other(features), small.classifier(features))


def test_log_probabilities_without_gradients():
    for link in ("softmax", "sigmoid"):
        _, small, features = setting("int8", link)
        noise = torch.randn(6, 40, 4)
        probs = small.predict(features, noise=noise).probs
        expected = probs.log() if link == "softmax" else probs.logit()
        torch.testing.assert_close(small(features, noise=noise), expected, rtol=1e-3, atol=1e-3)


def test_quantized_classifier_rejects_losses_and_invalid_options():
    with pytest.raises(ValueError, match="cannot be trained; compute losses with the original classifier"):
        setting("int8")[1].loss(torch.randn(1, D), torch.tensor([0]))
    with pytest.raises(ValueError, match="weight must be"):
        QuantizedClassifier(LinearClassifier(D, K), "int4")
    with pytest.raises(TypeError, match=r"must be an nn\.Linear or a LinearClassifier, found AdaptiveClassifier"):
        QuantizedClassifier(AdaptiveClassifier(D, K, [5]))
    head = DetHead(D, K, classifier=QuantizedClassifier(LinearClassifier(D, K, bias=False), "bf16"))
    assert head.predict(torch.randn(2, D), 3).probs.shape == (2, 3)


@pytest.mark.parametrize("weight", ERRORS)
def test_logits_of_confident_labels_are_finite(weight):
    full, small, features = setting(weight, "sigmoid")
    with torch.no_grad():
        full.classifier.weight.mul_(300)
    small.classifier = QuantizedClassifier(full.classifier, weight)
    noise = torch.randn(6, 40, 4)
    log_probs, expected = small(features, noise=noise), full(features, noise=noise).detach()
    assert expected.abs().max() > 100
    torch.testing.assert_close(log_probs, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weight", ERRORS)
def test_quantized_classifier_accepts_nn_linear(weight, bias):
    layer, classifier = nn.Linear(D, K, bias=bias), LinearClassifier(D, K, bias=bias)
    classifier.load_state_dict(layer.state_dict())
    features = torch.randn(6, D)
    quantized, expected = (QuantizedClassifier(each, weight) for each in (layer, classifier))
    assert (quantized.in_features, quantized.num_classes) == (D, K)
    assert torch.equal(quantized(features), expected(features))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weight", ERRORS)
def test_a_cast_of_the_head_reaches_its_rows_but_not_its_codes(weight, dtype):
    _, small, features = setting(weight)
    noise = torch.randn(6, 40, 4)
    expected, codes = small.predict(features, noise=noise).probs, small.classifier.codes.clone()
    small.to(dtype)
    assert small.classifier.dtype == small.classifier.affine().weight[slice(2)].dtype == dtype
    assert small.classifier.codes.dtype == codes.dtype
    assert torch.equal(small.classifier.codes, codes)
    probs = small.predict(features.to(dtype), noise=noise.to(dtype)).probs
    torch.testing.assert_close(probs, expected, rtol=0.1, atol=1e-4, check_dtype=False)
    with pytest.raises(TypeError, match=rf"features have dtype torch.float32 but the head has {dtype}"):
        small(features)
    state = small.classifier.state_dict()
    small.to("meta").to_empty(device="cpu").classifier.load_state_dict(state)
    assert torch.equal(small.classifier.codes, codes)


@pytest.mark.parametrize("weight", ERRORS)
def test_top_classes_of_many_are_those_of_the_whole_prediction(weight):
    torch.manual_seed(0)
    head = HetXLHead(D, 2048, rank=3, classifier=QuantizedClassifier(LinearClassifier(D, 2048), weight))
    features = torch.randn(4, D)
    whole, top = head.predict(features), head.predict(features, top_k=3)
    torch.testing.assert_close(top.probs, whole.probs.topk(3).values, atol=1e-3, rtol=0)
