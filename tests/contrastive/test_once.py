import pytest
import torch

from hetxl.contrastive import ContrastiveLoss
from hetxl.contrastive.draws import add_noise


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("noise", ["both", "none"])
def test_a_penalty_on_gradients_is_refused(link, noise):
    image, text = normal(4, 3), normal(4, 3, seed=1)
    loss = ContrastiveLoss(3, link=link, noise=noise, rank=2)
    value = loss(image, text, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="leave create_graph=True out"):
        torch.autograd.grad(value, image, create_graph=True)


def test_draws_have_no_second_gradients():
    x, weight = normal(4, 3), normal(6, 3, seed=1)
    drawn = add_noise(x, weight, None, None, None, normal(4, 1, 2, seed=2).detach(), 2)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(drawn.sum(), x, create_graph=True)
    assert torch.autograd.grad(add_noise(x, weight, None, None, None, torch.zeros(4, 1, 2), 2).sum(), x)
