"""Sampled softmax: exact when everything is drawn, unbiased otherwise, all classes at evaluation."""

import math

import pytest
import torch

from hetxl import DetHead, HetHead, HetXLHead
from hetxl.classifiers import LinearClassifier, SampledClassifier
from hetxl.classifiers.linear import gather_rows
from hetxl.classifiers.sampled import NEGATIVES, Active, among, labels_of, with_drawn
from hetxl.functional import LabelLists, Targets

B, D, K = 6, 5, 23
DOUBLE = {"dtype": torch.float64}
COUNTS = torch.arange(K, 0, -1)


def heads(link="softmax", **options):
    """One over all classes and one over sampled ones, with the same parameters."""
    torch.manual_seed(0)
    shared = {"rank": 2, "link": link, "temperature": 1.4, **DOUBLE}
    whole = HetXLHead(D, K, classifier=LinearClassifier(D, K, **DOUBLE), **shared)
    sampled = HetXLHead(D, K, classifier=SampledClassifier(D, K, **options, **DOUBLE), **shared)
    sampled.load_state_dict(whole.state_dict())
    features, noise = torch.randn(B, D, **DOUBLE), torch.randn(B, 4, 3, **DOUBLE)
    return whole, sampled, features, torch.randint(K, (B,)), noise


def everything(sampled):
    """Draws every class once, with the probability of each as it is then: the estimate is exact."""
    sampled.classifier.draws_from.draw = lambda draws, generator, device: torch.arange(K)
    sampled.classifier.draws_from.log_q = lambda classes: torch.full(classes.shape, -torch.tensor(float(K)).log())
    sampled.classifier.negatives = K


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_the_loss_of_all_classes_when_all_are_drawn(link):
    whole, sampled, features, targets, noise = heads(link)
    everything(sampled)
    options = {"weight": torch.rand(B, **DOUBLE), "class_weight": torch.rand(K, **DOUBLE), "noise": noise}
    for reduction in ("mean", "sum"):
        losses = [head.loss(features, targets, reduction, **options) for head in (whole, sampled)]
        torch.testing.assert_close(*losses)
    for head, loss in zip((whole, sampled), losses, strict=True):
        head.zero_grad()
        loss.backward()
    for (name, first), (_, second) in zip(whole.named_parameters(), sampled.named_parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, msg=name)
    lists = LabelLists(torch.tensor([0, 0, 3, 5]), torch.tensor([1, 7, 2, 22]), None, B)
    if link == "sigmoid":
        torch.testing.assert_close(*(head.loss(features, lists, noise=noise) for head in (whole, sampled)))


