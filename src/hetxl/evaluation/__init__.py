"""How good the probabilities of a model are: records of every example, metrics, calibration and confusions."""

from hetxl.evaluation.bands import band_accuracy, class_bands
from hetxl.evaluation.builder import RecordsBuilder
from hetxl.evaluation.calibration import calibration_error, reliability
from hetxl.evaluation.confusions import ConfusionCounter
from hetxl.evaluation.evaluate import Evaluation, evaluate
from hetxl.evaluation.examples import extreme_examples
from hetxl.evaluation.metrics import brier, nll, nll_standard_error, precision_at, summarise
from hetxl.evaluation.records import Records
from hetxl.evaluation.scaling import Scales, fit_scales, fit_temperature
from hetxl.evaluation.selective import aurc, auroc, risk_coverage, threshold_for

__all__ = [
    "ConfusionCounter",
    "Evaluation",
    "Records",
    "RecordsBuilder",
    "Scales",
    "aurc",
    "auroc",
    "band_accuracy",
    "brier",
    "calibration_error",
    "class_bands",
    "evaluate",
    "extreme_examples",
    "fit_scales",
    "fit_temperature",
    "nll",
    "nll_standard_error",
    "precision_at",
    "reliability",
    "risk_coverage",
    "summarise",
    "threshold_for",
]
