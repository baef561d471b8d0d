"""Import the weights of the authors' Flax layer into a head.

A layer with J and v has the covariance `efficient`, with V `low_rank`, and with neither `diagonal`; N is K in HET and D
in HET-XL. Weights have the layer's names or short names:

| layer | short name | head | shape |
| --- | --- | --- | --- |
| loc_layer | W, b | classifier | [D, K], [K] |
| diag_layer | d_kernel, d_bias | covariance.residual | [D, N], [N] |
| scale_layer_homoscedastic | J; its bias J_bias, see `import_weights` | covariance.factor | [R, N]; [N] |
| scale_layer_heteroscedastic | v_kernel, v_bias | covariance.scale | [D, N], [N] |
| scale_layer | V_kernel, V_bias | covariance.loadings | [D, N·R], [N·R] |
| pre_sigmoid_temperature | raw_tau, with tau_min and tau_max | temperature | one number |
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from hetxl._checks import one_of
from hetxl._files import read_arrays
from hetxl.functional.noise import MIN_SCALE
from hetxl.nn import Head, HetHead, HetXLHead, LearnedTemperature, build_head
from hetxl.nn.classifier import is_plain_linear
from hetxl.nn.covariance import DiagonalCovariance, EfficientCovariance, LowRankCovariance
from hetxl.nn.heads import HeadOptions

_TRANSPOSED = {"W", "d_kernel", "v_kernel", "V_kernel"}
_COVARIANCES = {EfficientCovariance: "efficient", LowRankCovariance: "low_rank", DiagonalCovariance: "diagonal"}
PARAMETERS = {
    "W": "classifier.weight",
    "b": "classifier.bias",
    "d_kernel": "covariance.residual.weight",
    "d_bias": "covariance.residual.bias",
    "J": "covariance.factor",
    "v_kernel": "covariance.scale.weight",
    "v_bias": "covariance.scale.bias",
    "V_kernel": "covariance.loadings.weight",
    "V_bias": "covariance.loadings.bias",
    "raw_tau": "temperature.raw",
}
"""The parameter of a head for each entry."""

SETTINGS = {"tau", "tau_min", "tau_max", "min_scale"}
"""Numbers that describe how the parameters are used."""

_LAYERS = {
    "loc_layer": "W",
    "diag_layer": "d",
    "scale_layer_homoscedastic": "J",
    "scale_layer_heteroscedastic": "v",
    "scale_layer": "V",
}
_SAME = {"W_kernel": "W", "W_bias": "b", "J_kernel": "J", "pre_sigmoid_temperature": "raw_tau"}
_BESIDE = re.compile(r"features|targets|probs|loss|z0?|grad_\w+")
"""Entries of files of reference numbers that are not weights."""
_KNOWN = {*PARAMETERS, *SETTINGS, "J_bias"}
_SHOWN = 6
_DEEPEST = 100  # maximum nesting of dicts

Arrays = dict[str, np.ndarray]


def import_weights(
    params: Mapping[str, Any] | str | os.PathLike,
    head: Head | None = None,
    *,
    kind: str | None = None,
    **options: Unpack[HeadOptions],
) -> Head:
    """Return a head with the weights of the authors' Flax layer.

    The layer's factor J can have a bias c, which gives its noise the mean c ∘ v(x). Noise has no mean in hetxl, so a
    nonzero bias is added to the classifier, which gives the same model: W becomes W + v_kernel·c in HET, and a new
    HET-XL head keeps the original W as the projection of the noise (`noise_features=D`).

    Args:
        params: arrays, or anything that `np.asarray` accepts, in nested dicts or under names with "/" or "." between
            the parts; or the path of an .npz file. Names are those of the layer or the short names; outer dicts such
            as "params" are ignored.
        head: a `HetHead` or `HetXLHead` to fill; None for a new one.
        kind: type of a new head, "het" or "het-xl"; None to infer it from the shapes, which needs D ≠ K.
        **options: options of a new head, see `hetxl.nn.Head`. Pass link="sigmoid" for a sigmoid layer. Pass
            temperature=τ for a layer with a fixed τ [default: 1], or a `LearnedTemperature` with the bounds of a
            learned τ, unless tau_min and tau_max are among the arrays [default: 0.05 and 5]. Sizes, covariance and
            float64 follow from the weights.

    Returns:
        The head. If it has the dtype of the arrays, its weights equal those of the layer bit for bit, transposed.
    """
    arrays = read_params(params)
    mean = arrays.pop("J_bias", np.zeros(1))
    for name in SETTINGS & arrays.keys():
        if arrays[name].size != 1:
            raise ValueError(f"{name} must be one number, found shape {list(arrays[name].shape)}")
    scale = _setting(arrays, "min_scale", MIN_SCALE)
    if not np.isclose(scale, MIN_SCALE):
        raise ValueError(f"min_scale must be {MIN_SCALE}, what heads add to the softplus, found {scale:g}")
    if head is None:
        head = _build(arrays, kind, bool(mean.any()), dict(options))
    elif kind is not None or options:
        superfluous = [*(["kind"] if kind is not None else []), *options]
        raise ValueError(f"kind and options are only for a new head; leave out {', '.join(superfluous)}")
    _check(arrays, mean, head)
    parameters, projection = dict(head.named_parameters()), head.projection if isinstance(head, HetXLHead) else None
    if mean.any() and isinstance(head, HetXLHead) and projection is None:
        raise ValueError(f"J_bias is not 0; pass a head with noise_features={head.in_features}, or no head")
    if mean.any() and head.classifier.bias is None:
        raise ValueError("J_bias is not 0; pass a head whose classifier has a bias, or no head")
    with torch.no_grad():
        if projection is not None:
            projection.weight.copy_(head_state({"W": arrays["W"]})["classifier.weight"])
        for name, value in head_state(_centred(arrays, mean, head)).items():
            parameters[name].copy_(value.reshape(parameters[name].shape))
    return head


def head_state(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a head's state dict from entries with short names, transposed as needed."""
    # Copies, because arrays of other libraries can be read-only.
    values = {entry: torch.from_numpy(np.asarray(arrays[entry]).copy()) for entry in PARAMETERS if entry in arrays}
    return {PARAMETERS[entry]: value.T if entry in _TRANSPOSED else value for entry, value in values.items()}


