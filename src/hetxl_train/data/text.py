"""Texts for a language model: tokenized on demand by the model's own tokenizer. Needs transformers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hetxl.profiling.backbones import importing
from hetxl_train.data.dataset import Fetched, InputSpec, Shown, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.strings import Strings

if TYPE_CHECKING:
    from hetxl_train.data.arrow_tables import Cells

PADDING = -1
"""The id of no token, behind the end of a text: models have different ones, or none."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model of transformers, loaded when it is first used."""

    model: str  # a name or a directory
    length: int = 128  # the most tokens of a text; longer ones are cut

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "length": self.length}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer itself."""
        with importing("transformers", f"hf:{self.model}"):
            from transformers import AutoTokenizer
        # Workers tokenize in parallel already; threads inside of them would only warn of the fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            return AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"hf:{self.model} has no tokenizer for texts: {reason}") from error

    @property
    def input(self) -> InputSpec:
        """The input of a model: token ids, up to the longest text."""
        length = min(self.length, self.tokenizer.model_max_length)
        return InputSpec("text", (length,), len(self.tokenizer))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of texts, [b, L] int64 with L that of the longest, and `PADDING` behind shorter ones."""
        # One entry at least: there are tokenizers that give none for an empty text.
        encoded = self.tokenizer(list(texts), truncation=True, max_length=self.input.shape[0])["input_ids"]
        ids = torch.full((len(encoded), max([1, *map(len, encoded)])), PADDING)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return ids


class TextSplit(Split):
    """Texts as ids of tokens [b, L]; `rows` are the texts of this split, None for all."""

    workers = True

    def __init__(
        self, texts: "Strings | Cells", labels: Labels, rows: np.ndarray | None = None, *, tokenizer: Tokenizer
    ) -> None:
        self.texts, self.labels, self.rows, self.tokenizer = texts, labels, rows, tokenizer

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b]; seeds have no effect."""
        rows = np.asarray(rows, dtype=np.int64)
        texts = self.texts.take((rows if self.rows is None else self.rows[rows]).tolist())
        return Fetched(self.tokenizer([text or "" for text in texts]), rows)

    def show(self, row: int) -> Shown:
        """Return the text of an example."""
        return Shown(text=self.texts.take([int(row if self.rows is None else self.rows[row])])[0])
