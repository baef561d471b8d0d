import json

import numpy as np
import pytest

from hetxl.contrastive.model import Specs, build_towers
from hetxl.contrastive.results import EXAMPLES, evaluate_pairs, summary_line
from hetxl.contrastive.texts import TextReader
from hetxl.contrastive.train import open_data
from support.pairs import picture_folder, small, vectors_file

READER = TextReader(buckets=64)


def evaluated(config, **options):
    pairs = open_data(config)
    model = build_towers(config, Specs(pairs.image, READER.spec(pairs))).eval()
    return evaluate_pairs(model, pairs, READER, config, **options)


def test_pictures(tmp_path):
    config = small(picture_folder(tmp_path / "shapes", each=8), swap=0.4)
    found = evaluated(config, samples=2)
    assert set(found.result["metrics"]) == {"validation", "test"}
    assert found.result["metrics"]["test"]["zero_shot_sampled"]["samples"] == 2
    assert found.result["swaps"]["swapped"] == pytest.approx(0.4, abs=0.05)
    entry = found.examples["zero_shot"][0]
    assert entry["unseen"] is True  # every caption is its picture's own
    assert len(entry["top"]) == 3
    assert entry["hit"] == (entry["top"][0][0] == entry["label"])
    assert entry["path"].endswith(".png")
    noise = [one["noise"] for one in found.examples["noisiest"]]
    assert noise == sorted(noise, reverse=True)
    assert len(noise) == EXAMPLES // 2
    assert noise[-1] >= found.examples["calmest"][0]["noise"]
    assert {one["swapped"] for one in found.examples["noisiest"] + found.examples["calmest"]} == {True, False}
    json.dumps(found.result | found.examples, allow_nan=False)
    line = summary_line(found.result)
    for words in ("test zero-shot top-1", "validation recall@1", "AUROC of the noise", "AUROC of the distance"):
        assert words in line


def test_without_noise_there_are_no_draws(tmp_path):
    found = evaluated(small(picture_folder(tmp_path / "shapes"), head="det", eval_samples=5))
    assert "zero_shot_sampled" not in found.result["metrics"]["test"]
    assert "noisiest" not in found.examples
    assert "AUROC" not in summary_line(found.result)


def test_vectors_have_nothing_to_show(tmp_path):
    found = evaluated(small(vectors_file(tmp_path / "x.npz")))
    assert found.examples["zero_shot"] == []
    assert found.examples["noisiest"][0]["image"] is None
    assert found.examples["noisiest"][0]["label"] == ""


def test_a_test_split_alone(tmp_path):
    split = np.array(["test"] * 80)
    found = evaluated(small(vectors_file(tmp_path / "x.npz", captions=True, split=split)))
    assert set(found.result["metrics"]) == {"test"}
    assert "unseen_top1" not in found.result["metrics"]["test"]["zero_shot"]
