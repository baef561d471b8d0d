"""Backbone and head as one: the same start for every head, and the link that the data asks for."""

import os
import resource
import shutil

import numpy as np
import pytest
import torch

from hetxl._files import read_json
from hetxl.classifiers import SampledClassifier
from hetxl.nn import DetHead, HetHashHead, HetHead, HetXLHead, LearnedTemperature
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.distributed import World
from hetxl_train.model import (
    FeatureFile,
    build_classifier,
    build_model,
    cached_features,
    feature_batches,
    head_options,
    link_of,
)
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support.training import QUIET, small, write_images

SPEC = InputSpec("features", (4,))
HEADS = {"det": DetHead, "het": HetHead, "het-h": HetHashHead, "het-xl": HetXLHead}

ALONE = World(torch.device("cpu"))


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
    first = build()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    second = build()
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


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


def test_temperature_option_is_parsed():
    def option(**options):
        return head_options(small(**options), "softmax")["temperature"]

    assert option(head="det") == option(head="het") == 1
    assert isinstance(option(head="det", temperature="learned"), LearnedTemperature)
    assert option(temperature="0.5") == option(temperature=0.5) == 0.5
    assert float(build(temperature="learned", temperature_init=1.5).head.temperature().detach()) == pytest.approx(1.5)
    bounded = option(temperature="learned", temperature_low=0.5, temperature_high=2.0)
    assert (bounded.low, bounded.high, bounded.init) == (0.5, 2.0, 1.0)
    assert build(head="det").head.temperature() == 1.0


def test_the_initial_bias_can_be_set():
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


def test_the_heads_own_linear_layer_unless_stated():
    assert build_classifier(small(), 4, 6, None) is None


def test_options_reach_the_classifier():
    classifier = build_classifier(small(classifier="sampled", negatives=7), 4, 60, -10.0)
    assert isinstance(classifier, SampledClassifier)
    assert (classifier.negatives, classifier.in_features, classifier.num_classes) == (7, 4, 60)
    assert (classifier.bias == -10).all()


def test_sampled_classifier_starts_from_the_weights_of_a_linear_layer():
    torch.manual_seed(0)
    classifier = build_classifier(small(classifier="sampled"), 4, 60, None)
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 60)
    assert torch.equal(classifier.weight, linear.weight)
    assert torch.equal(classifier.bias, linear.bias)


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_sampled_run_is_evaluated_over_all_classes(head, tmp_path):
    results = {}
    for classifier in ("linear", "sampled"):
        options = {"data": "synthetic:rows=1500,classes=40,features=6", "head": head, "steps": 60, "batch_size": 32}
        options |= {"classifier": classifier, "negatives": 20, "learning_rate": 0.05, "out": str(tmp_path / classifier)}
        run = train(small(**options), console=Console(quiet=True))
        results[classifier] = read_json(run.path / "result.json")["metrics"]["test"]["nll"]
        loaded = load_run(run.path)
        assert isinstance(loaded.model.head.classifier, SampledClassifier) == (classifier == "sampled")
        probs = loaded.model.head.predict(torch.randn(2, 6)).probs
        torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert abs(results["sampled"] / results["linear"] - 1) < 0.05


CPU = torch.device("cpu")


def opened(root, **options):
    config = small(data=str(root), backbone="cnn", width=8, depth=1, features=6, image_size=16, frozen=True, **options)
    dataset = open_dataset(str(root), transform=ImageTransform(16))
    return config, dataset, build_model(config, dataset.input, dataset.num_classes, "softmax")


