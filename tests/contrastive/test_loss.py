import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl.contrastive import ContrastiveLoss

D = 5


def embeddings(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, count, D, dtype=torch.float64, generator=generator)
    return image, text


def made(**options):
    torch.manual_seed(0)
    return ContrastiveLoss(D, dtype=torch.float64, **{"rank": 2, "noise_init": 0.5} | options)


def test_the_scale_starts_where_the_paper_starts_it():
    assert made().scale().item() == pytest.approx(3.0)
    assert made(noise="none").scale().item() == pytest.approx(10.0)
    assert made(scale_init=5.0).scale().item() == pytest.approx(5.0)
    assert made().bias is None
    assert made(link="sigmoid").bias.item() == -10.0
    with pytest.raises(ValueError, match="init must be at most maximum=2"):
        made(max_scale=2.0)


def test_names_of_the_parameters():
    names = [name for name, _ in made(link="sigmoid", noise="image").named_parameters()]
    assert sorted(names) == [
        "bias",
        "image_noise.covariance.loadings.bias",
        "image_noise.covariance.loadings.weight",
        "image_noise.covariance.residual.bias",
        "image_noise.covariance.residual.weight",
        "scale.raw",
    ]


links, sides = st.sampled_from(["softmax", "sigmoid"]), st.sampled_from(["both", "image", "text", "none"])
normalizations = st.sampled_from(["before", "after", "both", "none"])


@given(st.integers(1, 8), links, sides, normalizations, st.integers(1, 4), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_the_order_of_the_pairs_does_not_matter(count, link, noise, normalize, samples, seed):
    loss = made(link=link, noise=noise, normalize=normalize)
    image, text = embeddings(count, seed)
    generator = torch.Generator().manual_seed(seed)
    modules = loss.image_noise, loss.text_noise
    z = [None if module is None else module.draw(count, samples, generator) for module in modules]
    order = torch.randperm(count, generator=generator)
    shuffled = [None if normal is None else normal[order] for normal in z]
    there = loss(image, text, noise=tuple(z))
    torch.testing.assert_close(loss(image[order], text[order], noise=tuple(shuffled)), there)


@given(st.integers(1, 8), links, sides, normalizations, st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_noise_of_zero_is_no_noise(count, link, noise, normalize, samples):
    loss, plain = (made(link=link, noise=side, normalize=normalize, scale_init=3.0) for side in (noise, "none"))
    image, text = embeddings(count)
    modules = loss.image_noise, loss.text_noise
    z = [None if module is None else torch.zeros(count, samples, module.size, dtype=image.dtype) for module in modules]
    torch.testing.assert_close(loss(image, text, noise=tuple(z)), plain(image, text))


@given(st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None, max_examples=10)
def test_without_a_scale_every_key_is_as_likely(count, samples):
    loss = made(scale_init=1e-9)
    assert loss(*embeddings(count), num_samples=samples).item() == pytest.approx(math.log(count), abs=1e-6)


def test_a_scale_at_its_bound_comes_back():
    loss = made(noise="none", max_scale=10.0)
    image, _ = embeddings(6)
    generator = torch.Generator().manual_seed(1)
    others = image[
        torch.randperm(6, generator=generator)
    ]  # pairs that do not belong together: a smaller scale is better
    loss(image, others).backward()
    assert loss.scale.raw.grad.item() > 0
    loss.scale.raw.grad = None
    loss(image, image).backward()
    assert loss.scale.raw.grad.item() == 0  # a larger one would be better


def test_saved_and_loaded(tmp_path):
    loss, (image, text) = made(link="sigmoid"), embeddings(6)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    torch.manual_seed(9)
    other = ContrastiveLoss(D, link="sigmoid", rank=2, dtype=torch.float64)
    other.load_state_dict(torch.load(tmp_path / "loss.pt"))
    found = [
        each(image, text, generator=torch.Generator().manual_seed(0)) for each in (loss, other, copy.deepcopy(loss))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def pairs_half_of_them_swapped(generator):
    """Images that say in their last coordinate whether they come with the text of another one."""
    base = torch.nn.functional.normalize(torch.randn(64, 8, generator=generator), dim=-1)
    swapped = torch.arange(64) < 32
    text = torch.cat((base, torch.zeros(64, 1)), dim=-1)
    text[:32] = text[:32].roll(1, 0)
    return torch.cat((base, swapped[:, None].float()), dim=-1), text, swapped


def test_noise_is_learned_for_pairs_that_do_not_fit():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    loss = ContrastiveLoss(9, rank=4, noise_init=0.1, noise="image", scale_init=8.0)
    assert loss.image_noise is not None
    optimiser = torch.optim.Adam(loss.image_noise.parameters(), lr=0.01)
    for _ in range(60):
        image, text, _ = pairs_half_of_them_swapped(generator)
        optimiser.zero_grad()
        loss(image, text, generator=generator, num_samples=4).backward()
        optimiser.step()
    image, _, swapped = pairs_half_of_them_swapped(generator)
    score = loss.image_noise.scale_of(loss.embed_image(image))
    assert score[swapped].mean() > 1.2 * score[~swapped].mean()
