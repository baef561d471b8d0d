import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl.contrastive import ContrastiveLoss, LogitScale
from hetxl.contrastive.loss import _BoundedExp

D = 5


def embeddings(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, count, D, dtype=torch.float64, generator=generator)
    return image, text


def build(**options):
    torch.manual_seed(0)
    return ContrastiveLoss(D, dtype=torch.float64, **{"rank": 2, "noise_init": 0.5} | options)


def test_scale_starts_at_the_papers_value():
    assert build().scale().item() == pytest.approx(3.0)
    assert build(noise="none").scale().item() == pytest.approx(10.0)
    assert build(scale_init=5.0).scale().item() == pytest.approx(5.0)
    assert build().bias is None
    assert build(link="sigmoid").bias.item() == -10.0
    with pytest.raises(ValueError, match="init must be at most maximum=2"):
        build(max_scale=2.0)


def test_names_of_the_parameters():
    names = [name for name, _ in build(link="sigmoid", noise="image").named_parameters()]
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
    loss = build(link=link, noise=noise, normalize=normalize)
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
    loss, plain = (build(link=link, noise=side, normalize=normalize, scale_init=3.0) for side in (noise, "none"))
    image, text = embeddings(count)
    modules = loss.image_noise, loss.text_noise
    z = [None if module is None else torch.zeros(count, samples, module.size, dtype=image.dtype) for module in modules]
    torch.testing.assert_close(loss(image, text, noise=tuple(z)), plain(image, text))


@given(st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None, max_examples=10)
def test_without_a_scale_every_key_is_as_likely(count, samples):
    loss = build(scale_init=1e-9)
    assert loss(*embeddings(count), num_samples=samples).item() == pytest.approx(math.log(count), abs=1e-6)


def test_a_scale_at_its_bound_comes_back():
    loss = build(noise="none", max_scale=10.0)
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


def test_loss_is_equal_after_save_and_load(tmp_path):
    loss, (image, text) = build(link="sigmoid"), embeddings(6)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    torch.manual_seed(9)
    other = ContrastiveLoss(D, link="sigmoid", rank=2, dtype=torch.float64)
    other.load_state_dict(torch.load(tmp_path / "loss.pt"))
    actual = [
        each(image, text, generator=torch.Generator().manual_seed(0)) for each in (loss, other, copy.deepcopy(loss))
    ]
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


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


def test_logit_scale_starts_at_init():
    scale = LogitScale(3.0)
    assert scale().item() == pytest.approx(3.0)
    assert [name for name, _ in scale.named_parameters()] == ["raw"]
    assert scale.raw.item() == pytest.approx(math.log(3.0))
    assert "maximum=100" in repr(scale)


def test_a_scale_and_a_bias_that_were_saved_as_scalars_load():
    loss = ContrastiveLoss(4, link="sigmoid", noise="none")
    loss.load_state_dict({"scale.raw": torch.tensor(0.5), "bias": torch.tensor(-3.0)})
    assert loss.scale().item() == pytest.approx(math.exp(0.5))
    assert loss.bias.tolist() == [-3.0]


def test_gradient_below_the_bound():
    raw = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: _BoundedExp.apply(t, 2.0), raw)


def test_logit_scale_above_its_maximum_is_clamped_and_can_decrease():
    scale = LogitScale(5.0, maximum=10.0)
    scale.raw.data.fill_(math.log(20.0))
    value = scale()
    assert value.item() == pytest.approx(10.0)
    (further,) = torch.autograd.grad(-scale(), scale.raw)
    assert float(further) == 0  # a step would carry t further up
    (back,) = torch.autograd.grad(scale(), scale.raw)
    assert float(back) == pytest.approx(10.0)


def test_logit_scale_stays_near_its_maximum_and_decreases_at_once():
    scale = LogitScale(9.0, maximum=10.0)
    optimiser = torch.optim.SGD(scale.parameters(), lr=0.01)
    for _ in range(50):
        optimiser.zero_grad()
        (-scale()).backward()
        optimiser.step()
    assert scale.raw.item() < math.log(10.0) + 0.2
    assert scale().item() == pytest.approx(10.0)
    for _ in range(5):
        optimiser.zero_grad()
        scale().backward()
        optimiser.step()
    assert scale().item() < 10.0


def test_clamp_limits_the_raw_scale_in_place():
    scale = LogitScale(2.0, maximum=50.0)
    scale.raw.data.fill_(9.0)
    scale.clamp_()
    assert scale.raw.item() == pytest.approx(math.log(50.0))
    scale.raw.data.fill_(-1.0)
    scale.clamp_()
    assert scale.raw.item() == 0


def test_half_precision_parameters_give_a_wide_scale():
    assert LogitScale(3.0, dtype=torch.bfloat16)().dtype == torch.float32
    assert LogitScale(3.0, dtype=torch.float64)().dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": 0.0}, "init must be positive"),
        ({"init": 3.0, "maximum": math.inf}, "maximum must be positive and finite"),
        ({"init": 30.0, "maximum": 10.0}, "init must be at most maximum=10"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        LogitScale(**options)
