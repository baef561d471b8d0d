import pytest
import torch
import torch.nn.functional as F

from hetxl.functional import (
    IGNORE_INDEX,
    Affine,
    LogitDistribution,
    Targets,
    Weights,
    check_targets,
    reference,
)
from hetxl.functional.targets import coefficients, logit_losses, softmax_losses

BATCH, K = torch.Size([3]), 5


def check(targets, link="softmax"):
    return check_targets(targets, BATCH, K, link)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_of_any_integer_type(dtype):
    targets = check(torch.tensor([0, 4, 2], dtype=dtype))
    assert targets.dense is None
    assert targets.ids is not None
    assert targets.ids.dtype == torch.int64
    assert targets.ids.tolist() == [0, 4, 2]


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_rows_of_any_dtype_become_floating_point(link, dtype):
    targets = check(torch.eye(5)[:3].to(dtype), link)
    assert targets.ids is None
    assert targets.dense is not None
    assert targets.dense.is_floating_point()


def test_the_ignored_id_is_allowed():
    assert check(torch.tensor([0, IGNORE_INDEX, 1])).ids is not None


def test_another_id_can_be_ignored_too():
    targets = check_targets(torch.tensor([0, 255, 1]), BATCH, K, "softmax", ignore_index=255)
    assert targets.ids.tolist() == [0, IGNORE_INDEX, 1]


@pytest.mark.parametrize("bad", [5, -1, 99])
def test_class_ids_out_of_range_raise(bad):
    with pytest.raises(ValueError, match=rf"class id {bad}; allowed are 0 to 4"):
        check(torch.tensor([0, bad, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_ids_that_are_no_integers(dtype):
    with pytest.raises(TypeError, match=r"class ids must be integers, found dtype"):
        check(torch.tensor([0.0, 1.5, 1.0]).to(dtype))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1), (), (3, 5, 1)])
def test_shapes_that_fit_neither_form(shape):
    with pytest.raises(ValueError, match=r"class ids of shape \[3\] or one row of 5 values .* \[3, 5\]; found shape"):
        check(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(("link", "bad"), [("softmax", -0.1), ("sigmoid", 2.0)])
def test_rows_outside_zero_and_one(link, bad):
    rows = torch.zeros(3, 5)
    rows[1, 2] = bad
    with pytest.raises(ValueError, match=rf"must lie in \[0, 1\], found {bad:g}"):
        check(rows, link)


def test_targets_of_another_type_raise():
    with pytest.raises(TypeError, match="targets must be a tensor, lists of class ids or LabelLists, found str"):
        check_targets("cat", BATCH, K, "sigmoid")


@pytest.mark.parametrize(
    "targets",
    [
        [[0, 3], [], [2]],
        (torch.tensor([0, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([2])),
        torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).float().to_sparse(),
    ],
)
def test_lists_of_labels_in_every_form(targets):
    lists = check(targets, "sigmoid").lists
    assert lists is not None
    assert lists.dense(K).tolist() == [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]


def test_soft_labels_in_a_sparse_tensor():
    soft = torch.tensor([[0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0.25, 0, 0]])
    assert torch.equal(check(soft.to_sparse(), "sigmoid").lists.dense(K), soft)


def test_lists_that_do_not_fit():
    with pytest.raises(ValueError, match="targets holds lists for 2 examples and features has 3"):
        check([[1], [2]], "sigmoid")
    with pytest.raises(ValueError, match="class id 5; allowed are 0 to 4"):
        check([[1], [5], []], "sigmoid")
    with pytest.raises(ValueError, match=r"sparse tensor must have shape \[3, 5\], found \[3, 4\]"):
        check(torch.zeros(3, 4).to_sparse(), "sigmoid")
    with pytest.raises(TypeError, match='for link="softmax" give class ids'):
        check([[1], [2], [3]])


def test_the_meta_device_is_not_looked_at():
    assert check(torch.zeros(3, dtype=torch.int64, device="meta")).ids is not None


def test_targets_are_checked_under_compile():
    compiled = torch.compile(lambda targets: (check(targets).ids, 1), backend="eager")
    assert compiled(torch.tensor([0, IGNORE_INDEX, 4]))[0].tolist() == [0, IGNORE_INDEX, 4]
    for bad in (K, -1):
        with pytest.raises(ValueError, match=f"class id {bad}; allowed are 0 to 4"):
            compiled(torch.tensor([0, bad, 1]))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], found 2"):
        compiled(torch.full((3, K), 2.0))


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
    checked = Targets(dense=targets) if soft else Targets(ids=targets)
    actual = loss(logits, checked, reduction=reduction, classes=classes, smoothing=smoothing)
    torch.testing.assert_close(actual, expected)


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
    actual = softmax_losses(log_probs, targets, weights)
    torch.testing.assert_close(actual, expected)
    factor = torch.rand(2, 3, dtype=torch.float64)
    gradients = [torch.autograd.grad((losses * factor).sum(), log_probs)[0] for losses in (actual, expected)]
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
    actual = logit_losses(logits, targets, weights)
    torch.testing.assert_close(actual, expected)
    factor = torch.rand(shape, dtype=torch.float64)
    leaves = [logits, *([dense] if soft else []), *([classes] if weighted == "with gradients" else [])]
    gradients = [torch.autograd.grad((losses * factor).sum(), leaves) for losses in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_example_weights_give_the_weighted_mean():
    logits, ids = torch.randn(4, K), torch.tensor([0, 1, 2, 3])
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5])
    each = loss(logits, Targets(ids=ids), reduction="none")
    torch.testing.assert_close(loss(logits, Targets(ids=ids), example=weight), (each * weight).sum() / weight.sum())
    torch.testing.assert_close(loss(logits, Targets(ids=ids), reduction="none", example=weight), each * weight)


def test_class_weights_of_the_sigmoid_weigh_binary_cross_entropies():
    logits, labels, classes = torch.randn(4, K), torch.randint(2, (4, K)).float(), torch.rand(K)
    actual = loss(logits, Targets(dense=labels), "sigmoid", classes=classes)
    expected = F.binary_cross_entropy_with_logits(logits, labels, weight=classes, reduction="sum") / 4
    torch.testing.assert_close(actual, expected)


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
