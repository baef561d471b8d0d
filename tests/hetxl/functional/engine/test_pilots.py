import math

import pytest
import torch

from hetxl import HetXLHead
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.pilots import (
    PILOTS,
    SIZES,
    choose_candidates,
    expansion,
    label_entropies_outside,
    pilot_samples,
    prunable,
    sampled_with_others,
    sizes_for,
    weigh_exactly,
)
from support.cases import make, normals

K, Q, S = 600, 4, 512
TAU = 0.8


def problem(noise=0.3, peak=6.0, examples=3):
    """Rows of a few likely classes and many unlikely ones, and mixing weights: [n, K, P] and [n, S, P]."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    rows = noise * torch.randn(examples, K, Q + 1, **options)
    rows[..., 0] = torch.randn(examples, K, **options)
    rows[:, :5, 0] += peak
    z = torch.randn(examples, S, Q, **options)
    return rows, torch.cat((torch.ones(examples, S, 1, dtype=torch.float64), z), -1) / TAU


def chosen(rows, mixing, size, tolerance=1e-3, link="softmax"):
    return choose_candidates(rows, mixing, pilot_samples(rows, mixing, link), size, 5, tolerance, link)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_pilots_are_the_first_samples(link):
    rows, mixing = problem(noise=2.0)
    logits = rows @ mixing[:, :PILOTS].mT  # [n, K, pilots]
    probs = logits.softmax(1) if link == "softmax" else logits.sigmoid()
    pilots = pilot_samples(rows, mixing, link)
    torch.testing.assert_close(pilots.likely, probs[..., : PILOTS // 2].mean(-1))
    if link == "softmax":
        torch.testing.assert_close(pilots.weights / pilots.total, probs)
        torch.testing.assert_close(pilots.total.log() + pilots.top, logits.logsumexp(1, keepdim=True))
    else:
        torch.testing.assert_close(pilots.weights, probs)
    some = torch.tensor([2, 0])
    torch.testing.assert_close(pilots.of(some).likely, pilots.likely[some])


def test_candidates_are_the_likeliest_and_the_others_weigh_what_is_left():
    rows, mixing = problem(noise=0.5)
    selection = chosen(rows, mixing, 128)
    probs = (rows @ mixing[:, :PILOTS].mT).softmax(1)
    assert torch.equal(selection.classes, probs[..., : PILOTS // 2].mean(-1).topk(128).indices)
    outside = probs[..., PILOTS // 2 :].scatter(1, selection.classes.unsqueeze(-1).expand(-1, -1, PILOTS // 2), 0.0)
    torch.testing.assert_close(selection.left_out, outside.sum(1).mean(-1))
    among = (outside / outside.sum(1, keepdim=True)).mean(-1)
    torch.testing.assert_close(selection.spread, -torch.special.xlogy(among, among).sum(-1))


def test_classes_without_weight_leave_results_finite():
    # All but the candidates are so unlikely that nothing of them is left in the sums.
    rows, mixing = problem(noise=0.1)
    rows[..., 0] -= 1e3
    rows[:, :128, 0] += 1e3
    selection = chosen(rows, mixing, 128)
    assert selection.enough.all()
    assert selection.left_out.max() < 1e-6
    assert torch.stack((selection.weight.abs().amax(), selection.spread.abs().amax())).isfinite().all()


def test_samples_that_a_fit_goes_wrong_on_are_weighed_exactly():
    rows, mixing = problem(noise=0.3)
    logits = rows @ mixing.mT
    classes = logits.softmax(1).mean(-1).topk(128).indices
    inside = classes.unsqueeze(-1).expand(-1, -1, S)
    exact = logits.scatter(1, inside, -math.inf).logsumexp(1)
    samples = torch.tensor([[3, 500, 77]] * 3)
    torch.testing.assert_close(weigh_exactly(rows, mixing, classes, samples), exact.gather(1, samples))

    few, full = logits.gather(1, inside), logits.softmax(1).mean(-1).gather(1, classes)
    for count, known in ((0, True), (20, True), (60, False)):
        fit = exact.clone()
        fit[:, 5 : 5 + count] += 30  # one that explodes for some samples
        result = sampled_with_others(few.clone(), fit, 5, lambda some: weigh_exactly(rows, mixing, classes, some))
        error = (result[0].exp() - full).abs().sum(-1)
        if known:
            assert error.max() < 1e-9
            assert result[3].max() < 1e-9
        else:  # too many to be mended, and it shows
            assert error.min() > 0.03
            assert result[3].min() > 0.5


def test_top_classes_keep_probabilities_that_underflow():
    logits = torch.tensor([0.0, -900.0, -950.0, -2000.0], dtype=torch.float64).view(1, 4, 1).repeat(1, 1, S)
    weight = torch.full((1, S), -1000.0, dtype=torch.float64)
    log_probs, expected, left_out, wrong = sampled_with_others(
        logits, weight, 3, lambda samples: weight.gather(1, samples)
    )
    torch.testing.assert_close(log_probs[0, :3], torch.tensor([0.0, -900.0, -950.0], dtype=torch.float64))
    assert expected.item() == pytest.approx(0, abs=1e-12)
    assert left_out.item() == wrong.item() == 0


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
def test_weight_of_other_classes_extrapolates_to_unseen_samples(noise):
    rows, mixing = problem(noise)
    selection = chosen(rows, mixing, 128)
    logits = rows @ mixing.mT  # [n, K, S]
    exact = logits.scatter(1, selection.classes.unsqueeze(-1).expand(-1, -1, S), -math.inf).logsumexp(1)
    fresh = slice(PILOTS, S)
    error = (selection.weight - exact)[:, fresh]
    assert error.abs().mean() < 0.05 * max(1.0, float(exact[:, fresh].std()))


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_probabilities_of_candidates_are_those_among_all(noise):
    rows, mixing = problem(noise)
    selection = chosen(rows, mixing, 128)
    assert selection.enough.all()
    logits = rows @ mixing.mT
    probs = logits.softmax(1)
    few = logits.gather(1, selection.classes.unsqueeze(-1).expand(-1, -1, S))
    log_probs, expected, left_out, wrong = sampled_with_others(
        few, selection.weight, 5, lambda samples: weigh_exactly(rows, mixing, selection.classes, samples)
    )
    assert wrong.max() < 2e-3
    exact = probs.mean(-1).gather(1, selection.classes)
    assert (log_probs.exp() - exact).abs().sum(-1).max() / 2 < 1e-3
    torch.testing.assert_close(left_out, 1 - exact.sum(-1), rtol=0.02, atol=1e-4)
    entropy = torch.distributions.Categorical(probs=probs.mT).entropy().mean(-1)
    torch.testing.assert_close(expected + left_out * selection.spread, entropy, rtol=0.03, atol=0.01)


def test_the_expansion_is_that_of_the_weight():
    # To second order: halving the noise divides what is left over by about eight.
    left_over = []
    for noise in (0.2, 0.1):
        rows, mixing = problem(noise)
        classes = torch.arange(5).expand(3, 5)
        terms = expansion(rows, mixing, classes)
        exact = (rows @ mixing.mT)[:, 5:].logsumexp(1)
        at_zero = (rows[:, 5:, 0] / TAU).logsumexp(-1, keepdim=True)
        left_over.append((exact - at_zero - terms[..., 1] - 0.5 * terms[..., 2]).abs().mean())
    assert 5 < left_over[0] / left_over[1] < 20


def test_not_enough_when_the_fit_is_far_off():
    rows, mixing = problem(noise=8.0)
    assert not chosen(rows, mixing, 128, tolerance=1e-4).enough.any()


def test_labels_far_below_the_top_ones_are_left_out():
    rows, mixing = problem(noise=0.0)
    rows[..., 0] = -6
    rows[:, :5, 0] = 2
    selection = chosen(rows, mixing, 128, link="sigmoid")
    assert selection.enough.all()
    assert set(range(5)) <= set(selection.classes[0].tolist())
    rows[..., 0] = 1.9
    rows[:, :5, 0] = 2
    assert not chosen(rows, mixing, 128, link="sigmoid").enough.any()


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


def test_pruning_needs_many_classes_and_samples():
    def inputs(classes, samples):
        head = make("het-xl", 5, classes)
        distribution = head.logit_distribution(torch.randn(3, 5, dtype=torch.float64))
        return gather_inputs(distribution, normals(head, 3, samples=samples), 1.0)

    assert prunable(inputs(2048, 4 * PILOTS), 5, 2**28)
    assert not prunable(inputs(40, 4 * PILOTS), 5, 2**28)  # few classes
    assert not prunable(inputs(2048, PILOTS), 5, 2**28)  # few samples
    assert not prunable(inputs(2048, 4 * PILOTS), 5, 2**16)  # no memory for the rows
    assert not prunable(inputs(2048, 4 * PILOTS), 1500, 2**28)  # nearly all wanted
    assert sizes_for(10**6, 5) == list(SIZES)


def test_entropies_of_examples_that_are_certain():
    torch.manual_seed(0)
    head = HetXLHead(16, 2000, temperature=0.05, noise_init=1.0, eval_samples=512)
    features = 12 * torch.randn(16, 16)
    pruned, exact = (
        head.predict(features, top_k=1, tolerance=tolerance, generator=torch.Generator().manual_seed(0))
        for tolerance in (1e-3, 0)
    )
    assert pruned.left_out is not None
    assert torch.equal(pruned.indices, exact.indices)
    torch.testing.assert_close(pruned.entropy, exact.entropy, rtol=0, atol=5e-3)
    torch.testing.assert_close(pruned.mutual_information, exact.mutual_information, rtol=0, atol=5e-3)
