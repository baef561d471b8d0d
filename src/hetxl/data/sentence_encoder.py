"""A sentence encoder: a small BERT, the mean over its tokens, and unit length (all-MiniLM-L6-v2 is one).

It reads the files that sentence-transformers writes and needs neither that package nor transformers; `tokenizers` cuts
the text.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, normalize, scaled_dot_product_attention

from hetxl.data.build.files import write_array
from hetxl.data.progress import progress_bar

SHARD = 1024
"""Texts that are encoded and kept at a time: what is interrupted loses no more."""

TOKENS = 1024
"""Tokens of a batch, at most, padding included: what one core does fastest."""


class _Layer(NamedTuple):
    """Weights of a layer, in the order of their use; those of query, key and value in one."""

    attention: tuple[Tensor, Tensor]
    projection: tuple[Tensor, Tensor]
    first_norm: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    second_norm: tuple[Tensor, Tensor]


class SentenceEncoder:
    """Texts to vectors of unit length.

    Args:
        folder: with config.json, model.safetensors, tokenizer.json, modules.json, sentence_bert_config.json and
            1_Pooling/config.json.
    """

    def __init__(self, folder: Path):
        self.tokenizer = _tokenizer(folder)
        config = _config(folder)
        self.size: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        weights = folder / "model.safetensors"
        try:
            values = {name: value.float() for name, value in load_file(weights).items() if value.is_floating_point()}
            pair = lambda name: (values[f"{name}.weight"], values[f"{name}.bias"])  # noqa: E731
            self.words, self.places, kinds = (
                values[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
            )
            self.kind = kinds[0]
            self.norm = pair("embeddings.LayerNorm")
            self.layers = [_layer(f"encoder.layer.{number}", pair) for number in range(config["num_hidden_layers"])]
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{weights} does not hold the weights that config.json tells of: {error}") from None

    @torch.no_grad()
    def encode(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> np.ndarray:
        """The vectors of some texts, [n, D] float32.

        Texts of about the same length are computed together. A text's vector does not depend on the others, but for
        rounding.

        Args:
            texts: any number; what is longer than the encoder takes is cut off.
            advance: told how many texts more are done.
        """
        found = np.empty((len(texts), self.size), dtype=np.float32)
        tokens = [entry.ids for entry in self.tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(texts)), key=lambda place: len(tokens[place]))
        while order:
            longest = len(tokens[order[-1]])
            batch = order[-max(1, TOKENS // max(1, longest)) :]
            del order[-len(batch) :]
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros(len(batch), longest, dtype=torch.bool)
            for row, place in enumerate(batch):
                ids[row, : len(tokens[place])] = torch.tensor(tokens[place])
                mask[row, : len(tokens[place])] = True
            found[batch] = self.forward(ids, mask).numpy()
            if advance is not None:
                advance(len(batch))
        return found

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The vectors of token ids, [b, D].

        Args:
            ids: [b, L] int64
            mask: [b, L] bool, False for padding; each row has a token.
        """
        x = embedding(ids, self.words) + self.kind + self.places[: ids.shape[1]]
        x = layer_norm(x, (self.size,), *self.norm, self.eps)  # [b, L, D]
        # Without padding the attention needs no mask, and is faster.
        seen = None if bool(mask.all()) else mask[:, None, None, :]
        for layer in self.layers:
            x = self._step(x, seen, layer)
        kept = mask.unsqueeze(-1).to(x.dtype)
        return normalize((x * kept).sum(1) / kept.sum(1), dim=-1)

    def _step(self, x: Tensor, seen: Tensor | None, layer: _Layer) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in linear(x, *layer.attention).chunk(3, dim=-1)
        )  # [b, heads, L, D / heads]
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)
        x = layer_norm(x + linear(mixed, *layer.projection), (self.size,), *layer.first_norm, self.eps)
        inner = linear(gelu(linear(x, *layer.up)), *layer.down)
        return layer_norm(x + inner, (self.size,), *layer.second_norm, self.eps)


def encode_in_shards(folder: Path, encoder: SentenceEncoder, texts: Sequence[str], key: str) -> np.ndarray:
    """The vectors of many texts, [n, D] float32, with a progress bar on a terminal.

    They are kept as shard-….npy in a folder as they come, so that a call after an interrupted one goes on from there;
    whoever calls removes these files.

    Args:
        folder: of the shards.
        encoder: of the texts.
        texts: any number.
        key: that tells one encoder from another, as a checksum does; shards of others are not used.
    """
    name = blake2b(json.dumps([key, SHARD, list(texts)]).encode(), digest_size=8).hexdigest()
    found = [np.empty((0, encoder.size), dtype=np.float32)]
    with progress_bar("Encoding texts", len(texts)) as advance:
        for start in range(0, len(texts), SHARD):
            path, part = folder / f"shard-{name}-{start:07d}.npy", texts[start : start + SHARD]
            if path.exists():
                advance(len(part))
            else:
                write_array(path, encoder.encode(part, advance))
            found.append(np.load(path, allow_pickle=False))
    return np.concatenate(found)


def require_tokenizers() -> None:
    """Say what to install where tokenizers is missing."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ImportError("the sentence encoder needs tokenizers: pip install tokenizers") from error


def _layer(name: str, pair: Callable[[str], tuple[Tensor, Tensor]]) -> _Layer:
    parts = [pair(f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
    joined = torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts])
    rest = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense")
    return _Layer(joined, *(pair(f"{name}.{part}") for part in (*rest, "output.LayerNorm")))


def _tokenizer(folder: Path) -> Any:
    require_tokenizers()
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is no readable tokenizer: {error}") from None
    tokenizer.no_padding()  # the file's own pads every text to the same length
    tokenizer.enable_truncation(int(_read(folder / "sentence_bert_config.json")["max_seq_length"]))
    return tokenizer


def _config(folder: Path) -> dict[str, Any]:
    """config.json, if the model is of the one kind that is computed here."""
    config = _read(folder / "config.json")
    wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(f"{folder / 'config.json'} must have {name} {value!r}, found {config[name]!r}")
    pooling = _read(folder / "1_Pooling" / "config.json")
    modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    if modes != ["pooling_mode_mean_tokens"]:
        raise ValueError(f"{folder / '1_Pooling'} must take the mean over the tokens, found {', '.join(modes)}")
    kinds = [module["type"].rsplit(".", 1)[-1] for module in _read(folder / "modules.json")]
    if kinds != ["Transformer", "Pooling", "Normalize"]:
        raise ValueError(f"{folder / 'modules.json'} must be Transformer, Pooling, Normalize, found {', '.join(kinds)}")
    return config


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
