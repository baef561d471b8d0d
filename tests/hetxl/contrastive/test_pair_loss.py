"""Losses computed block by block, against the plain formulas with all samples at once, for every option."""

import itertools

import pytest
import torch

from hetxl.contrastive import ContrastiveLoss, PairLoss
from hetxl.functional.contrastive import NORMALIZE, contrastive_keys, contrastive_loss, noise_base, noisy_queries

B, D = 9, 6
NOISES = ("both", "image", "text", "none")
LINKS = ("softmax", "sigmoid")
FORMS = [
    {"covariance": "low_rank", "rank": 2},
    {"covariance": "low_rank", "rank": 2, "residual": "diagonal"},
    {"covariance": "efficient", "rank": 2},
    {"covariance": "diagonal"},
    {"covariance": "full"},
]


def embeddings(count=B, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, count, D, dtype=torch.float64, generator=generator)
    return image.requires_grad_(), text.requires_grad_()


def build_loss(**options):
    torch.manual_seed(0)
    options = {"rank": 2, "noise_init": 0.8, "bias_init": -1.0} | options
    return ContrastiveLoss(D, dtype=torch.float64, **options)


def normals(loss, samples, count=B):
    generator = torch.Generator().manual_seed(3)
    modules = loss.image_noise, loss.text_noise
    return tuple(None if module is None else module.draw(count, samples, generator) for module in modules)


def reference(loss, image, text, z):
    """The paper's formulas, with the parameters of a loss."""
    queries = []
    for module, side, normal in ((loss.image_noise, image, z[0]), (loss.text_noise, text, z[1])):
        noise = None if module is None else module(noise_base(side, loss.normalize))
        queries.append(noisy_queries(side, noise, normal, loss.normalize))
    keys = contrastive_keys(image, loss.normalize), contrastive_keys(text, loss.normalize)
    bias = 0.0 if loss.bias is None else loss.bias
    return contrastive_loss(*queries, *keys, link=loss.link, scale=loss.scale(), bias=bias)


def assert_same(loss, actual, expected, *inputs):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    leaves = [*inputs, *loss.parameters()]
    pairs = zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for computed_gradient, reference in pairs:
        torch.testing.assert_close(computed_gradient, reference, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("link", "noise", "normalize"), [*itertools.product(LINKS, NOISES, NORMALIZE)])
