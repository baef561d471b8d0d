"""Measure the quality of a model's probabilities: records of every example, metrics, calibration and confusions."""

from hetxl.metrics.audit import Audit, AuditBuilder, audit
from hetxl.metrics.conformal import Conformal, ScoreOptions, calibrate, label_scores, label_thresholds, risk_threshold
from hetxl.metrics.confusions import ConfusionCounter
from hetxl.metrics.ensemble import Ensemble
from hetxl.metrics.laplace import fit_laplace
from hetxl.metrics.neighbours import Neighbours
from hetxl.metrics.noise_fit import NoiseFit, fit_noise
from hetxl.metrics.records import Records, RecordsBuilder
from hetxl.metrics.scaling import Scales, fit_scales, fit_temperature
from hetxl.metrics.summary import (
    aurc,
    auroc,
    band_accuracy,
    brier,
    calibration_error,
    class_bands,
    nll,
    nll_standard_error,
    precision_at,
    reliability,
    risk_coverage,
    summarise,
    threshold_for,
)

__all__ = [
    "Audit",
    "AuditBuilder",
    "Conformal",
    "ConfusionCounter",
    "Ensemble",
    "Neighbours",
    "NoiseFit",
    "Records",
    "RecordsBuilder",
    "Scales",
    "ScoreOptions",
    "audit",
    "aurc",
    "auroc",
    "band_accuracy",
    "brier",
    "calibrate",
    "calibration_error",
    "class_bands",
    "fit_laplace",
    "fit_noise",
    "fit_scales",
    "fit_temperature",
    "label_scores",
    "label_thresholds",
    "nll",
    "nll_standard_error",
    "precision_at",
    "reliability",
    "risk_coverage",
    "risk_threshold",
    "summarise",
    "threshold_for",
]
