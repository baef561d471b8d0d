"""Find the training examples that are most similar to an input, by the features of a trained model."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._seeds import derive_seed, some_rows
from hetxl_train.console import Console
from hetxl_train.data.dataset import Split
from hetxl_train.evaluate_runs import data_for
from hetxl_train.examples import image_of
from hetxl_train.prediction import Predictor

MOST = 5000
"""Maximum number of training examples to search, drawn at random if there are more."""


class SimilarExamples:
    """Rows of a split, compared by the cosine similarity of their centred features [n, D]."""

    def __init__(self, features: Tensor, split: Split, rows: np.ndarray, class_names: list[str]):
        self.mean = features.mean(0)
        self.directions = F.normalize(features - self.mean, dim=-1)
        self.split, self.rows, self.class_names = split, rows, class_names

    @staticmethod
    def of_run(predictor: Predictor, console: Console | None = None) -> "SimilarExamples | None":
        """Return the training examples of a run; print a reason and return None if its data cannot be opened."""
        console, trained = console or Console(), predictor.trained
        try:
            split = data_for(trained, None, None).splits["train"]
        except (OSError, ValueError, KeyError) as error:
            console.say(f"Similar training examples are not available: {error}")
            return None
        rows = some_rows(np.arange(len(split)), MOST, derive_seed(0, 31))
        features, read = [], []
        with console.bar("features of training examples", len(rows)) as bar:
            for part, those in trained.features(split, rows):
                features.append(part)
                read.append(those)
                bar.to(sum(map(len, read)))
        return SimilarExamples(torch.cat(features), split, np.concatenate(read), trained.class_names)

    def nearest(self, features: Tensor, count: int = 5) -> list[list[dict[str, Any]]]:
        """Return the most similar rows for each of features [b, D]: labels, similarities and images or texts."""
        directions = F.normalize(features.cpu() - self.mean, dim=-1)
        similarity, index = (directions @ self.directions.T).topk(min(count, len(self.rows)))
        return [
            [self._entry(*pair) for pair in zip(*pairs, strict=True)]
            for pairs in zip(similarity.tolist(), index.tolist(), strict=True)
        ]

    def _entry(self, similarity: float, index: int) -> dict[str, Any]:
        row = int(self.rows[index])
        shown, labels = self.split.show(row), self.split.labels.subset(np.array([row])).ids
        names = [self.class_names[int(label)] for label in np.asarray(labels) if label >= 0]
        about = {"row": row, "label": " | ".join(names), "similarity": round(similarity, 4)}
        return about | {"text": shown.text, "image": image_of(shown)}