@pytest.mark.parametrize("proposal", ["uniform", "log-uniform", "unigram"])
def test_the_sum_over_all_classes_is_estimated_without_bias(proposal):
    _, sampled, features, targets, _ = heads(negatives=7, proposal=proposal, counts=COUNTS)
    classifier, generator = sampled.classifier, torch.Generator().manual_seed(0)
    logits = classifier(features).detach()
    estimates = []
    for _ in range(3000):
        classes, offsets = classifier.active(Targets(ids=targets), generator)
        estimates.append((logits[:, classes] + offsets).exp().sum(-1))
    estimates, expected = torch.stack(estimates), logits.exp().sum(-1)
    error = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - expected).abs() < 4.5 * error).all()
    assert (estimates.std(0) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("proposal", ["uniform", "log-uniform", "unigram", "in-batch"])
def test_more_negatives_bring_the_loss_nearer(proposal):
    whole, sampled, features, targets, noise = heads(proposal=proposal, counts=COUNTS)
    exact = float(whole.loss(features, targets, noise=noise))

    def error(batch, negatives):
        sampled.classifier.negatives = negatives
        times = batch // B
        losses = [
            sampled.loss(
                features.repeat(times, 1),
                torch.cat([targets, torch.multinomial(COUNTS.double(), 240, replacement=True)[: batch - B]]),
                "none",
                noise=noise.repeat(times, 1, 1),
                generator=torch.Generator().manual_seed(seed),
            )[:B].mean()
            for seed in range(40)
        ]
        return abs(float(torch.stack(losses).mean()) - exact)

    near, far = (error(240, 2000), error(B, 2))
    assert near < 0.02
    assert far > near


def test_the_labels_of_a_batch_are_always_active_and_counted_once():
    classifier = SampledClassifier(D, K, negatives=5)
    for seed in range(50):
        targets = Targets(ids=torch.tensor([3, 3, 21, -100]))
        classes, offsets = classifier.active(targets, torch.Generator().manual_seed(seed))
        assert len(classes.unique()) == len(classes)
        assert (offsets[torch.isin(classes, torch.tensor([3, 21]))] == 0).all()
        assert torch.isin(torch.tensor([3, 21]), classes).all()
        assert -100 not in classes


def test_evaluation_and_prediction_are_over_all_classes():
    whole, sampled, features, targets, noise = heads(negatives=2)
    whole.eval()
    sampled.eval()
    torch.testing.assert_close(*(head.loss(features, targets, noise=noise) for head in (whole, sampled)))
    torch.testing.assert_close(*(head.predict(features, noise=noise).probs for head in (whole, sampled)))
    smoothed = (head.loss(features, targets, noise=noise, label_smoothing=0.1) for head in (whole, sampled))
    torch.testing.assert_close(*smoothed)


def test_sparse_gradients_are_the_dense_ones():
    dense_gradients = []
    for sparse in (False, True):
        _, sampled, features, targets, noise = heads(negatives=4, sparse=sparse)
        sampled.loss(features, targets, noise=noise, generator=torch.Generator().manual_seed(0)).backward()
        gradients = [sampled.classifier.weight.grad, sampled.classifier.bias.grad]
        assert all(gradient.is_sparse == sparse for gradient in gradients)
        dense_gradients.append([gradient.to_dense() for gradient in gradients])
    torch.testing.assert_close(*dense_gradients)


def test_a_sparse_optimiser_touches_active_rows_only():
    _, sampled, features, targets, _ = heads(negatives=2, sparse=True)
    before = sampled.classifier.weight.detach().clone()
    optimiser = torch.optim.SparseAdam([sampled.classifier.weight, sampled.classifier.bias], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    sampled.loss(features, targets, generator=generator).backward()
    optimiser.step()
    moved = (sampled.classifier.weight != before).any(-1).nonzero().squeeze(-1)
    assert set(targets.tolist()) <= set(moved.tolist())
    assert len(moved) <= len(targets.unique()) + 2


def test_negatives_are_reproducible():
    _, sampled, features, targets, noise = heads(negatives=3)
    losses = [
        sampled.loss(features, targets, noise=noise, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_det_over_sampled_classes_learns():
    torch.manual_seed(0)
    head = DetHead(8, 300, classifier=SampledClassifier(8, 300, negatives=20))
    prototypes = torch.randn(300, 8)
    targets = torch.randint(300, (256,))
    features = prototypes[targets]
    optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
    before = float(head.eval().loss(features, targets).detach())
    head.train()
    for _ in range(60):
        optimiser.zero_grad()
        head.loss(features, targets).backward()
        optimiser.step()
    assert float(head.eval().loss(features, targets).detach()) < before / 2


def test_sampled_classifier_rejects_unsupported_options():
    _, sampled, features, targets, _ = heads()
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 needs all classes in one process"):
        sampled.loss(features, targets, label_smoothing=0.1)
    with pytest.raises(ValueError, match="targets must be class ids"):
        sampled.loss(features, torch.full((B, K), 1 / K))
    with pytest.raises(ValueError, match="noise must go through it: use DetHead, or HetXLHead without noise_features"):
        HetHead(D, K, classifier=SampledClassifier(D, K))
    with pytest.raises(ValueError, match="noise must go through it"):
        HetXLHead(D, K, noise_features=2, classifier=SampledClassifier(D, K))
    with pytest.raises(ValueError, match='"in-batch" is for link="softmax"'):
        heads("sigmoid", proposal="in-batch", counts=COUNTS)[1].loss(features, targets)
    with pytest.raises(ValueError, match="proposal must be"):
        SampledClassifier(D, K, proposal="zipf")


@pytest.mark.parametrize("proposal", NEGATIVES)
def test_without_a_label_the_loss_is_zero_of_all_parameters(proposal):
    _, sampled, features, targets, noise = heads(proposal=proposal, counts=COUNTS, negatives=3)
    for count, reduction in ((B, "mean"), (B, "sum"), (0, "mean")):
        sampled.zero_grad()
        no_labels = torch.full_like(targets, -100)[:count]
        loss = sampled.loss(features[:count], no_labels, reduction, noise=noise[:count])
        assert loss == 0
        loss.backward()
        assert all((parameter.grad == 0).all() for parameter in sampled.parameters())
    assert sampled.loss(features, torch.full_like(targets, -100), "none", noise=noise).tolist() == [0] * B


def test_padding_changes_no_loss_among_the_batch():
    _, sampled, features, targets, noise = heads(proposal="in-batch", counts=COUNTS)
    padded = torch.cat((targets, torch.full((30,), -100)))
    more = torch.randn(30, D, **DOUBLE), torch.randn(30, 4, 3, **DOUBLE)
    loss = sampled.loss(torch.cat((features, more[0])), padded, noise=torch.cat((noise, more[1])))
    torch.testing.assert_close(loss, sampled.loss(features, targets, noise=noise))


@pytest.mark.parametrize("proposal", ["unigram", "in-batch"])
def test_half_precision_cast_does_not_change_the_draws(proposal):
    _, sampled, features, targets, noise = heads(proposal=proposal, counts=COUNTS)
    active = []
    for _ in range(2):
        active.append(sampled.classifier.active(Targets(ids=targets), torch.Generator().manual_seed(0)))
        sampled.to(torch.bfloat16)
    assert torch.equal(active[0].classes, active[1].classes)
    assert torch.equal(active[0].offsets, active[1].offsets)
    assert torch.isfinite(sampled.loss(features.bfloat16(), targets, noise=noise.bfloat16()))


def test_the_labels_of_every_form_of_targets():
    ids = torch.tensor([[4, -100], [1, 4]])
    assert labels_of(Targets(ids=ids)).tolist() == [1, 4]
    lists = LabelLists(torch.tensor([0, 0, 1]), torch.tensor([5, 2, 5]), None, 2)
    assert labels_of(Targets(lists=lists)).tolist() == [2, 5]
    dense = torch.tensor([[0.0, 1, 0], [0.5, 0, 0]])
    assert labels_of(Targets(dense=dense)).tolist() == [0, 1]
    assert labels_of(Targets(dense=dense[0])).tolist() == [1]  # of one example without a batch


def test_offsets_reweight_drawn_negatives_to_all_other_classes():
    labels, drawn = torch.tensor([2, 7]), torch.tensor([9, 2, 1, 9])
    log_q = torch.tensor([0.1, 0.4, 0.2, 0.1]).log()
    active = with_drawn(labels, drawn, log_q, 4)
    assert active.classes.tolist() == [1, 2, 7, 9]
    torch.testing.assert_close(active.offsets, torch.tensor([math.log(1 / 0.8), 0.0, 0.0, math.log(2 / 0.4)]))


def test_only_labels_when_nothing_else_was_drawn():
    labels = torch.tensor([0, 3])
    for drawn in (torch.tensor([3, 3]), torch.tensor([], dtype=torch.int64)):
        active = with_drawn(labels, drawn, torch.zeros(len(drawn)), 2)
        assert active.classes.tolist() == [0, 3]
        assert active.offsets.tolist() == [0, 0]


def test_targets_among_active_classes():
    classes = torch.tensor([1, 4, 6])
    assert among(Targets(ids=torch.tensor([6, -100, 1])), classes).ids.tolist() == [2, -100, 0]
    lists = LabelLists(torch.tensor([0, 1]), torch.tensor([4, 6]), torch.tensor([0.5, 1.0]), 2)
    active_lists = among(Targets(lists=lists), classes).lists
    assert (active_lists.classes.tolist(), active_lists.values.tolist(), active_lists.batch) == ([1, 2], [0.5, 1.0], 2)
    dense = torch.arange(14.0).view(2, 7)
    assert torch.equal(among(Targets(dense=dense), classes).dense, dense[:, [1, 4, 6]])


@pytest.mark.parametrize("shape", [(9,), (9, 4)])
def test_sparse_rows_have_the_gradients_of_dense_ones(shape):
    table, index = torch.randn(shape, requires_grad=True), torch.tensor([1, 5, 8])
    weights, gradients = torch.randn(3, *shape[1:]), []
    for sparse in (False, True):
        table.grad = None
        rows = gather_rows(table, index, sparse)
        assert torch.equal(rows, table[index])
        (rows * weights).sum().backward()
        assert table.grad.is_sparse == sparse
        gradients.append(table.grad.to_dense())
    assert torch.equal(*gradients)


def test_active_unpacks_into_classes_and_offsets():
    classes, offsets = Active(torch.tensor([1]), torch.tensor([0.0]))
    assert (classes.tolist(), offsets.tolist()) == ([1], [0.0])
