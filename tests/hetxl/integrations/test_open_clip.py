"""A small model of open_clip, from a configuration: its own losses, and its own training loop with ours."""

import copy
import math
from types import SimpleNamespace

import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch

from hetxl.contrastive import ContrastiveLoss
from hetxl.integrations.export import exportable, to_onnx
from hetxl.integrations.open_clip import loss_for, unwrap, wrap, zero_shot_head

D = 16
B = 6


def clip(bias=None, seed=0):
    torch.manual_seed(seed)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=40, width=32, heads=2, layers=1)
    return CLIP(D, vision, text, init_logit_bias=bias, output_dict=True)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, 16, 16, generator=generator), torch.randint(1, 40, (B, 8), generator=generator)


def embeddings(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 9, D, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(("link", "chunk"), [("softmax", None), ("sigmoid", None), ("sigmoid", 4)])
def test_without_noise_the_losses_are_those_of_open_clip(link, chunk):
    both = embeddings()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
    image, text = torch.nn.functional.normalize(both, dim=-1)
    theirs = open_clip.ClipLoss() if link == "softmax" else SigLipLoss()
    expected = theirs(image, text, scale, None if link == "softmax" else bias)
    loss = ContrastiveLoss(D, link=link, noise="none", scale_init=7.0, bias_init=-4.0, chunk=chunk, dtype=torch.float64)
    actual = loss(*both)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    actual, expected = torch.autograd.grad(actual, (both, loss.scale.raw)), torch.autograd.grad(expected, (both, scale))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(actual[1].squeeze(), 7 * expected[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bias", [None, -10.0])
def test_a_wrapped_model_is_trained_by_a_few_steps(bias):
    model = wrap(clip(bias), rank=3, scale_init=3.0)
    assert model.logit_scale.exp().item() == pytest.approx(3.0)
    loss = loss_for(model)
    assert list(loss.parameters()) == []
    assert model.hetxl_noise.link == ("softmax" if bias is None else "sigmoid")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = []
    for _ in range(8):
        optimiser.zero_grad()
        actual = loss(**model(*batch()), output_dict=True)
        actual["contrastive_loss"].backward()
        optimiser.step()
        values.append(actual["contrastive_loss"].item())
    assert values[-1] < values[0]
    for name, value in model.named_parameters():
        assert not torch.equal(value, before[name]), name


class Loader(list):
    """What open_clip's loop asks of its data."""

    @property
    def num_batches(self):
        return len(self)

    @property
    def num_samples(self):
        return B * len(self)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_wrapped_model_trains_in_open_clips_loop(accumulate):
    model = wrap(clip(), rank=3)
    before = copy.deepcopy(model.state_dict())
    loader = Loader([batch(0), batch(1)])
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    args = SimpleNamespace(
        device="cpu",
        precision="fp32",
        accum_freq=accumulate,
        distill=False,
        skip_scheduler=True,
        grad_clip_norm=1.0,
        horovod=False,
        rank=0,
        local_rank=0,
        log_local=False,
        log_every_n_steps=100,
        batch_size=B,
        world_size=1,
        wandb=False,
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_one_epoch(model, data, loss_for(model), 0, optimiser, None, None, None, args)
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_state_dicts_keep_loading(tmp_path):
    plain = clip(seed=1)
    model = wrap(clip(), rank=3)
    noise = copy.deepcopy(model.hetxl_noise.state_dict())
    model.load_state_dict(plain.state_dict())  # strict, and without noise
    torch.testing.assert_close(model.visual.proj, plain.visual.proj)
    assert all(torch.equal(value, noise[name]) for name, value in model.hetxl_noise.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = wrap(clip(seed=2), rank=3)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    actual = [loss_for(each).noise.noise_of_image(torch.ones(1, D)).covariance() for each in (model, other)]
    assert torch.equal(*actual)


@pytest.mark.parametrize(("bias", "covariance"), [(None, "low_rank"), (-2.0, "efficient")])
def test_zero_shot_head_averages_over_the_noise_of_the_model(bias, covariance, tmp_path):
    model = wrap(clip(bias), rank=3, covariance=covariance, noise_init=0.5, scale_init=20.0).eval()
    images, texts = batch()
    with torch.no_grad():
        images, weights = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
        head = zero_shot_head(model, weights, eval_samples=8)
        z = head.covariance.draw("iid", 5)
        embeddings = images.unsqueeze(1) + model.hetxl_noise.image_noise(images).draw(z)
        logits = model.logit_scale.exp() * (embeddings @ weights.T) + (bias or 0.0)
        expected = (logits.softmax(-1) if bias is None else logits.sigmoid()).mean(1)
    prediction = head.predict(images, noise=z)
    torch.testing.assert_close(prediction.probs, expected)
    assert (prediction.mutual_information > 1e-4).all()
    module = exportable(head, uncertainty=True)
    assert to_onnx(module, tmp_path / "zero_shot.onnx", images) < 1e-5
    with pytest.raises(ValueError, match=r"must have noise on its image embeddings .* found noise='text'"):
        zero_shot_head(wrap(clip(), noise="text"), weights)


def test_a_damaged_state_dict_is_still_refused():
    model = wrap(clip(), rank=3)
    state = model.state_dict()
    del state["hetxl_noise.image_noise.covariance.loadings.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_unwrap_restores_the_state_dict():
    plain = clip()
    model = unwrap(wrap(clip(), rank=3))
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    assert unwrap(model) is model
    with pytest.raises(ValueError, match=r"wrap\(model\) first"):
        loss_for(model)


def test_a_copy_has_noise_of_its_own():
    model = wrap(clip(), rank=3)
    other = copy.deepcopy(model)
    other.load_state_dict(clip(seed=3).state_dict())
    assert other.hetxl_noise is not model.hetxl_noise
    assert math.isfinite(loss_for(other)(**other(*batch())).item())


def test_bad_models_and_options():
    with pytest.raises(TypeError, match="found Linear"):
        wrap(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"unwrap\(model\)"):
        wrap(wrap(clip(), rank=3))
    with pytest.raises(ValueError, match='normalize must be "before" or "both", found \'after\''):
        wrap(clip(), normalize="after")
    model = clip()
    model.visual = torch.nn.Identity()
    with pytest.raises(ValueError, match="pass in_features"):
        wrap(model)
    assert wrap(model, in_features=D).hetxl_noise.in_features == D
    with pytest.raises(ValueError, match="scale_init must be positive"):
        wrap(clip(), scale_init=0.0)