def _setting(arrays: Arrays, name: str, otherwise: float) -> float:
    return float(arrays[name].reshape(())) if name in arrays else otherwise


def _build(arrays: Arrays, kind: str | None, apart: bool, options: dict[str, Any]) -> Head:
    """Return a new head with the sizes of the entries; `apart` for noise with a separate projection."""
    for name in ("W", "d_kernel"):
        if name not in arrays or arrays[name].ndim != 2 or not arrays[name].size:
            problem = f"found {list(arrays[name].shape)}" if name in arrays else "it is missing"
            raise ValueError(f"{name} must be an array of shape [D, {'K' if name == 'W' else 'N'}]; {problem}")
    (features, classes), noise = arrays["W"].shape, arrays["d_kernel"].shape[1]
    covariance, rank = "diagonal", 0
    if arrays.keys() & {"J", "v_kernel", "v_bias"}:
        covariance, rank = "efficient", len(np.atleast_1d(arrays.get("J", np.zeros(1))))
    elif arrays.keys() & {"V_kernel", "V_bias"}:
        columns = (arrays[name].shape[-1] for name in ("V_kernel", "V_bias") if name in arrays and arrays[name].ndim)
        covariance, rank = "low_rank", max(1, next(columns, noise) // noise)
    if kind is None:
        fitting = [name for name, size in (("het", classes), ("het-xl", features)) if size == noise]
        if len(fitting) != 1:
            where = "K and D" if fitting else "neither K nor D"
            raise ValueError(
                f"kind must be given: d_kernel {[features, noise]} has {where} of W {[features, classes]} columns; "
                "use kind='het' or kind='het-xl'"
            )
        kind = fitting[0]
    one_of("kind", kind, ("het", "het-xl"))
    fixed = {"covariance": covariance, "rank": rank, "residual": "rank1", "bias": True}
    for name, value in fixed.items():
        if options.setdefault(name, value) != value:
            raise ValueError(f"{name} must be {value!r}, as the weights have it, found {options[name]!r}")
    if options.get("classifier") is not None:
        raise ValueError("classifier must be left out, because the weights define it")
    if options.get("dtype") is None:
        options["dtype"] = torch.float64 if arrays["W"].dtype == np.float64 else torch.float32
    if options.get("temperature") is None:
        options["temperature"] = _setting(arrays, "tau", 1.0)
        if "raw_tau" in arrays:
            low, high = _setting(arrays, "tau_min", 0.05), _setting(arrays, "tau_max", 5.0)
            where = {"device": options.get("device"), "dtype": options["dtype"]}
            options["temperature"] = LearnedTemperature(low, high, **where)
    if apart and kind == "het-xl":
        options["noise_features"] = features
    head = build_head(kind, features, classes, **options)
    if isinstance(head.temperature, LearnedTemperature) != ("raw_tau" in arrays):
        has = "a learned" if "raw_tau" in arrays else "no learned"
        raise ValueError(f"temperature must fit the weights, which have {has} one (raw_tau), found {head.temperature}")
    return head


def _check(arrays: Arrays, mean: np.ndarray, head: Head) -> None:
    """Raise unless a head is the same model as the layer and the entries are exactly its parameters."""
    covariance = _COVARIANCES.get(type(head.covariance))
    if not isinstance(head, HetHead | HetXLHead) or head.covariance is None or covariance is None:
        options = "" if head.covariance is None else f" with {type(head.covariance).__name__}"
        raise TypeError(
            "head must be a HetHead or HetXLHead with an efficient, low_rank or diagonal covariance, "
            f"found {type(head).__name__}{options}"
        )
    if head.covariance.residual_kind != "rank1":
        raise ValueError(f'head must have residual="rank1", as the layer has, found {head.covariance.residual_kind!r}')
    if not is_plain_linear(head.classifier):
        raise TypeError(f"head must have a linear classifier without hooks, found {type(head.classifier).__name__}")
    if isinstance(head, HetXLHead) and head.noise_features != head.in_features:
        raise ValueError(
            f"head must have noise on its {head.in_features} features, found noise_features={head.noise_features}"
        )
    shapes = {name: list(value.shape) for name, value in head.named_parameters()}
    shapes["temperature.raw"] = []  # of one element, for FSDP
    learned = isinstance(head.temperature, LearnedTemperature)
    expected = {
        entry: shapes[name][::-1] if entry in _TRANSPOSED else shapes[name]
        for entry, name in PARAMETERS.items()
        if name in shapes and (learned or entry != "raw_tau")
    }
    missing = [name for name in expected if name not in arrays]
    unexpected = sorted(arrays.keys() - expected.keys() - SETTINGS)
    if missing or unexpected:
        parts = [
            f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("also has", unexpected)) if names
        ]
        raise ValueError(
            f"params {' and '.join(parts)}; {'het' if isinstance(head, HetHead) else 'het-xl'} with the covariance "
            f"{covariance} and a {'learned' if learned else 'fixed'} temperature has {', '.join(expected)}"
        )
    for name, shape in expected.items():
        actual = list(arrays[name].shape)
        if actual != shape and not (name == "raw_tau" and actual == [1]):
            raise ValueError(f"{name} must have shape {shape}, found {actual}")
    noise = [head.covariance.noise_features]
    if mean.any() and (list(mean.shape) != noise or "J" not in expected):
        raise ValueError(f"J_bias must go with J and have shape {noise}, found {list(mean.shape)}")
    if isinstance(head.temperature, LearnedTemperature):
        for name, bound in (("tau_min", head.temperature.low), ("tau_max", head.temperature.high)):
            value = _setting(arrays, name, bound)
            if not np.isclose(value, bound):
                raise ValueError(f"{name} is {value:g}, but the bound in {head.temperature} is {bound:g}")


