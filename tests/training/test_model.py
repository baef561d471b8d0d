"""Backbone and head as one: the same start for every head, and the link that the data asks for."""

import pytest
import torch

from hetxl.data.dataset import InputSpec
from hetxl.data.synthetic import load_synthetic
from hetxl.nn import DetHead, HetHashHead, HetHead, HetXLHead, LearnedTemperature
from hetxl.training.model import SIGMOID_BIAS, build_model, head_options, link_of
from support.training import small

SPEC = InputSpec("features", (4,))
HEADS = {"det": DetHead, "het": HetHead, "het-h": HetHashHead, "het-xl": HetXLHead}


def build(link="softmax", classes=6, **options):
    return build_model(small(backbone="mlp", width=8, features=5, **options), SPEC, classes, link)


def test_every_head_of_a_seed_starts_from_the_same_weights():
    models = {name: build(head=name) for name in HEADS}
    first = models["det"].state_dict()
    for name, model in models.items():
        assert type(model.head) is HEADS[name]
        for key, value in model.state_dict().items():
            if key.startswith(("backbone.", "head.classifier.")):
                assert torch.equal(value, first[key]), (name, key)
    assert not torch.equal(build(seed=1).backbone.body.first.weight, first["backbone.body.first.weight"])
    assert not torch.equal(build(seed=1).head.classifier.weight, first["head.classifier.weight"])


def test_the_classifier_does_not_depend_on_the_backbones_draws():
    deep, flat = build(depth=3), build(depth=1)
    assert torch.equal(deep.head.classifier.weight, flat.head.classifier.weight)


def test_other_draws_are_not_disturbed():
    before = torch.get_rng_state()
    one = build()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    two = build()
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())


def test_forward_is_the_heads():
    model, inputs, targets = build(head="det").eval(), torch.randn(3, 4), torch.tensor([0, 5, 2])
    features = model.backbone(inputs)
    assert torch.equal(model(inputs), model.head(features))
    loss = model(inputs, targets, reduction="sum")
    torch.testing.assert_close(loss, -model(inputs)[torch.arange(3), targets].sum())


def test_options_reach_the_head():
    model = build(rank=2, covariance="low_rank", residual="diagonal", noise_features=3, train_samples=7, sampler="iid")
    assert (model.head.noise_features, model.head.train_samples, model.head.sampler) == (3, 7, "iid")
    assert model.head.covariance.size == 2 + 3
    assert build(head="het-h", buckets=4).head.buckets == 4
    assert build(eval_samples=9).head.eval_samples == 9


def test_temperature():
    def option(**options):
        return head_options(small(**options), "softmax")["temperature"]

    assert option(head="det") == option(head="het") == 1
    assert isinstance(option(head="det", temperature="learned"), LearnedTemperature)
    assert option(temperature="0.5") == option(temperature=0.5) == 0.5
    assert float(build(temperature="learned", temperature_init=1.5).head.temperature().detach()) == pytest.approx(1.5)
    bounded = option(temperature="learned", temperature_low=0.5, temperature_high=2.0)
    assert (bounded.low, bounded.high, bounded.init) == (0.5, 2.0, 1.0)
    assert build(head="det").head.temperature() == 1.0


def test_the_bias_of_the_sigmoid_link():
    assert (build("sigmoid").head.classifier.bias == SIGMOID_BIAS).all()
    assert (build("sigmoid", bias_init=-2.0).head.classifier.bias == -2.0).all()
    assert (build("softmax").head.classifier.bias.abs() < 1).all()


def test_the_link_goes_by_the_labels():
    single = load_synthetic(rows=40, classes=3, features=2)
    lists = load_synthetic(rows=40, classes=3, features=2, multi_label=True)
    assert link_of(small(), single) == "softmax"
    assert link_of(small(), lists) == "sigmoid"
    assert link_of(small(link="sigmoid"), single) == "sigmoid"
    assert link_of(small(link="softmax"), single) == "softmax"
    with pytest.raises(ValueError, match="link = softmax needs one label for each example, but this data has lists"):
        link_of(small(link="softmax"), lists)
