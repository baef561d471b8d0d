"""Retrieved classes: exact when all are near, unbiased otherwise, and an index that never falls behind unnoticed."""

import copy
import pickle
import statistics

import pytest
import torch

from hetxl import DetHead, HetHead, HetXLHead
from hetxl.classifiers import LinearClassifier
from hetxl.classifiers.retrieved import RetrievedClassifier
from hetxl.functional import LabelLists, Targets
from hetxl.nn.classifier import NoisyFeatures

B, D, K = 6, 8, 400
DOUBLE = {"dtype": torch.float64}


def heads(
    link="softmax", kind=HetXLHead, bias=True, classes=K, features=D, noise_init=0.1, dtype=torch.float64, **more
):
    """One over all classes and one over retrieved ones, with the same parameters: rows in clusters, features near them.

    Returns them with 200 features and their classes.
    """
    torch.manual_seed(0)
    options = {"link": link, "temperature": 1.4, "dtype": dtype}
    if kind is HetXLHead:
        options |= {"rank": 3, "noise_init": noise_init}
    linear = LinearClassifier(features, classes, bias=bias, dtype=dtype)
    centres = torch.randn(classes // 20, features, dtype=dtype)
    rows = centres[torch.randint(len(centres), (classes,))] + 0.5 * torch.randn(classes, features, dtype=dtype)
    linear.weight.data.copy_(12 / features * rows)
    if link == "sigmoid" and linear.bias is not None:
        linear.bias.data.sub_(14.0)
    whole = kind(features, classes, classifier=linear, **options)
    retrieved = kind(
        features, classes, classifier=RetrievedClassifier(features, classes, bias=bias, dtype=dtype, **more), **options
    )
    retrieved.load_state_dict(whole.state_dict())
    targets = torch.randint(classes, (200,))
    return whole, retrieved, rows[targets] + 0.4 * torch.randn(200, features, dtype=dtype), targets


def few(head, features, targets):
    """The active classes of a batch, and what each stands for."""
    noisy = NoisyFeatures(features, None, None, None, 1.0, "softmax", generator=torch.Generator().manual_seed(0))
    return head.classifier.active(noisy, Targets(ids=targets))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [{"neighbours": K}, {"neighbours": K - 1, "others": 20_000}])
def test_the_loss_of_all_classes_when_all_are_near(link, options):
    whole, retrieved, features, targets = heads(link, **options)
    features, targets = features[:B].requires_grad_(), targets[:B]
    noise = torch.randn(B, 4, 4, **DOUBLE)
    weighing = {"weight": torch.rand(B, **DOUBLE), "class_weight": torch.rand(K, **DOUBLE), "noise": noise}
    results = []
    for head in (whole, retrieved):
        features.grad = None
        loss = head.loss(features, targets, **weighing)
        loss.backward()
        results.append([loss, features.grad.clone(), *(parameter.grad for parameter in head.parameters())])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)
    if link == "sigmoid":
        lists = LabelLists(torch.tensor([0, 0, 3, 5]), torch.tensor([1, 7, 2, 22]), None, B)
        torch.testing.assert_close(*(head.loss(features, lists, noise=noise) for head in (whole, retrieved)))


def test_the_sum_over_all_classes_is_estimated_without_bias():
    _, retrieved, features, targets = heads(neighbours=5, others=40)
    features, targets = features[:B], targets[:B]
    classifier, generator = retrieved.classifier, torch.Generator().manual_seed(0)
    logits = classifier(features).detach()
    noisy = NoisyFeatures(features, None, None, None, 1.0, "softmax", generator=generator)
    estimates = []
    for _ in range(400):
        classes, offsets = classifier.active(noisy, Targets(ids=targets))
        estimates.append((logits[:, classes] + offsets).exp().sum(-1))
    estimates, expected = torch.stack(estimates), logits.exp().sum(-1)
    error = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - expected).abs() < 4.5 * error).all()
    assert (estimates.std(0) > 0).all()


def test_labels_and_neighbours_stand_for_themselves():
    _, retrieved, features, _ = heads(neighbours=5, others=30)
    targets = torch.tensor([3, 3, 21, -100])
    classes, offsets = few(retrieved, features[:4], targets)
    near = (retrieved.classifier(features[:4]))[targets != -100].topk(5).indices
    surely = torch.cat((torch.tensor([3, 21]), near.flatten())).unique()
    assert (classes[1:] > classes[:-1]).all()
    assert set(classes[offsets == 0].tolist()) == set(surely.tolist())
    assert len(classes) > len(surely)
    # What the example that is left out is near to does not matter.
    assert len(surely) <= 2 + 3 * 5


def test_near_classes_lower_the_variance():
    deviations = []
    for neighbours in (1, 20):
        _, retrieved, features, targets = heads(kind=DetHead, neighbours=neighbours, others=40)
        draws = [torch.Generator().manual_seed(seed) for seed in range(30)]
        losses = [retrieved.loss(features[:B], targets[:B], generator=generator).item() for generator in draws]
        deviations.append(statistics.stdev(losses))
    assert 0 < deviations[1] < 0.5 * deviations[0]