def test_cached_features_are_the_computed_ones(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images", each=20))
    view, splits = cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    assert view.head is model.head
    assert set(splits) == set(dataset.splits)
    for name, split in splits.items():
        source = dataset.splits[name]
        rows = np.arange(len(source))
        fetched = split.fetch(rows[::-1])
        np.testing.assert_array_equal(fetched.rows, rows[::-1])
        with torch.no_grad():
            expected = model.backbone(source.fetch(rows).inputs)
            torch.testing.assert_close(view.backbone(fetched.inputs).flip(0), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(split.labels.ids, source.labels.ids)
        assert split.show(0) == source.show(0)
        assert fetched.inputs.dtype == torch.float32
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        f"{name}{part}" for name in splits for part in (".npy", "_rows.npy", ".json")
    }


def test_cached_features_are_reused(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images"), workers=0)
    files = [tmp_path / "cache" / f"{name}.npy" for name in dataset.splits]
    cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    before = [path.stat().st_ino for path in files]
    cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    assert [path.stat().st_ino for path in files] == before


def renamed_class(images, cache):
    (images / "blue").rename(images / "violet")  # comes last now: other rows, other labels


def removed_class(images, cache):
    shutil.rmtree(images / "blue")


def changed_images(images, cache):
    for number in range(6):
        shutil.copy(images / "blue" / f"{number:03d}.png", images / "red" / f"{number:03d}.png")


def flipped_bit(images, cache):
    content = bytearray((cache / "train.npy").read_bytes())
    content[-1] ^= 1
    (cache / "train.npy").write_bytes(content)


def emptied(images, cache):
    (cache / "train.npy").write_bytes(b"")


def fewer_rows(images, cache):
    np.save(cache / "train.npy", np.load(cache / "train.npy")[:3])


def damaged_description(images, cache):
    (cache / "train.json").write_text("[" * 100_000)


DAMAGES = [renamed_class, removed_class, changed_images, flipped_bit, emptied, fewer_rows, damaged_description]


@pytest.mark.parametrize("damage", DAMAGES)
def test_features_of_other_data_or_damaged_ones_are_computed_again(tmp_path, damage):
    images, cache = write_images(tmp_path / "images", classes=("blue", "red", "teal")), tmp_path / "cache"
    config, dataset, model = opened(images, workers=0)
    cached_features(cache, model, dataset, config.workers, QUIET, ALONE)
    damage(images, cache)
    _, dataset, _ = opened(images, workers=0)
    _, splits = cached_features(cache, model, dataset, config.workers, QUIET, ALONE)
    rows = np.arange(len(dataset.splits["train"]))
    assert len(splits["train"]) == len(rows)
    with torch.no_grad():
        expected = model.backbone(dataset.splits["train"].fetch(rows).inputs)
    torch.testing.assert_close(splits["train"].fetch(rows).inputs, expected, rtol=1e-4, atol=1e-5)


def test_features_of_another_backbone_are_computed_again(tmp_path):
    images, cache = write_images(tmp_path / "images"), tmp_path / "cache"
    for seed in (0, 1):
        config, dataset, model = opened(images, workers=0, seed=seed)
        _, splits = cached_features(cache, model, dataset, config.workers, QUIET, ALONE)
        rows = np.arange(len(dataset.splits["train"]))
        with torch.no_grad():
            expected = model.backbone(dataset.splits["train"].fetch(rows).inputs)
        torch.testing.assert_close(splits["train"].fetch(rows).inputs, expected, rtol=1e-4, atol=1e-5)


def test_full_disk_while_features_are_written_leaves_nothing(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images"), workers=0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        with pytest.raises(OSError, match=r"free some space and rerun the command: .*train-pieces"):
            cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list((tmp_path / "cache").iterdir()) == []


def test_unreadable_images_are_left_out(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images"), workers=0)
    train = dataset.splits["train"]
    with open(train.show(1).image, "w") as file:
        file.write("not an image")
    _, splits = cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    features = splits["train"]
    assert isinstance(features, FeatureFile)
    others = np.delete(np.arange(len(train)), 1)
    assert len(features) == len(others) == len(features.array)
    np.testing.assert_array_equal(features.source_rows, others)
    np.testing.assert_array_equal(features.labels.ids, train.labels.ids[others])
    assert features.show(1) == train.show(2)
    with torch.no_grad():
        expected = model.backbone(train.fetch(others).inputs)
    torch.testing.assert_close(features.fetch(np.arange(len(others))).inputs, expected, rtol=1e-4, atol=1e-5)


def test_too_many_unreadable_images_raise(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images", each=80, size=8), workers=0)
    train = dataset.splits["train"]
    for row in range(20):
        with open(train.show(row).image, "w") as file:
            file.write("not an image")
    with pytest.raises(ValueError, match=r"20 of \d+ examples could not be read, more than 1.0%"):
        cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    assert os.listdir(tmp_path / "cache") == ["train_broken.txt"]


def test_no_readable_images_raise(tmp_path):
    config, dataset, model = opened(write_images(tmp_path / "images", each=4), workers=0)
    for row in range(len(dataset.splits["train"])):
        with open(dataset.splits["train"].show(row).image, "w") as file:
            file.write("not an image")
    with pytest.raises(ValueError, match=r"none of the \d train examples could be read: .*: not an image"):
        cached_features(tmp_path / "cache", model, dataset, config.workers, QUIET, ALONE)
    assert os.listdir(tmp_path / "cache") == []


def test_feature_batches_use_evaluation_mode_and_restore_the_mode(tmp_path):
    config, dataset, _ = opened(write_images(tmp_path / "images", each=45, size=8), workers=0)
    config = small(backbone="timm:test_resnet", pretrained=False, image_size=16)
    backbone = build_model(config, dataset.input, 2, "softmax").backbone.train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    split = dataset.splits["train"]
    batches = list(feature_batches(backbone, split, np.arange(len(split)), 0, CPU))
    assert len(batches) == 2  # batches of 64
    assert not batches[0][0].requires_grad
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in batches]), np.arange(len(split)))
    with_workers = list(feature_batches(backbone, split, np.arange(len(split)), 2, CPU))
    for (features, _), (expected, _) in zip(batches, with_workers, strict=True):
        assert torch.equal(features, expected)
