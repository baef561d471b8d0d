import dataclasses
import json

import numpy as np
import pytest
import torch

from hetxl.contrastive import zero_shot_log_probs
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.pairs import open_pairs, swapped
from hetxl_train.distributed import World
from hetxl_train.estimate import Estimate
from hetxl_train.loaders import Parts
from hetxl_train.tasks.contrastive import (
    EXAMPLES,
    ContrastiveTask,
    classes_of,
    evaluate_pairs,
    recall_of,
    swap_scores,
    validation_metrics,
    zero_shot,
)
from hetxl_train.towers import Specs, TextReader, build_towers, embed_pairs
from support.pairs import QUIET, image_folder, small_pairs, vectors_file

READER = TextReader(buckets=64)


@pytest.fixture
def split(tmp_path):
    names = [f"name {row // 2}" for row in range(80)]  # each twice
    return open_pairs(vectors_file(tmp_path / "x.npz", captions=names), whole=True).splits["test"]


@pytest.fixture
def model():
    return build_towers(small_pairs("x"), Specs(_vectors(), None)).eval()


def _vectors():
    return InputSpec("features", (6,))


@pytest.fixture
def known(split, model):
    """Embeddings of images that are those of their texts: of a model that knows everything."""
    embedded = embed_pairs(model, split, READER.table(split.texts))
    return embedded._replace(images=embedded.texts.clone())


def accuracy(model, embedded, templates=("{}",), **options):
    return zero_shot(model, embedded, classes_of(model, embedded, READER, templates), **options)


def test_a_model_that_knows_everything_is_always_right(model, known):
    metrics = accuracy(model, known, seen={"name 0", "name 1"})
    assert metrics["classes"] == 40
    assert metrics["chance"] == 1 / 40
    assert metrics["top1"] == metrics["top5"] == metrics["unseen_top1"] == 1
    assert metrics["unseen_classes"] == 38
    assert set(recall_of(model, known).values()) == {1.0}


def test_a_model_that_knows_nothing_is_at_chance(model, known):
    images = torch.randn(len(known.rows), 8, generator=torch.Generator().manual_seed(0))
    metrics = accuracy(model, known._replace(images=images))
    assert metrics["top1"] < 0.2
    assert metrics["top5"] < 0.4
    assert "unseen_top1" not in metrics


def test_a_model_that_knows_the_seen_half_of_the_classes_is_right_on_those(split, model, known):
    images = known.images.clone()
    wrong = np.array([int(split.caption(row).split()[1]) >= 20 for row in known.rows])
    images[torch.from_numpy(wrong)] *= -1
    metrics = accuracy(model, known._replace(images=images), seen={f"name {number}" for number in range(20)})
    assert metrics["top1"] == 0.5
    assert metrics["unseen_top1"] == 0


def test_zero_shot_nll_is_that_of_the_log_probabilities_of_the_own_classes(model, known):
    classes = classes_of(model, known, READER, ("{}",))
    log_probs = zero_shot_log_probs(model.loss, known.images, classes.weights)
    own = log_probs[torch.arange(len(known.rows)), torch.from_numpy(classes.labels)]
    assert accuracy(model, known)["nll"] == pytest.approx(-own.mean().item(), rel=1e-5)
    images = torch.randn(len(known.rows), 8, generator=torch.Generator().manual_seed(0))
    assert accuracy(model, known._replace(images=images))["nll"] > accuracy(model, known)["nll"]


def test_draws_are_seeded(model, known):
    first, again = (accuracy(model, known, ("{}", "a {}"), seed=1, samples=3) for _ in range(2))
    assert first == again
    assert first["samples"] == 3


def test_validation_loss_is_the_mean_over_whole_batches(split, model):
    table = READER.table(split.texts)
    metrics = validation_metrics(model, split, table, limit=70, batch_size=32)
    rows = np.random.default_rng(0).permutation(80)[:70]
    embedded = embed_pairs(model, split, table, rows)
    parts = (slice(0, 32), slice(32, 64))
    with torch.no_grad():
        losses = [model.loss(embedded.images[part], embedded.texts[part], num_samples=0) for part in parts]
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)
    assert "image_to_text@10" in metrics
    assert validation_metrics(model, split, table, limit=5, batch_size=32)["loss"] > 0


