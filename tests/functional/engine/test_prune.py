import pytest
import torch

from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.prune import (
    FEWEST,
    PILOTS,
    among_candidates,
    candidate_rows,
    choose_candidates,
    label_entropies_outside,
    pilot_probs,
    prunable,
)
from support.cases import make, normals

B, D, K = 3, 5, 40


def inputs_of(variant, samples=PILOTS, **options):
    head = make(variant, D, K, **options)
    with torch.no_grad():
        distribution = head.logit_distribution(torch.randn(B, D, dtype=torch.float64))
    return distribution, gather_inputs(distribution, normals(head, B, samples=samples), 0.7)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl", "het-xl-own"])
def test_pilots_are_the_first_samples(variant, link):
    distribution, inputs = inputs_of(variant, samples=PILOTS + 5)
    logits = distribution.sample(inputs.z) / 0.7
    probs = logits.softmax(-1) if link == "softmax" else logits.sigmoid()
    with torch.no_grad():
        pilots = pilot_probs(inputs, torch.float64, link)
    torch.testing.assert_close(pilots.mT, probs[:, :PILOTS])


@pytest.mark.parametrize("covariance", ["efficient", "low_rank", "full"])
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl", "het-xl-own"])
def test_rows_of_candidates_are_rows_of_all(variant, covariance):
    distribution, inputs = inputs_of(variant, covariance=covariance)
    classes = torch.stack([torch.randperm(K)[:6] for _ in range(B)])
    rows = candidate_rows(inputs, classes, torch.float64)
    torch.testing.assert_close(rows[..., 0], distribution.mean.gather(-1, classes))
    index = classes.unsqueeze(1).expand(-1, distribution.size, -1)
    torch.testing.assert_close(rows[..., 1:].mT, distribution.factors.gather(-1, index))
    few = among_candidates(inputs, rows).distribution()
    index = classes.unsqueeze(1).expand(-1, PILOTS, -1)
    torch.testing.assert_close(few.sample(inputs.z), distribution.sample(inputs.z).gather(-1, index))


def pilots_with(mass, classes=4096):
    """Two examples whose first `FEWEST` classes hold `mass` under every pilot."""
    probs = torch.full((2, classes), (1 - mass) / (classes - FEWEST))
    probs[:, :FEWEST] = mass / FEWEST
    return probs.unsqueeze(-1).repeat(1, 1, PILOTS)


def test_few_candidates_when_they_hold_nearly_everything():
    found = choose_candidates(pilots_with(0.9999), top_k=5, tolerance=1e-3, link="softmax")
    assert found.enough.all()
    assert found.classes.shape == (2, FEWEST)
    torch.testing.assert_close(found.left_out, torch.full((2,), 1e-4), rtol=0, atol=1e-5)


def test_more_candidates_when_more_is_asked():
    found = choose_candidates(pilots_with(0.9), top_k=5, tolerance=0.09, link="softmax")
    assert found.enough.all()
    # a tenth of the other 3,968 classes
    assert FEWEST + 350 < found.classes.shape[1] < FEWEST + 450


def test_not_enough_when_everything_matters():
    found = choose_candidates(pilots_with(FEWEST / 4096), top_k=5, tolerance=1e-3, link="softmax")
    assert not found.enough.any()


def test_what_the_second_half_sees_outside_counts():
    pilots = pilots_with(0.9999)
    pilots[1, :, PILOTS // 2 :] = pilots[1, :, PILOTS // 2 :].flip(0)  # the second half is about other classes
    found = choose_candidates(pilots, top_k=5, tolerance=1e-3, link="softmax")
    assert found.enough.tolist() == [True, False]
    assert found.left_out[1] > 0.9


def test_labels_far_below_the_top_ones_are_left_out():
    probs = torch.full((1, 4096), 1e-4)
    probs[0, :5] = 0.5
    found = choose_candidates(probs.unsqueeze(-1).repeat(1, 1, PILOTS), top_k=5, tolerance=1e-3, link="sigmoid")
    assert found.enough.all()
    assert set(range(5)) <= set(found.classes[0].tolist())
    probs = torch.full((1, 4096), 0.4)
    probs[0, :5] = 0.5
    pilots = probs.unsqueeze(-1).repeat(1, 1, PILOTS)
    assert not choose_candidates(pilots, top_k=5, tolerance=1e-3, link="sigmoid").enough.any()


def test_pilots_that_disagree_raise_the_estimate():
    pilots = pilots_with(0.9999)
    pilots[0, :FEWEST, -1] *= 0.9  # one of eight puts a tenth elsewhere
    found = choose_candidates(pilots, top_k=5, tolerance=1.0, link="softmax")
    assert found.left_out[0] > 0.0125 + 1.5 * 0.1 / 8  # above the mean over the eight
    assert found.left_out[1] < 2e-4


def test_entropies_of_the_other_labels():
    pilots = torch.rand(2, 30, PILOTS, dtype=torch.float64)
    classes = torch.tensor([[0, 1], [4, 9]])
    entropy, expected = label_entropies_outside(pilots, classes)
    others = [[k for k in range(30) if k not in row] for row in classes.tolist()]
    for i, rest in enumerate(others):
        of_mean = torch.distributions.Bernoulli(probs=pilots[i].mean(-1)).entropy()
        each = torch.distributions.Bernoulli(probs=pilots[i]).entropy().mean(-1)
        torch.testing.assert_close(entropy[i], of_mean[rest].sum())
        torch.testing.assert_close(expected[i], each[rest].sum())


def test_when_pruning_can_pay():
    _, inputs = inputs_of("het-xl", samples=64)
    assert not prunable(inputs, 5)  # 40 classes
    _, inputs = inputs_of("het-xl", samples=64, residual="diagonal")
    assert not prunable(inputs, 5)
