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


def test_a_flat_batch_and_some_of_its_examples():
    features = torch.randn(2, 3, 4, dtype=torch.float64)
    for covariance in ("efficient", "low_rank"):
        for residual in ("rank1", "diagonal"):
            head = HetXLHead(4, 9, rank=2, covariance=covariance, residual=residual, dtype=torch.float64)
            noisy = noisy_of(head, features)
            flat, affine = noisy.flat(), Affine(head.classifier.weight, head.classifier.bias)
            expected = noisy.through(affine).sample(noisy.z).flatten(0, 1)
            torch.testing.assert_close(flat.through(affine).sample(flat.z), expected)
            few = flat.of_examples(torch.tensor([5, 0]))
            torch.testing.assert_close(few.through(affine).sample(few.z), expected[[5, 0]])
            rows, bias = affine.weight[[8, 1]], affine.bias[[8, 1]]
            torch.testing.assert_close(few.logits_at(rows, bias), expected[[5, 0], :, [8, 1]])
            # through two layers in one go, and one after the other
            first, second = torch.randn(3, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
            at_once = few.through(Affine(second @ first)).sample(few.z)
            torch.testing.assert_close(few.projected(first).through(Affine(second)).sample(few.z), at_once)


def test_normals_shared_by_a_batch():
    head, features = HetXLHead(4, 9, rank=2), torch.randn(2, 3, 4)
    flat = head._sampling(features, 6, None, None, torch.randn(5, 3), None).flat()
    assert flat.z.shape == (6, 5, 3)
