"""The parameters of `HetXLClassifier`, checked when it is fitted: scikit-learn wants them unchecked until then."""

from numbers import Integral, Real
from typing import Any

from sklearn.utils import check_scalar

from hetxl.functional import SAMPLERS
from hetxl.functional._checks import one_of
from hetxl.nn import HEADS


def check_parameters(model: Any) -> None:
    """Raise where a parameter of an estimator is not what it may be."""
    one_of("head", model.head, HEADS)
    for name in ("train_samples", "eval_samples", "batch_size", "n_iter_no_change"):
        check_scalar(getattr(model, name), name, Integral, min_val=1)
    check_scalar(model.rank, "rank", Integral, min_val=0)
    if model.max_iter is not None:
        check_scalar(model.max_iter, "max_iter", Integral, min_val=1)
    if model.learning_rate is not None:
        check_scalar(model.learning_rate, "learning_rate", Real, min_val=0, include_boundaries="neither")
    if not isinstance(model.hidden, (tuple, list)):
        raise TypeError(f"hidden must be a tuple of sizes such as (512,), found {model.hidden!r}")
    for size in model.hidden:
        check_scalar(size, "hidden", Integral, min_val=1)
    for name in ("weight_decay", "tol"):
        check_scalar(getattr(model, name), name, Real, min_val=0)
    for name, high in (("noise_init", None), ("validation_fraction", 1)):
        check_scalar(getattr(model, name), name, Real, min_val=0, max_val=high, include_boundaries="neither")
    if isinstance(model.temperature, str):
        one_of("temperature", model.temperature, ("learned",))
    else:
        check_scalar(model.temperature, "temperature", Real, min_val=0, include_boundaries="neither")
    if isinstance(model.class_weight, str):
        one_of("class_weight", model.class_weight, ("balanced",))
    if not callable(model.sampler):
        one_of("sampler", model.sampler, SAMPLERS)