def test_scores_find_swapped_pairs(tmp_path, model):
    clean = open_pairs(vectors_file(tmp_path / "y.npz", captions=True), whole=True).splits["test"]
    noisy = swapped(clean, 0.3, seed=1)
    table = READER.table(noisy.texts)
    before, after = embed_pairs(model, clean, table), embed_pairs(model, noisy, table)
    # Images that are those of the texts they had before the swap.
    scores = swap_scores(model, after._replace(images=before.texts))
    assert scores["swapped"] == pytest.approx(0.3)
    assert scores["distance_auroc"] == 1
    assert 0 <= scores["noise_auroc"] <= 1
    assert scores["noise_mean_swapped"] > 0
    det = build_towers(small_pairs("x", head="det"), Specs(_vectors(), None)).eval()
    assert "noise_auroc" not in swap_scores(det, embed_pairs(det, noisy, table))
    none = dataclasses.replace(clean, swaps=swapped(clean, 0).swaps)
    assert swap_scores(model, before._replace(split=none))["distance_auroc"] is None
    with pytest.raises(ValueError, match="split must have swaps, found none"):
        swap_scores(model, before)


def evaluated(config, **options):
    pairs = ContrastiveTask.open(config)
    model = build_towers(config, Specs(pairs.image, READER.spec(pairs))).eval()
    return evaluate_pairs(model, pairs, READER, config, **options)


def test_images_are_evaluated_in_every_way(tmp_path):
    config = small_pairs(image_folder(tmp_path / "shapes", each=8), swap=0.4)
    evaluation = evaluated(config, samples=2)
    assert set(evaluation.result["metrics"]) == {"validation", "test"}
    assert evaluation.result["metrics"]["test"]["zero_shot_sampled"]["samples"] == 2
    assert evaluation.result["swaps"]["swapped"] == pytest.approx(0.4, abs=0.05)
    entry = evaluation.examples["zero_shot"][0]
    assert entry["unseen"] is True  # every caption is its image's own
    assert len(entry["top"]) == 3
    assert entry["hit"] == (entry["top"][0][0] == entry["label"])
    assert entry["path"].endswith(".png")
    noise = [entry["noise"] for entry in evaluation.examples["noisiest"]]
    assert noise == sorted(noise, reverse=True)
    assert len(noise) == EXAMPLES // 2
    assert noise[-1] >= evaluation.examples["calmest"][0]["noise"]
    entries = evaluation.examples["noisiest"] + evaluation.examples["calmest"]
    assert {entry["swapped"] for entry in entries} == {True, False}
    json.dumps(evaluation.result | evaluation.examples, allow_nan=False)
    line = ContrastiveTask.summary(evaluation.result)
    for words in ("test zero-shot top-1", "validation recall@1", "AUROC of the noise", "AUROC of the distance"):
        assert words in line


def test_without_noise_there_are_no_draws(tmp_path):
    evaluation = evaluated(small_pairs(image_folder(tmp_path / "shapes"), head="det", eval_samples=5))
    assert "zero_shot_sampled" not in evaluation.result["metrics"]["test"]
    assert "noisiest" not in evaluation.examples
    assert "AUROC" not in ContrastiveTask.summary(evaluation.result)


def test_vectors_have_nothing_to_show(tmp_path):
    evaluation = evaluated(small_pairs(vectors_file(tmp_path / "x.npz")))
    assert evaluation.examples["zero_shot"] == []
    assert evaluation.examples["noisiest"][0]["image"] is None
    assert evaluation.examples["noisiest"][0]["label"] == ""


def test_a_test_split_alone_has_no_unseen_names(tmp_path):
    split = np.array(["test"] * 80)
    evaluation = evaluated(small_pairs(vectors_file(tmp_path / "x.npz", captions=True, split=split)))
    assert set(evaluation.result["metrics"]) == {"test"}
    assert "unseen_top1" not in evaluation.result["metrics"]["test"]["zero_shot"]


def test_estimate_leaves_the_model_unchanged(tmp_path):
    config = small_pairs(image_folder(tmp_path / "shapes"), steps=9)
    task = ContrastiveTask(config, ContrastiveTask.open(config), World(torch.device("cpu")), QUIET, tmp_path)
    model = task.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    estimate = task.estimate(Parts(config.batch_size, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert estimate.seconds_per_step > 0
    assert estimate.steps == 9
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert estimate.memory["weights"] == estimate.memory["their gradients"] == weights
    assert estimate.memory["the towers' activations"] > 16 * 16 * 16 * 8 * 4  # the first stage alone


def test_an_estimate_is_one_line():
    memory = {"weights": 3_000_000, "the towers' activations": 2_000_000_000}
    assert str(Estimate(memory, 0.5, 100)) == (
        "about 50 s for 100 steps; 2.0 GB of memory, most of it the towers' activations (2.0 GB)"
    )
