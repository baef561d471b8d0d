"""The classifier that a configuration names, trained through `hetxl train`'s own loop."""

import pytest
import torch

from hetxl.classifiers import SampledClassifier
from hetxl.training.classifiers import build_classifier
from hetxl.training.files import read_json
from hetxl.training.progress import Narrator
from hetxl.training.run import load_run
from hetxl.training.train import train
from support.training import small


def test_the_heads_own_linear_layer_unless_stated():
    assert build_classifier(small(), 4, 6, None) is None


def test_options_reach_the_classifier():
    found = build_classifier(small(classifier="sampled", negatives=7), 4, 60, -10.0)
    assert isinstance(found, SampledClassifier)
    assert (found.negatives, found.in_features, found.num_classes) == (7, 4, 60)
    assert (found.bias == -10).all()


def test_it_starts_from_the_weights_of_a_linear_layer():
    torch.manual_seed(0)
    found = build_classifier(small(classifier="sampled"), 4, 60, None)
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 60)
    assert torch.equal(found.weight, linear.weight)
    assert torch.equal(found.bias, linear.bias)


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_a_sampled_training_is_evaluated_over_all_classes(head, tmp_path):
    results = {}
    for classifier in ("linear", "sampled"):
        options = {"data": "synthetic:rows=1500,classes=40,features=6", "head": head, "steps": 60, "batch_size": 32}
        options |= {"classifier": classifier, "negatives": 20, "learning_rate": 0.05, "out": str(tmp_path / classifier)}
        run = train(small(**options), narrator=Narrator(quiet=True))
        results[classifier] = read_json(run.path / "result.json")["metrics"]["test"]["nll"]
        loaded = load_run(run.path)
        assert isinstance(loaded.model.head.classifier, SampledClassifier) == (classifier == "sampled")
        probs = loaded.model.head.predict(torch.randn(2, 6)).probs
        torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert abs(results["sampled"] / results["linear"] - 1) < 0.05
