"""Distances to the training rows, against their definition, and what `Prediction.novelty` makes of them."""

import pytest
import torch

import hetxl
from hetxl.metrics.summary import score_auroc
from hetxl.nn.density import SHRINKAGE, fit_density

D, K = 4, 3


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % K
    centres = 4 * torch.eye(K, D)
    spread = torch.tensor([1.0, 0.1, 3.0, 1.0])
    return centres[labels] + spread * torch.randn(count, D, generator=generator), labels


def test_distances_follow_their_definition():
    features, labels = rows(60)
    density = fit_density(features.split(13), labels, K)
    means = torch.stack([features[labels == k].mean(0) for k in range(K)]).double()
    centred = features.double() - means[labels]
    covariance = centred.T @ centred / 60
    covariance += SHRINKAGE * covariance.diagonal().mean() * torch.eye(D)
    queries = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    offsets = queries.double().unsqueeze(-2) - means  # [2, 5, K, D]
    expected = (offsets @ torch.linalg.inv(covariance) * offsets).sum(-1).amin(-1) / D
    assert torch.allclose(density.distance(queries).double(), expected, rtol=1e-4)


def test_classes_and_rows_without_labels_are_left_out():
    features, labels = rows(60)
    labels[labels == 2] = -100
    density = fit_density([features], labels, 5)
    assert len(density.means) == 2
    with pytest.raises(ValueError, match="at least one example with a label"):
        fit_density([features], torch.full((60,), -100), 5)
    with pytest.raises(ValueError, match="more examples than targets, which has 3"):
        fit_density([features], labels[:3], 5)


@pytest.mark.parametrize("name", ["det", "het-xl"])
def test_novelty_is_larger_for_inputs_unlike_the_training_data(name: str):
    features, labels = rows(300)
    torch.manual_seed(0)
    head = hetxl.build_head(name, D, K, eval_samples=32).eval()
    head.density = fit_density([features], labels, K)
    known, _ = rows(100, seed=1)
    unknown = known + torch.tensor([0.0, 2.0, 0.0, 0.0])  # 20 standard deviations in a direction of its own
    novelty = head.predict(torch.cat([known, unknown]), top_k=1).novelty
    assert torch.allclose(novelty, head.density.distance(torch.cat([known, unknown])))
    area = score_auroc(novelty.numpy(), (torch.arange(200) >= 100).numpy())
    assert area is not None
    assert area > 0.99


def test_novelty_without_a_density_is_the_entropy_that_noise_does_not_explain():
    features, _ = rows(9)
    torch.manual_seed(0)
    prediction = hetxl.HetXLHead(D, K, noise_init=1.0).eval().predict(features)
    assert torch.equal(prediction.novelty, prediction.expected_entropy)
