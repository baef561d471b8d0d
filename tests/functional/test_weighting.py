import pytest
import torch
import torch.nn.functional as F

from hetxl.functional import IGNORE_INDEX, Affine, LogitDistribution, Targets, Weights, reference
from hetxl.functional.weighting import coefficients, logit_losses, softmax_losses

K = 5


def loss(logits, targets, link="softmax", reduction="mean", **weights):
    """The reference loss of given logits [B, K]."""
    distribution = LogitDistribution(logits, Affine(torch.eye(K, dtype=logits.dtype)))
    weights = Weights(**weights)
    weights.check(logits.shape[:-1], K, link)
    return reference.mc_nll(
        distribution, None, targets, temperature=1.0, link=link, reduction=reduction, weights=weights
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_options_of_torchs_cross_entropy_mean_the_same(soft, weighted, smoothing, reduction):
    torch.manual_seed(0)
    logits = torch.randn(6, K, dtype=torch.float64)
    classes = torch.rand(K, dtype=torch.float64) if weighted else None
    targets = (
        torch.randn(6, K, dtype=torch.float64).softmax(-1) if soft else torch.tensor([0, 1, 4, IGNORE_INDEX, 2, 2])
    )
    expected = F.cross_entropy(logits, targets, weight=classes, label_smoothing=smoothing, reduction=reduction)
    given = Targets(dense=targets) if soft else Targets(ids=targets)
    found = loss(logits, given, reduction=reduction, classes=classes, smoothing=smoothing)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_losses_without_a_matrix_of_coefficients_are_the_same(soft, weighted, smoothing):
    torch.manual_seed(0)
    log_probs = torch.randn(2, 3, K, dtype=torch.float64).log_softmax(-1).requires_grad_()
    weights = Weights(classes=torch.rand(K) if weighted else None, smoothing=smoothing)
    dense = torch.randn(2, 3, K).softmax(-1)
    targets = Targets(dense=dense) if soft else Targets(ids=torch.tensor([[0, 1, 4], [3, 2, 2]]))
    expected = -(coefficients(targets, weights, K, log_probs) * log_probs).sum(-1)
    found = softmax_losses(log_probs, targets, weights)
    torch.testing.assert_close(found, expected)
    factor = torch.rand(2, 3, dtype=torch.float64)
    gradients = [torch.autograd.grad((losses * factor).sum(), log_probs)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(2, 3), (6,), (), (0,)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", ["no", "yes", "with gradients"])
@pytest.mark.parametrize("soft", [False, True])
def test_losses_of_logits_are_those_of_their_log_probabilities(soft, weighted, smoothing, shape):
    torch.manual_seed(0)
    logits = torch.randn(*shape, K, dtype=torch.float64, requires_grad=True)
    classes = None if weighted == "no" else torch.rand(K, requires_grad=weighted == "with gradients")
    weights = Weights(classes=classes, smoothing=smoothing)
    dense = torch.randn(*shape, K).softmax(-1).requires_grad_()
    targets = Targets(dense=dense) if soft else Targets(ids=torch.randint(K, shape))
    expected = softmax_losses(logits.log_softmax(-1), targets, weights)
    found = logit_losses(logits, targets, weights)
    torch.testing.assert_close(found, expected)
    factor = torch.rand(shape, dtype=torch.float64)
    wanted = [logits, *([dense] if soft else []), *([classes] if weighted == "with gradients" else [])]
    gradients = [torch.autograd.grad((losses * factor).sum(), wanted) for losses in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_example_weights_give_the_weighted_mean():
    logits, ids = torch.randn(4, K), torch.tensor([0, 1, 2, 3])
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5])
    each = loss(logits, Targets(ids=ids), reduction="none")
    torch.testing.assert_close(loss(logits, Targets(ids=ids), example=weight), (each * weight).sum() / weight.sum())
    torch.testing.assert_close(loss(logits, Targets(ids=ids), reduction="none", example=weight), each * weight)


def test_class_weights_of_the_sigmoid_weigh_binary_cross_entropies():
    logits, labels, classes = torch.randn(4, K), torch.randint(2, (4, K)).float(), torch.rand(K)
    found = loss(logits, Targets(dense=labels), "sigmoid", classes=classes)
    expected = F.binary_cross_entropy_with_logits(logits, labels, weight=classes, reduction="sum") / 4
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("weights", "link", "message"),
    [
        ({"example": torch.ones(3)}, "softmax", r"weight must have shape \[4\], found \[3\]"),
        ({"classes": torch.ones(4)}, "softmax", r"class_weight must have shape \[5\], found \[4\]"),
        ({"smoothing": 1.0}, "softmax", r"label_smoothing must be in \[0, 1\), found 1.0"),
        ({"smoothing": 0.1}, "sigmoid", 'label_smoothing=0.1 is for link="softmax"'),
    ],
)
def test_weights_that_do_not_fit(weights, link, message):
    with pytest.raises(ValueError, match=message):
        Weights(**weights).check(torch.Size([4]), K, link)
