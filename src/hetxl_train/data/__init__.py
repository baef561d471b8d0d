"""Datasets by name or path, splits that read rows on demand, and descriptions of their contents."""

from hetxl_train.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Shown, Split, Unreadable, UnreadableExamples
from hetxl_train.data.describe import Description, describe
from hetxl_train.data.label_noise import LabelNoise, with_label_noise
from hetxl_train.data.labels import Labels
from hetxl_train.data.open import BUILT_IN, open_dataset, open_inputs
from hetxl_train.data.tables import Columns

__all__ = [
    "BUILT_IN",
    "SPLITS",
    "Columns",
    "Dataset",
    "Description",
    "Fetched",
    "InputSpec",
    "LabelNoise",
    "Labels",
    "Shown",
    "Split",
    "Unreadable",
    "UnreadableExamples",
    "describe",
    "open_dataset",
    "open_inputs",
    "with_label_noise",
]
