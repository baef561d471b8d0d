"""MC dropout and last-layer Laplace as heads."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.functional.laplace import weight_covariance, with_one
from hetxl.functional.links import average_logits, mean_sigmoid, mean_softmax
from hetxl.metrics import fit_laplace
from hetxl.metrics.laplace import PRIORS
from hetxl.nn import DetHead, DropoutHead, HetXLHead, LaplaceHead, build_head
from hetxl.nn.averaged import drop

B, D, K, N = 5, 6, 4, 300
LINKS = ("softmax", "sigmoid")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def probabilities(logits, link):
    return logits.softmax(-1) if link == "softmax" else logits.sigmoid()


def trained(link="softmax", standardize=True):
    """Return a DET head in evaluation mode whose weights are not small, its features and their labels."""
    features = 3 + torch.randn(N, D, generator=seeded(1))
    head = DetHead(D, K, link=link, standardize=standardize, temperature=1.5).eval()
    with torch.no_grad():
        head.classifier.weight.copy_(torch.randn(K, D, generator=seeded(2)))
    if head.standardize is not None:
        head.standardize.measure([features])
    labels = torch.randint(K, (N,), generator=seeded(3))
    return head, features, labels


@pytest.mark.parametrize("link", LINKS)
def test_logits_are_averaged_one_after_the_other(link):
    logits = 3 * torch.randn(B, 9, K, generator=seeded(), dtype=torch.float64)
    actual = average_logits(logits.unbind(-2), link)
    probs = probabilities(logits, link)
    torch.testing.assert_close(actual.log_p.exp(), probs.mean(-2))
    entropy = (
        torch.special.entr(probs) if link == "softmax" else torch.special.entr(probs) + torch.special.entr(1 - probs)
    )
    torch.testing.assert_close(actual.expected_entropy, entropy.sum(-1).mean(-1))
    expected = mean_softmax(logits) if link == "softmax" else torch.sub(*mean_sigmoid(logits))
    torch.testing.assert_close(actual.logits, expected)
    with pytest.raises(ValueError, match="at least one sample"):
        average_logits([], link)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("standardize", [True, False])
def test_mc_dropout_is_an_explicit_average_over_masks(link, standardize):
    head, features, _ = trained(link, standardize)
    dropout = DropoutHead(D, K, dropout=0.4, link=link, standardize=standardize, temperature=1.5).eval()
    dropout.load_state_dict(head.state_dict())
    actual = dropout.predict(features[:B], num_samples=50, generator=seeded(4))
    inputs, generator, probs = features[:B], seeded(4), torch.zeros(B, K)
    if head.standardize is not None:
        inputs = head.standardize(inputs)
    for _ in range(50):
        mask = (torch.empty(B, D).bernoulli_(0.6, generator=generator)) / 0.6
        probs += probabilities(F.linear(mask * inputs, head.classifier.weight, head.classifier.bias) / 1.5, link) / 50
    torch.testing.assert_close(actual.probs, probs)
    assert (actual.mutual_information > 0).all()
    assert actual.num_samples == 50


def test_dropped_features_keep_their_mean():
    values = drop(torch.ones(200_000), 0.3, seeded())
    torch.testing.assert_close(values.unique(), torch.tensor([0, 1 / 0.7]))
    assert float(values.mean()) == pytest.approx(1, abs=0.01)


def test_training_drops_features_and_a_seed_repeats_it():
    head, features, labels = DropoutHead(D, K, dropout=0.5), torch.randn(N, D), torch.randint(K, (N,))
    losses = [head(features, labels, generator=seeded(seed)).item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    head.dropout = 0.0
    plain = F.cross_entropy(head.classifier(features), labels)
    torch.testing.assert_close(head.train()(features, labels), plain)
    torch.testing.assert_close(head.eval()(features, labels), plain)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", [DropoutHead, LaplaceHead])
def test_losses_in_evaluation_are_of_averaged_probabilities(kind, link):
    head, features = kind(D, K, link=link, eval_samples=7).eval(), torch.randn(B, D)
    labels = torch.randint(K, (B,))
    logits = head(features, generator=seeded(1))
    loss = head.loss(features, labels, generator=seeded(1))
    expected = F.cross_entropy(logits, labels)
    if link == "sigmoid":
        expected = (
            F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, K).float(), reduction="none").sum(-1).mean()
        )
    torch.testing.assert_close(loss, expected)
    if kind is DropoutHead:
        torch.testing.assert_close(probabilities(logits, link), head.predict(features, generator=seeded(1)).probs)


@pytest.mark.parametrize("link", LINKS)
def test_laplace_predictions_agree_with_draws_of_the_weights(link):
    head, features, _ = trained(link)
    laplace = LaplaceHead.of(head)
    laplace.measure([features[:8]])  # few rows leave the weights uncertain
    laplace.prior = 3.0
    covariance = weight_covariance(laplace.curvature, laplace.posterior_square / laplace.posterior_prior).double()
    means = torch.cat((head.classifier.weight, head.classifier.bias.unsqueeze(-1)), -1).double()
    draws = torch.distributions.MultivariateNormal(means, covariance)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = draws.sample((20_000,))  # [S, K, D + 1]
    assert laplace.standardize is not None
    inputs = with_one(laplace.standardize(features[:B]), D + 1).double()
    probs = probabilities(torch.einsum("ni,ski->nsk", inputs, weights) / 1.5, link).mean(1).float()
    sampled = laplace.predict(features[:B], num_samples=20_000, method="mc", generator=seeded())
    torch.testing.assert_close(sampled.probs, probs, atol=0.01, rtol=0)
    closed = laplace.predict(features[:B], method="probit").probs
    assert (closed - probs).abs().max() < 0.03
    # Both are far from what they are without the posterior.
    assert (laplace.predict(features[:B], method="deterministic").probs - probs).abs().max() > 0.05


def test_without_a_prior_variance_laplace_is_det():
    head, features, _ = trained()
    laplace = LaplaceHead.of(head)
    laplace.measure([features])
    expected = head.predict(features).probs
    for method in ("probit", "mc", "deterministic"):
        torch.testing.assert_close(laplace.predict(features, method=method, num_samples=2).probs, expected)
    torch.testing.assert_close(laplace(features).exp(), expected)


def test_rows_far_from_the_training_data_are_less_certain():
    head, features, _ = trained(standardize=False)
    laplace = LaplaceHead.of(head)
    laplace.measure([features])
    laplace.prior = 1.0
    near, far = laplace.predict(features[:B], method="probit"), laplace.predict(-20 * features[:B], method="probit")
    assert (far.logit_variance > 10 * near.logit_variance).all()
    top = near.probs.argmax(-1, keepdim=True)
    torch.testing.assert_close(near.covariance[:, 0, 0], near.logit_variance.gather(-1, top).squeeze(-1))


def test_fitting_chooses_the_prior_on_held_out_rows():
    head, features, _ = trained()
    flipped = torch.randint(K, (N,), generator=seeded(9))  # held-out labels that say: be less certain
    doubtful = fit_laplace(head, [features], [features], flipped)
    sure = fit_laplace(head, [features], features.split(64), head.predict(features).top_class)
    assert doubtful.prior == pytest.approx(PRIORS[-1])
    assert sure.prior == pytest.approx(PRIORS[0])
    losses = []
    for prior in PRIORS:
        doubtful.prior = prior
        losses.append(doubtful.loss(features, flipped).item())
    assert min(losses) == losses[-1]


def test_a_posterior_is_saved_with_the_head():
    head, features, labels = trained()
    laplace = fit_laplace(head, [features], [features], labels)
    copy = LaplaceHead.of(build_head("det", D, K, standardize=True, temperature=1.5)).eval()
    copy.load_state_dict(laplace.state_dict())
    torch.testing.assert_close(
        copy.predict(features, method="probit").probs, laplace.predict(features, method="probit").probs
    )


def test_heads_that_have_no_posterior_are_refused():
    with pytest.raises(ValueError, match="head must be a DetHead, found HetXLHead"):
        LaplaceHead.of(HetXLHead(D, K))
    with pytest.raises(ValueError, match="classifier must be a linear layer for a posterior over its weights"):
        LaplaceHead.of(DetHead(D, K, classifier=torch.nn.Sequential(torch.nn.Linear(D, K))))
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, found 1"):
        DropoutHead(D, K, dropout=1)
    with pytest.raises(ValueError, match="method must be one of"):
        DropoutHead(D, K).predict(torch.randn(B, D), method="probit")