@pytest.mark.parametrize("kind", [HetXLHead, DetHead])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_predictions_agree_with_those_of_all_classes(link, kind):
    options = {"classes": 4000, "features": 32, "candidates": 200, "dtype": torch.float32}
    whole, retrieved, features, _ = heads(link, kind, **options)
    whole.eval()
    retrieved.eval()
    calls = {"top_k": 5, "num_samples": 32, "tolerance": 1e-3}
    noise = {} if kind is DetHead else {"noise": torch.randn(200, 32, 4)}
    first, second = (head.predict(features, **calls, **noise) for head in (retrieved, whole))
    assert retrieved.classifier.staleness == 0
    assert (first.top_class == second.top_class).double().mean() >= 0.99
    assert (first.probs - second.probs).abs().max() < 0.02
    assert (first.probs - second.probs).abs().mean() < 0.002
    relative = 0.05 * second.entropy.mean()
    assert (first.entropy - second.entropy).abs().mean() < relative
    assert (first.expected_entropy - second.expected_entropy).abs().mean() < relative
    assert first.left_out.shape == (200,)
    assert ((first.left_out > 0) & (first.left_out < 1)).all()
    assert first.left_out.mean() < 0.2


def test_predictions_keep_the_shape_of_the_batch_and_repeat_to_the_bit():
    options = {"classes": 2000, "candidates": 50, "others": 100}
    _, retrieved, features, _ = heads(**options)
    retrieved.eval()
    noise = torch.randn(200, 8, 4, **DOUBLE)
    flat = retrieved.predict(features, top_k=3, noise=noise)
    again = retrieved.predict(features, top_k=3, noise=noise)
    assert torch.equal(flat.probs, again.probs)
    shaped = retrieved.predict(features.view(20, 10, D), top_k=3, noise=noise.view(20, 10, 8, 4))
    torch.testing.assert_close(shaped.probs, flat.probs.view(20, 10, 3))
    assert shaped.entropy.shape == (20, 10)
    single = retrieved.predict(features[0], top_k=3, noise=noise[0])
    torch.testing.assert_close(single.probs, flat.probs[0])
    assert single.entropy.shape == ()
    assert retrieved.predict(features[:0], top_k=3).probs.shape == (0, 3)
    assert retrieved.predict(features[:4], top_k=40).probs.shape == (4, 40)


def test_all_classes_where_they_are_asked_for():
    whole, retrieved, features, targets = heads(classes=2000, candidates=50, others=100)
    whole.eval()
    retrieved.eval()
    noise = torch.randn(200, 8, 4, **DOUBLE)
    for options in ({}, {"top_k": 5, "tolerance": 0.0}, {"top_k": 5, "method": "mean_field"}):
        first, second = (head.predict(features, noise=noise, **options) for head in (retrieved, whole))
        torch.testing.assert_close(first.log_probs, second.log_probs)
    for options in ({}, {"label_smoothing": 0.1}):
        torch.testing.assert_close(
            *(head.loss(features, targets, noise=noise, **options) for head in (whole, retrieved))
        )
    assert retrieved.classifier.staleness is None
    small = heads(candidates=300, others=100)
    torch.testing.assert_close(
        *(head.eval().predict(small[2], top_k=2, method="deterministic").probs for head in small[:2])
    )


def test_sparse_gradients_are_the_dense_ones():
    dense_gradients = []
    for sparse in (False, True):
        _, retrieved, features, targets = heads(neighbours=4, others=9, sparse=sparse)
        noise = torch.randn(B, 4, 4, generator=torch.Generator().manual_seed(1), **DOUBLE)
        loss = retrieved.loss(features[:B], targets[:B], noise=noise, generator=torch.Generator().manual_seed(0))
        loss.backward()
        gradients = [retrieved.classifier.weight.grad, retrieved.classifier.bias.grad]
        assert all(gradient.is_sparse == sparse for gradient in gradients)
        dense_gradients.append([gradient.to_dense() for gradient in gradients])
    torch.testing.assert_close(*dense_gradients)
    assert (dense_gradients[0][0] == 0).all(-1).any()


def test_logits_of_a_few_classes():
    _, retrieved, features, _ = heads(sparse=True)
    classes = torch.randint(K, (2, 100, 3))
    features = features.view(2, 100, D)
    expected = retrieved.classifier(features).gather(-1, classes)
    torch.testing.assert_close(retrieved.classifier.logits_of(features, classes), expected)


def test_recall_on_clustered_rows():
    _, retrieved, features, _ = heads(classes=1000)
    classifier = retrieved.eval().classifier
    assert classifier.recall(features, 10) >= 0.95
    assert classifier.recall(features.view(10, 20, D), 1) >= 0.95
    assert 0 < classifier.recall(torch.randn(20, D, **DOUBLE), k=5) <= 1


