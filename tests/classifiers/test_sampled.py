"""Sampled softmax: exact when everything is drawn, unbiased otherwise, all classes at evaluation."""

import pytest
import torch

from hetxl import DetHead, HetHead, HetXLHead
from hetxl.classifiers import LinearClassifier, SampledClassifier
from hetxl.classifiers.negatives import NEGATIVES
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
    found = []
    for _ in range(3000):
        classes, offsets = classifier.active(Targets(ids=targets), generator)
        found.append((logits[:, classes] + offsets).exp().sum(-1))
    found, expected = torch.stack(found), logits.exp().sum(-1)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()
    assert (found.std(0) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("proposal", ["uniform", "log-uniform", "unigram", "in-batch"])
def test_more_negatives_bring_the_loss_nearer(proposal):
    whole, sampled, features, targets, noise = heads(proposal=proposal, counts=COUNTS)
    exact = float(whole.loss(features, targets, noise=noise))

    def error(batch, negatives):
        sampled.classifier.negatives = negatives
        times = batch // B
        found = [
            sampled.loss(
                features.repeat(times, 1),
                torch.cat([targets, torch.multinomial(COUNTS.double(), 240, replacement=True)[: batch - B]]),
                "none",
                noise=noise.repeat(times, 1, 1),
                generator=torch.Generator().manual_seed(seed),
            )[:B].mean()
            for seed in range(40)
        ]
        return abs(float(torch.stack(found).mean()) - exact)

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
    found = []
    for sparse in (False, True):
        _, sampled, features, targets, noise = heads(negatives=4, sparse=sparse)
        sampled.loss(features, targets, noise=noise, generator=torch.Generator().manual_seed(0)).backward()
        gradients = [sampled.classifier.weight.grad, sampled.classifier.bias.grad]
        assert all(gradient.is_sparse == sparse for gradient in gradients)
        found.append([gradient.to_dense() for gradient in gradients])
    torch.testing.assert_close(*found)


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


def test_what_sampling_cannot_do():
    _, sampled, features, targets, _ = heads()
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 spreads over all classes"):
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
        nobody = torch.full_like(targets, -100)[:count]
        loss = sampled.loss(features[:count], nobody, reduction, noise=noise[:count])
        assert loss == 0
        loss.backward()
        assert all((parameter.grad == 0).all() for parameter in sampled.parameters())
    assert sampled.loss(features, torch.full_like(targets, -100), "none", noise=noise).tolist() == [0] * B


def test_padding_changes_no_loss_among_the_batch():
    _, sampled, features, targets, noise = heads(proposal="in-batch", counts=COUNTS)
    padded = torch.cat((targets, torch.full((30,), -100)))
    more = torch.randn(30, D, **DOUBLE), torch.randn(30, 4, 3, **DOUBLE)
    found = sampled.loss(torch.cat((features, more[0])), padded, noise=torch.cat((noise, more[1])))
    torch.testing.assert_close(found, sampled.loss(features, targets, noise=noise))


@pytest.mark.parametrize("proposal", ["unigram", "in-batch"])
def test_a_head_in_half_precision_draws_what_it_drew(proposal):
    _, sampled, features, targets, noise = heads(proposal=proposal, counts=COUNTS)
    active = []
    for _ in range(2):
        active.append(sampled.classifier.active(Targets(ids=targets), torch.Generator().manual_seed(0)))
        sampled.to(torch.bfloat16)
    assert torch.equal(active[0].classes, active[1].classes)
    assert torch.equal(active[0].offsets, active[1].offsets)
    assert torch.isfinite(sampled.loss(features.bfloat16(), targets, noise=noise.bfloat16()))
