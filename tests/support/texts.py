"""Texts of three topics, and a language model that reads them."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch

WORDS = {"fish": ["swims", "gills", "water"], "bird": ["flies", "wings", "nest"], "plant": ["grows", "leaf", "root"]}


def tiny_bert(folder: Path) -> Path:
    """A tiny random BERT with its tokenizer, as a directory."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    known = [word for words in WORDS.values() for word in words]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "a", *known]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=24, **sizes)
    BertModel(config).save_pretrained(folder)
    return folder


def table(rows: int = 120) -> pd.DataFrame:
    """Texts, and their topics."""
    rng = np.random.default_rng(0)
    names = [list(WORDS)[row % 3] for row in range(rows)]
    texts = [" ".join(["it", *rng.choice(WORDS[name], rng.integers(1, 5))]) for name in names]
    return pd.DataFrame({"text": texts, "topic": names})
