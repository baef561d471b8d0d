"""Data: datasets by name or path, splits that read rows when asked, and what is in them."""

from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import SPLITS, Broken, Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.describe import Description, describe
from hetxl.data.label_noise import LabelNoise, with_label_noise
from hetxl.data.labels import Labels
from hetxl.data.open import BUILT_IN, open_dataset, open_inputs

__all__ = [
    "BUILT_IN",
    "SPLITS",
    "Broken",
    "BrokenLimit",
    "Dataset",
    "Description",
    "Fetched",
    "InputSpec",
    "LabelNoise",
    "Labels",
    "Shown",
    "Split",
    "describe",
    "open_dataset",
    "open_inputs",
    "with_label_noise",
]
