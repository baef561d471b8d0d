import pytest
import torch
from torch import nn

from hetxl import DetHead, HetXLHead
from hetxl.metrics.ensemble import Ensemble

B, D, K = 6, 5, 7


def members(link="softmax", count=3, head=DetHead):
    torch.manual_seed(0)
    return [(nn.Linear(4, D), head(D, K, link=link, **({} if head is DetHead else {"rank": 2}))) for _ in range(count)]


@pytest.mark.parametrize("head", [DetHead, HetXLHead])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_probabilities_are_averaged(link, head):
    some = members(link, head=head)
    inputs = torch.randn(B, 4)
    generator = torch.Generator().manual_seed(1)
    probs = [head.predict(backbone(inputs), num_samples=8, generator=generator).probs for backbone, head in some]
    actual = Ensemble(some).predict(inputs, num_samples=8, generator=torch.Generator().manual_seed(1))
    mean = torch.stack(probs).mean(0)
    torch.testing.assert_close(actual.probs, mean)
    if link == "softmax":
        entropy = torch.distributions.Categorical(probs=mean).entropy()
    else:
        entropy = torch.distributions.Bernoulli(probs=mean).entropy().sum(-1)
    torch.testing.assert_close(actual.entropy, entropy)
    assert (actual.mutual_information > 0).all()  # they were drawn apart, so they disagree


def test_a_single_member_is_itself():
    ((backbone, head),) = members(count=1)
    inputs = torch.randn(B, 4)
    actual, alone = Ensemble([(backbone, head)]).predict(inputs), head.predict(backbone(inputs))
    torch.testing.assert_close(actual.log_probs, alone.log_probs)
    torch.testing.assert_close(actual.mutual_information, torch.zeros(B), atol=1e-6, rtol=0)


def test_top_k_selects_from_the_averaged_probabilities():
    ensemble, inputs = Ensemble(members()), torch.randn(B, 4)
    everything, top = ensemble.predict(inputs), ensemble.predict(inputs, top_k=2)
    values, indices = everything.probs.topk(2)
    torch.testing.assert_close(top.probs, values)
    assert torch.equal(top.indices, indices)


def test_evaluation_mode_reaches_all_members():
    ensemble = Ensemble(members()).train()
    ensemble.eval()
    assert not any(module.training for module in ensemble.modules())
    assert len([module for module in ensemble.modules() if isinstance(module, nn.Linear)]) == 6


@pytest.mark.parametrize(
    ("some", "message"), [([], "at least one"), (members(count=1) + members("sigmoid", count=1), "one link")]
)
def test_members_that_do_not_go_together(some, message):
    with pytest.raises(ValueError, match=message):
        Ensemble(some)