def test_the_loss_is_that_of_the_formulas(link, noise, normalize):
    for samples in (1, 2, 5):  # as they are, as factors, and more than the basis has rows
        loss, (image, text) = build_loss(link=link, noise=noise, normalize=normalize, num_samples=samples), embeddings()
        z = normals(loss, samples)
        assert_same(loss, loss(image, text, noise=z), reference(loss, image, text, z), image, text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("samples", [1, 3, 10])
def test_loss_equals_the_reference_for_every_covariance(form, samples):
    loss, (image, text) = build_loss(**form), embeddings()
    z = normals(loss, samples)
    assert_same(loss, loss(image, text, noise=z), reference(loss, image, text, z), image, text)


@pytest.mark.parametrize("options", [{"memory_budget": 400}, {"chunk": 4}, {"chunk": 4, "gather": "ring"}])
@pytest.mark.parametrize("samples", [1, 3, 10])
def test_sigmoid_loss_in_small_blocks_equals_the_reference(options, samples):
    loss, (image, text) = build_loss(link="sigmoid", **options), embeddings()
    z = normals(loss, samples)
    assert_same(loss, loss(image, text, noise=z), reference(loss, image, text, z), image, text)


def test_softmax_loss_in_small_blocks_equals_the_reference():
    loss, (image, text) = build_loss(memory_budget=400), embeddings()
    z = normals(loss, 3)
    assert_same(loss, loss(image, text, noise=z), reference(loss, image, text, z), image, text)


def test_normals_may_be_shared_by_the_batch():
    loss, (image, text) = build_loss(), embeddings()
    z = tuple(normal[0] for normal in normals(loss, 2))
    assert_same(loss, loss(image, text, noise=z), reference(loss, image, text, z), image, text)


def test_draws_of_groups_are_draws():
    count = 40
    loss, (image, text) = build_loss(rank=6, noise_group=2), embeddings(count)
    assert loss.image_noise.group_of(count, 1) == 2
    actual = loss(image, text, generator=torch.Generator().manual_seed(3))
    assert_same(loss, actual, reference(loss, image, text, normals(loss, 1, count)), image, text)


def test_draws_come_from_the_generator():
    loss, (image, text) = build_loss(), embeddings()
    first, again, different = (loss(image, text, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, different)
    torch.manual_seed(4)
    first = loss(image, text)
    torch.manual_seed(4)
    assert torch.equal(first, loss(image, text))


def test_one_side_may_be_drawn_and_the_other_given():
    loss, (image, text) = build_loss(), embeddings()
    z = normals(loss, 1)
    drawn = loss(image, text, noise=(z[0], None), generator=torch.Generator().manual_seed(7))
    expected = (z[0], loss.text_noise.draw(B, 1, torch.Generator().manual_seed(7)))
    torch.testing.assert_close(drawn, reference(loss, image, text, expected))


@pytest.mark.parametrize("link", LINKS)
def test_without_samples_there_is_no_noise_and_every_parameter_has_a_gradient(link):
    loss, (image, text) = build_loss(link=link), embeddings()
    actual = loss(image, text, num_samples=0)
    torch.testing.assert_close(actual, build_loss(link=link, noise="none", scale_init=3.0)(image, text))
    actual.backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


def test_no_gradients_without_grad_mode():
    loss, (image, text) = build_loss(link="sigmoid", chunk=3), embeddings()
    with torch.no_grad():
        assert not loss(image, text, num_samples=0).requires_grad
        assert not loss(image, text).requires_grad


def test_half_precision_embeddings():
    loss = ContrastiveLoss(D, rank=2)
    image, text = (value.detach().bfloat16().requires_grad_() for value in embeddings())
    actual = loss(image, text, generator=torch.Generator().manual_seed(0))
    assert actual.dtype == torch.float32
    wide = loss(image.float(), text.float(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(actual, wide)
    actual.backward()
    assert image.grad.dtype == torch.bfloat16


def test_embeddings_at_test_time_follow_normalize():
    image, _ = embeddings()
    for normalize in NORMALIZE:
        loss = build_loss(normalize=normalize)
        lengths = loss.embed_image(image).norm(dim=-1)
        assert torch.allclose(lengths, torch.ones_like(lengths)) == (normalize != "none")
        torch.testing.assert_close(loss.embed_text(image), loss.embed_image(image))
    loss = build_loss()
    base = noise_base(image, "before")
    assert loss.image_noise is not None
    torch.testing.assert_close(loss.noise_of_image(image).covariance(), loss.image_noise(base).covariance())
    assert loss.noise_of_image(image).size == loss.image_noise.size


def test_loss_of_one_pair_is_zero():
    image, text = embeddings(1)
    assert build_loss()(image, text).item() == pytest.approx(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "softmx"}, "did you mean 'softmax'"),
        ({"noise": "images"}, "did you mean 'image'"),
        ({"normalize": True}, "normalize must be one of"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"chunk": 4}, 'chunk=4 is for link="sigmoid"'),
        ({"gather": "ring"}, 'gather="ring" is for link="sigmoid"'),
        ({"gather": "all"}, "gather must be True, False or"),
        ({"link": "sigmoid", "gather": "ring", "local_loss": False}, "local_loss=False cannot be combined with"),
        ({"memory_budget": 0}, "memory_budget must be at least 1"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        PairLoss(D, **options)


def test_invalid_inputs_raise():
    loss, (image, text) = build_loss(), embeddings()
    with pytest.raises(ValueError, match=r"image must have shape \[B, 6\], found \[9, 5\]"):
        loss(image[:, :5], text)
    with pytest.raises(ValueError, match="9 images and 4 texts"):
        loss(image, text[:4])
    with pytest.raises(ValueError, match="at least one pair"):
        loss(image[:0], text[:0])
    with pytest.raises(ValueError, match=r"noise for the text side must be normals of shape \[9, S, 3\]"):
        loss(image, text, noise=(None, torch.zeros(9, 1, 4)))
    with pytest.raises(ValueError, match="normals for the text side, which has no noise"):
        build_loss(noise="image")(image, text, noise=(None, torch.zeros(9, 1, 3)))
    with pytest.raises(ValueError, match="no noise on the image side"):
        build_loss(noise="text").noise_of_image(image)
    with pytest.raises(ValueError, match="num_samples must be at least 0"):
        loss(image, text, num_samples=-1)


def test_repr_has_the_options():
    assert "link='softmax', noise='both', num_samples=1" in repr(build_loss())


def test_the_sigmoid_has_one_draw_of_a_pair_for_both_sides():
    loss, (image, text) = build_loss(link="sigmoid"), embeddings()
    z = normals(loss, 3)
    with pytest.raises(ValueError, match="found 3 and 2; pass num_samples=3"):
        loss(image, text, noise=(z[0], z[1][:, :2]))
    mixed = z[0], z[1][:, :1]  # one for all
    assert_same(loss, loss(image, text, noise=mixed), reference(loss, image, text, mixed), image, text)


@pytest.mark.parametrize(("noise", "side"), [("text", 0), ("image", 1), ("none", 1)])
def test_normals_of_a_sigmoid_side_without_noise(noise, side):
    loss, (image, text) = build_loss(link="sigmoid", noise=noise), embeddings()
    z = [None, None]
    z[side] = torch.zeros(B, 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="which has no noise"):
        loss(image, text, noise=tuple(z))