def _centred(arrays: Arrays, mean: np.ndarray, head: Head) -> Arrays:
    """Return the weights of the same model with noise of mean 0, since `mean` [N] ∘ v(x) is linear in the features."""
    if not mean.any():
        return arrays
    kernel, bias = (arrays[name].astype(np.float64) * mean for name in ("v_kernel", "v_bias"))
    if isinstance(head, HetXLHead):
        kernel, bias = kernel @ arrays["W"], bias @ arrays["W"]
    return arrays | {"W": arrays["W"] + kernel, "b": arrays["b"] + bias}


def read_params(params: Mapping[str, Any] | str | os.PathLike) -> Arrays:
    """Return the arrays of a layer under their short names, in float32 or float64, from `params` of `import_weights`.

    Entries that are not weights are left out.
    """
    if isinstance(params, str | os.PathLike):
        path = Path(params)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            params = read_arrays(path)
        except ValueError as error:
            raise ValueError(f"{error}; write one with numpy.savez") from None
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dict of arrays or the path of an .npz file, found {type(params).__name__}")
    entries = list(_flatten(params))
    # Unwrap outer dicts that contain only one dict.
    while not any(_plain_name(parts) in _KNOWN for parts, _ in entries):
        around = {parts[:-1][:1] for parts, _ in entries}
        if len(around) != 1 or not around.pop():
            break
        entries = [(parts[1:], value) for parts, value in entries]
    arrays: Arrays = {}
    unexpected = []
    for parts, value in entries:
        name, full_name = _plain_name(parts), "/".join(parts)
        if name in arrays:
            raise ValueError(f"params holds {name} twice, once as {full_name}; keep one")
        if name in _KNOWN:
            arrays[name] = _as_array(full_name, value)
        elif not _BESIDE.fullmatch(full_name):
            unexpected.append(full_name)
    if unexpected:
        more = f" and {len(unexpected) - _SHOWN} more" if len(unexpected) > _SHOWN else ""
        raise ValueError(
            f"params holds {', '.join(unexpected[:_SHOWN])}{more}, which the layer does not have; "
            "pass only the layer's dict, such as params['head']"
        )
    return arrays


def _flatten(params: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the entries with the parts of their names."""
    if len(path) > _DEEPEST:
        raise ValueError(f"params is nested more than {_DEEPEST} deep, or contains itself; pass the layer's dict")
    for key, value in params.items():
        parts = (*path, *re.split("[/.]", str(key)))
        if isinstance(value, Mapping):
            yield from _flatten(value, parts)
        else:
            yield parts, value


def _plain_name(parts: tuple[str, ...]) -> str:
    name = "_".join((_LAYERS.get(parts[0], parts[0]), *parts[1:]))
    return _SAME.get(name, name)


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "cOSU":
            # float32 represents half precision exactly.
            return array if array.dtype == np.float64 else array.astype(np.float32)
        actual = f"dtype {array.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        actual = f"{type(value).__name__} ({error})"
    raise TypeError(f"{name} must be an array of real numbers, found {actual}")
