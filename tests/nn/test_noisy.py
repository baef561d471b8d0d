"""Features with their noise, as a classifier gets them."""

import torch

from hetxl import HetHead, HetXLHead
from hetxl.functional import Affine, Targets, Weights, reference


def noisy_of(head, features, **options):
    return head._sampling(features, 6, None, torch.Generator().manual_seed(0), None, None, **options)


def test_noise_goes_through_the_classifier_unless_it_is_lifted_beside_it():
    features = torch.randn(3, 4, dtype=torch.float64)
    for head in (HetXLHead(4, 9, rank=2, dtype=torch.float64), HetHead(4, 9, rank=2, dtype=torch.float64)):
        noisy, affine = noisy_of(head, features), Affine(head.classifier.weight, head.classifier.bias)
        found = noisy.through(affine).sample(noisy.z)
        draws = noisy.noise.draw(noisy.z)
        moved = (
            affine(features.unsqueeze(1) + draws) if isinstance(head, HetXLHead) else draws + affine(features)[:, None]
        )
        torch.testing.assert_close(found, moved)


def test_losses_log_probabilities_and_predictions_are_those_of_the_distribution():
    head, features = HetXLHead(4, 9, rank=2, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    noisy, ids = noisy_of(head, features), torch.tensor([0, 8, 3])
    logits = noisy.through(Affine(head.classifier.weight, head.classifier.bias))
    expected = reference.mc_log_probs(logits, noisy.z, temperature=noisy.temperature, link="softmax", order="samples")
    torch.testing.assert_close(noisy.log_probs(logits), expected)
    loss = noisy.nll(logits, Targets(ids=ids), "sum", Weights())
    torch.testing.assert_close(loss, -expected[torch.arange(3), ids].sum())
    torch.testing.assert_close(noisy.predict(logits, "mc", None, 0.0).log_probs, expected)


def test_a_prediction_without_samples_draws_none():
    head, features = HetXLHead(4, 9, rank=2), torch.randn(3, 4)
    assert noisy_of(head, features, drawn=False).z is None
    assert noisy_of(head, features).z.shape == (3, 6, 3)
