import io
import json

import pytest
from rich.console import Console

from hetxl.contrastive.evaluate_run import as_table, evaluate_run
from hetxl.contrastive.train import train
from support.pairs import QUIET, picture_folder, small, vectors_file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = small(picture_folder(folder / "shapes"), folder / "run", swap=0.3)
    return train(config, narrator=QUIET).path


def test_its_own_pairs(run):
    found = evaluate_run(run, samples=3)
    stored = json.loads((run / "result.json").read_text())
    for name, metrics in stored["metrics"].items():
        for key, value in metrics.items():
            assert found["metrics"][name][key] == value, key
    assert found["swaps"] == stored["swaps"]
    assert found["metrics"]["test"]["zero_shot_sampled"]["samples"] == 3
    console = Console(file=io.StringIO(), width=100)
    console.print(as_table(found))
    text = console.file.getvalue()
    for words in ("HET-XL on shapes", "zero-shot top-1, without noise", "mean over draws", "recall@10", "AUROC"):
        assert words in text


def test_other_pairs_are_evaluated_whole(run, tmp_path):
    found = evaluate_run(run, str(picture_folder(tmp_path / "others", each=2)), templates="{}|a {}")
    assert set(found["metrics"]) == {"test"}
    assert found["metrics"]["test"]["zero_shot"]["classes"] == 12
    assert found["metrics"]["test"]["zero_shot"]["unseen_classes"] < 12  # most were trained on
    assert "swaps" not in found


def test_bad_input(run, tmp_path):
    with pytest.raises(ValueError, match=r"has pictures as features \[6\], and the run's tower takes as image"):
        evaluate_run(run, str(vectors_file(tmp_path / "x.npz")))
    with pytest.raises(ValueError, match=r"templates must hold \{\} once each"):
        evaluate_run(run, templates="no place")
    det = train(small(vectors_file(tmp_path / "x.npz"), tmp_path / "det", head="det"), narrator=QUIET).path
    with pytest.raises(ValueError, match="samples=3 needs noise on the image side"):
        evaluate_run(det, samples=3)