def test_training_bounds_the_staleness_of_the_index():
    _, retrieved, features, targets = heads(classes=1000, neighbours=8, others=50, max_stale=4)
    classifier = retrieved.classifier
    optimiser = torch.optim.SGD(retrieved.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3)
    assert classifier.staleness is None
    ages = []
    for _ in range(11):
        optimiser.zero_grad()
        loss = retrieved.loss(features[:32], targets[:32])
        ages.append(classifier.staleness)
        loss.backward()
        optimiser.step()
    assert ages == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert classifier.recall(features, 10) >= 0.9
    # Two losses before one step, as of accumulated gradients, are no step.
    for _ in range(3):
        retrieved.loss(features[:32], targets[:32])
    assert classifier.staleness == 1
    classifier.sync(features)
    assert classifier.staleness == 0
    # Evaluation takes nothing but W as it is.
    optimiser.step()
    assert classifier.staleness == 1
    classifier.eval().recall(features)
    assert classifier.staleness == 0


def test_a_new_row_is_found_after_every_kind_of_change():
    options = {"classes": 2000, "candidates": 50, "others": 100, "kind": DetHead}
    _, retrieved, features, _ = heads(**options)
    retrieved.eval()

    def first():
        return retrieved.predict(features[:1], top_k=1).top_class.item()

    with torch.no_grad():
        first()
        retrieved.get_parameter("classifier.weight")[77] = 5 * features[0]
        assert first() == 77
        retrieved.get_parameter("classifier.bias")[78] = 1e6
        assert first() == 78
        other = heads(**options)[1]
        other.get_parameter("classifier.weight")[79] = 9 * features[0]
    retrieved.train()
    retrieved.load_state_dict(other.state_dict())
    assert retrieved.classifier.staleness is None
    assert first() == 79
    retrieved.to(torch.float32)
    assert retrieved.classifier.staleness is None
    features = features.float()
    assert first() == 79
    retrieved.to(torch.float32)
    assert retrieved.classifier.staleness == 0
    retrieved.classifier.reset_parameters()
    assert retrieved.classifier.staleness is None


def test_copies_rebuild_the_index_and_state_dict_leaves_it_out():
    _, retrieved, features, _ = heads(classes=2000, candidates=50, others=100)
    retrieved.eval().predict(features, top_k=2, num_samples=2)
    assert set(retrieved.classifier.state_dict()) == {"weight", "bias"}
    noise = torch.randn(4, 4, **DOUBLE)
    expected = retrieved.predict(features, top_k=2, noise=noise)
    for other in (copy.deepcopy(retrieved), pickle.loads(pickle.dumps(retrieved))):
        assert other.classifier.staleness is None
        assert torch.equal(other.predict(features, top_k=2, noise=noise).indices, expected.indices)
    assert retrieved.classifier.staleness == 0


def test_det_over_retrieved_classes_learns():
    torch.manual_seed(0)
    classifier = RetrievedClassifier(8, 300, neighbours=4, others=10, max_stale=20)
    head = DetHead(8, 300, classifier=classifier)
    targets = torch.randint(300, (128,))
    features = torch.randn(300, 8)[targets]
    optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
    before = head.eval().loss(features, targets).item()
    head.train()
    for _ in range(40):
        optimiser.zero_grad()
        head.loss(features, targets).backward()
        optimiser.step()
    assert head.eval().loss(features, targets).item() < before / 2


def test_retrieved_head_works_under_autocast():
    _, retrieved, features, targets = heads(classes=2000, candidates=50, others=100, dtype=torch.float32)
    noise = torch.randn(200, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = retrieved.loss(features, targets, noise=noise)
        prediction = retrieved.eval().predict(features, top_k=1, noise=noise)
    assert loss.isfinite()
    assert (prediction.indices == retrieved.predict(features, top_k=1, noise=noise).indices).double().mean() > 0.95


def test_retrieved_head_works_without_a_bias():
    whole, retrieved, features, targets = heads(bias=False, classes=2000, candidates=50, others=100)
    retrieved.loss(features, targets).backward()
    first, second = (head.eval().predict(features, top_k=1, method="deterministic") for head in (whole, retrieved))
    assert (first.top_class == second.top_class).double().mean() >= 0.99


def test_retrieved_classifier_rejects_unsupported_options():
    _, retrieved, features, targets = heads()
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 needs all classes in one process"):
        retrieved.loss(features, targets, label_smoothing=0.1)
    with pytest.raises(ValueError, match="targets must be class ids"):
        retrieved.loss(features, torch.full((200, K), 1 / K, **DOUBLE))
    with pytest.raises(ValueError, match="noise must go through it: use DetHead, or HetXLHead without noise_features"):
        HetHead(D, K, classifier=RetrievedClassifier(D, K))
    with pytest.raises(ValueError, match=r"recall_target must be above 0 and at most 1, found 1\.5"):
        RetrievedClassifier(D, K, recall_target=1.5)
    for name in ("neighbours", "others", "candidates"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, found 0"):
            RetrievedClassifier(D, K, **{name: 0})
    with pytest.raises(ValueError, match="max_stale must be at least 0, found -1"):
        RetrievedClassifier(D, K, max_stale=-1)
    with pytest.raises(ValueError, match="k must be at most the number of classes, 400, found 500"):
        retrieved.classifier.recall(features, k=500)
