"""Modules: the four heads, their covariances and temperatures, and what a classifier behind them has to be."""

from hetxl.nn.classifier import Classifier
from hetxl.nn.covariance import (
    FULL_PARAMETER_LIMIT,
    Covariance,
    DiagonalCovariance,
    EfficientCovariance,
    FullCovariance,
    LowRankCovariance,
    build_covariance,
)
from hetxl.nn.head import Head
from hetxl.nn.heads import HEADS, DetHead, HetHashHead, HetHead, HetXLHead, build_head
from hetxl.nn.noisy import NoisyFeatures
from hetxl.nn.prediction import Prediction
from hetxl.nn.temperature import FixedTemperature, LearnedTemperature

__all__ = [
    "FULL_PARAMETER_LIMIT",
    "HEADS",
    "Classifier",
    "Covariance",
    "DetHead",
    "DiagonalCovariance",
    "EfficientCovariance",
    "FixedTemperature",
    "FullCovariance",
    "Head",
    "HetHashHead",
    "HetHead",
    "HetXLHead",
    "LearnedTemperature",
    "LowRankCovariance",
    "NoisyFeatures",
    "Prediction",
    "build_covariance",
    "build_head",
]
