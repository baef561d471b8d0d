"""Texts through the tokenizer of a language model, from a table to a trained and resumed run."""

import json
import os
import pickle
import shutil

import pandas as pd
import pytest
import torch

from hetxl_train import TrainConfig, evaluate_run, load_run, predict, train
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.open import open_data
from hetxl_train.data.text import Tokenizer
from support.texts import table, tiny_bert


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def test_texts_are_tokenized_and_padded(model):
    tokenizer = Tokenizer(str(model), 6)
    ids = tokenizer(["it swims", "it flies wings nest a a a"])
    assert ids.shape == (2, 6)
    assert ids[0].tolist()[-2:] == [-1, -1]
    assert (ids[1] >= 0).all()
    assert pickle.loads(pickle.dumps(tokenizer))(["it swims"]).tolist() == [ids[0, :4].tolist()]
    assert Tokenizer(str(model), 500).input.shape == (24,)  # no more than the model takes
    with pytest.raises(ValueError, match=r"hf:.*none has no tokenizer for texts"):
        Tokenizer(str(model / "none")).input  # noqa: B018


def test_texts_need_a_language_model(model, tmp_path):
    with pytest.raises(ValueError, match="texts need a model that reads them: use --backbone hf:NAME"):
        open_dataset(table())
    dataset = open_dataset(table(), tokenizer=Tokenizer(str(model)))
    assert dataset.splits["train"].show(0).text.startswith("it ")
    noisy = TrainConfig(backbone=f"hf:{model}", label_noise="confusable", label_noise_rate=0.2)
    assert len(open_data(noisy, data=table()).splits["train"].noise) > 10


def test_padding_does_not_change_the_features_of_a_text(model):
    from hetxl_train.backbones import build_backbone

    tokenizer = Tokenizer(str(model))
    backbone = build_backbone(TrainConfig(backbone=f"hf:{model}"), tokenizer.input).eval()
    both = backbone(tokenizer(["it swims", "it flies wings nest a a a"]))
    torch.testing.assert_close(both[:1], backbone(tokenizer(["it swims"])))


def test_a_run_on_texts_learns_resumes_and_predicts(model, tmp_path):
    table().to_json(tmp_path / "topics.jsonl", orient="records", lines=True)
    options = {"data": str(tmp_path / "topics.jsonl"), "backbone": f"hf:{model}", "label_column": "topic", "rank": 2}
    options |= {"steps": 60, "batch_size": 32, "learning_rate": 2e-2, "workers": 0, "eval_samples": 16}
    quiet = Console(quiet=True)
    whole = train(TrainConfig(**options, out=str(tmp_path / "a"), checkpoint_every=20), console=quiet)
    assert json.loads((whole.path / "result.json").read_text())["metrics"]["test"]["precision@1"] > 0.9
    assert evaluate_run(whole.path)["precision@1"] > 0.9
    out = tmp_path / "out.jsonl"
    assert predict(whole.path, pd.DataFrame({"text": ["it swims gills", "leaf root"]}), out, console=quiet) == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["source"], row["top"][0][0]) for row in rows] == [("it swims gills", "fish"), ("leaf root", "plant")]
    # Killed after step 40 and resumed: the same weights.
    again = tmp_path / "b"
    os.rename(whole.path, again)
    weights = {name: value.clone() for name, value in load_run(again).model.state_dict().items()}
    for name in ("result.json", "model.safetensors"):
        (again / name).unlink()
    for path in (again / "checkpoints").iterdir():
        if path.name.endswith("60"):
            shutil.rmtree(path)
    resumed = load_run(train(TrainConfig(**options, out=str(again), checkpoint_every=20), console=quiet).path)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
