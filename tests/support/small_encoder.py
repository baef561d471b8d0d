"""A sentence encoder of random weights, in the files that sentence-transformers writes."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "the", "cat", "dog", "sat", "on", "mat", "##s"]
MODULES = ("Transformer", "Pooling", "Normalize")
SIZE = 24


def write_encoder(directory: Path, **options: Any) -> BertModel:
    """Write a small encoder and return its model."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=32,
        **options,
    )
    model = BertModel(config).eval()
    with torch.no_grad():  # away from the initial values, where biases are 0 and norms have no effect
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer: Any = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=16)  # as the real one has, which must have no effect
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (directory / "1_Pooling").mkdir()
    write(directory / "1_Pooling/config.json", {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    write(directory / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
    write(directory / "modules.json", [{"type": f"sentence_transformers.models.{kind}"} for kind in MODULES])
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return model


def write(path: Path, values: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(values))
