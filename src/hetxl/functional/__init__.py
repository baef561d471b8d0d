"""The pure math: tensors in, tensors out, no parameters.

A head is three steps. `noise` makes a Gaussian from the features, `lifts` carry it to the classes, and `reference`
averages softmax or sigmoid over samples; `distribution` holds the first two together and `samplers` supply the normals.
"""

from hetxl.functional.distribution import Affine, LogitDistribution, Order, choose_order, correlation
from hetxl.functional.engine import Plan, Summary, mc_log_normalisers, mc_log_probs, mc_nll, mc_predict, plan
from hetxl.functional.lifts import ClassifierLift, HashLift, IdentityLift, Lift, LinearLift, hash_classes
from hetxl.functional.links import (
    APPROXIMATIONS,
    approximate_log_probs,
    log_mean_exp,
    mean_sigmoid,
    mean_softmax,
    sigmoid_entropy,
    softmax_entropy,
)
from hetxl.functional.noise import MIN_SCALE, GaussianNoise, Residual, residual_scale
from hetxl.functional.samplers import SAMPLERS, Sampler, antithetic, draw_normals, iid, orthogonal, sobol
from hetxl.functional.targets import IGNORE_INDEX, LabelLists, Targets, Weights, check_targets
from hetxl.registry import Link

__all__ = [
    "APPROXIMATIONS",
    "IGNORE_INDEX",
    "MIN_SCALE",
    "SAMPLERS",
    "Affine",
    "ClassifierLift",
    "GaussianNoise",
    "HashLift",
    "IdentityLift",
    "LabelLists",
    "Lift",
    "LinearLift",
    "Link",
    "LogitDistribution",
    "Order",
    "Plan",
    "Residual",
    "Sampler",
    "Summary",
    "Targets",
    "Weights",
    "antithetic",
    "approximate_log_probs",
    "check_targets",
    "choose_order",
    "correlation",
    "draw_normals",
    "hash_classes",
    "iid",
    "log_mean_exp",
    "mc_log_normalisers",
    "mc_log_probs",
    "mc_nll",
    "mc_predict",
    "mean_sigmoid",
    "mean_softmax",
    "orthogonal",
    "plan",
    "residual_scale",
    "sigmoid_entropy",
    "sobol",
    "softmax_entropy",
]
