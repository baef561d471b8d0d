"""Modules: the four heads, their covariances and temperatures, and the interface of their classifiers."""

from hetxl.nn.averaged import DropoutHead, LaplaceHead
from hetxl.nn.classifier import Classifier, NoisyFeatures
from hetxl.nn.covariance import (
    FULL_PARAMETER_LIMIT,
    Covariance,
    DiagonalCovariance,
    EfficientCovariance,
    FullCovariance,
    LowRankCovariance,
    build_covariance,
)
from hetxl.nn.density import ClassDensity, fit_density
from hetxl.nn.heads import HEADS, DetHead, Head, HetHashHead, HetHead, HetXLHead, build_head
from hetxl.nn.prediction import Prediction
from hetxl.nn.standardize import Standardize
from hetxl.nn.temperature import FixedTemperature, LearnedTemperature
from hetxl.registry import HEAD_LABELS, head_entry

__all__ = [
    "FULL_PARAMETER_LIMIT",
    "HEADS",
    "HEAD_LABELS",
    "ClassDensity",
    "Classifier",
    "Covariance",
    "DetHead",
    "DiagonalCovariance",
    "DropoutHead",
    "EfficientCovariance",
    "FixedTemperature",
    "FullCovariance",
    "Head",
    "HetHashHead",
    "HetHead",
    "HetXLHead",
    "LaplaceHead",
    "LearnedTemperature",
    "LowRankCovariance",
    "NoisyFeatures",
    "Prediction",
    "Standardize",
    "build_covariance",
    "build_head",
    "fit_density",
    "head_entry",
]
