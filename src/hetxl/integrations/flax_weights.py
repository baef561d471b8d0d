"""Weights of the authors' Flax layer, read into a head.

A layer with J and v has the covariance `efficient`, one with V `low_rank`, one with neither `diagonal`; N is K in HET
and D in HET-XL. `hetxl.integrations.flax_names` lists all names.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl.functional._checks import one_of
from hetxl.functional.noise import MIN_SCALE
from hetxl.integrations.flax_names import PARAMETERS, SETTINGS, Arrays, read_params
from hetxl.nn import (
    DiagonalCovariance,
    EfficientCovariance,
    Head,
    HetHead,
    HetXLHead,
    LearnedTemperature,
    LowRankCovariance,
    build_head,
)
from hetxl.nn.classifier import is_plain_linear
from hetxl.nn.heads import HeadOptions

_TRANSPOSED = {"W", "d_kernel", "v_kernel", "V_kernel"}
_COVARIANCES = {EfficientCovariance: "efficient", LowRankCovariance: "low_rank", DiagonalCovariance: "diagonal"}


def import_weights(
    params: Mapping[str, Any] | str | os.PathLike,
    head: Head | None = None,
    *,
    kind: str | None = None,
    **options: Unpack[HeadOptions],
) -> Head:
    """A head with the weights of the authors' Flax layer.

    The layer's factor J may have a bias c, which gives its noise the mean c ∘ v(x). Noise has no mean here, so a bias
    other than 0 goes into the classifier, which makes it the same model: HET takes W + v_kernel·c for W, and a new
    HET-XL head keeps W beside it, as the projection of the noise (`noise_features=D`).

    Args:
        params: arrays, or anything that `np.asarray` takes, in nested dicts or under names with "/" or "." between the
            parts; or the path of an .npz file of them. Their names are those of the layer or the plain ones; dicts
            around them, such as "params", do not matter.
        head: a `HetHead` or `HetXLHead` to fill; None for a new one.
        kind: of a new head, "het" or "het-xl"; None to tell by the shapes, which takes D ≠ K.
        **options: of a new head, see `hetxl.nn.Head`. link="sigmoid" for that layer. temperature=τ where the layer did
            not learn it (1 without); where it did, a `LearnedTemperature` with its bounds, unless tau_min and tau_max
            are among the arrays (0.05 and 5 without). Sizes and covariance are those of the weights, and so is a dtype
            of float64.

    Returns:
        The head. Its weights are those of the layer to the bit, transposed, if it has their dtype.
    """
    arrays = read_params(params)
    mean = arrays.pop("J_bias", np.zeros(1))
    if head is None:
        sizes = _sizes_of(arrays, kind)
        _check(arrays, sizes, mean)
        head = _build(arrays, sizes, bool(mean.any()), dict(options))
    else:
        if kind is not None or options:
            given = [*(["kind"] if kind is not None else []), *options]
            raise ValueError(f"kind and options are for a new head; leave out {', '.join(given)}")
        sizes = _sizes_in(head)
        _check(arrays, sizes, mean)
    _check_temperature(arrays, head.temperature)
    projection = head.projection if isinstance(head, HetXLHead) else None
    if mean.any() and sizes.kind == "het-xl" and projection is None:
        raise ValueError(f"J_bias is not 0: give a head with noise_features={sizes.features}, or none")
    if mean.any() and not sizes.bias:
        raise ValueError("J_bias is not 0: give a head whose classifier has a bias, or none")
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        if projection is not None:
            projection.weight.copy_(head_state({"W": arrays["W"]})["classifier.weight"])
        for name, value in head_state(_centred(arrays, mean, sizes.kind)).items():
            parameters[name].copy_(value.reshape(parameters[name].shape))
    return head


def head_state(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Entries under their plain names as the parameters of a head: by the names there, transposed where they are.

    Args:
        arrays: the entries; those that are no parameter are left out.
    """
    found = {}
    for entry, name in PARAMETERS.items():
        if entry in arrays:
            # A copy: arrays of other libraries may be read-only.
            value = torch.from_numpy(np.asarray(arrays[entry]).copy())
            found[name] = value.T if entry in _TRANSPOSED else value
    return found


class _Sizes(NamedTuple):
    """What a head needs to know of its weights, or weights of their head."""

    kind: str
    features: int
    classes: int
    noise: int
    rank: int
    covariance: str
    learned: bool
    bias: bool = True

    def shapes(self) -> dict[str, list[int]]:
        """The entries that there should be."""
        D, K, N, R = self.features, self.classes, self.noise, self.rank
        factors: dict[str, dict[str, list[int]]] = {
            "efficient": {"J": [R, N], "v_kernel": [D, N], "v_bias": [N]},
            "low_rank": {"V_kernel": [D, N * R], "V_bias": [N * R]},
            "diagonal": {},
        }
        return {
            "W": [D, K],
            **({"b": [K]} if self.bias else {}),
            "d_kernel": [D, N],
            "d_bias": [N],
            **factors[self.covariance],
            **({"raw_tau": []} if self.learned else {}),
        }


def _sizes_of(arrays: Arrays, kind: str | None) -> _Sizes:
    """The sizes that weights have, as far as single entries tell them."""
    for name in ("W", "d_kernel"):
        if name not in arrays or arrays[name].ndim != 2 or not arrays[name].size:
            found = f"found {list(arrays[name].shape)}" if name in arrays else "it is missing"
            raise ValueError(f"{name} must be an array of shape [D, {'K' if name == 'W' else 'N'}]; {found}")
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
    size = classes if kind == "het" else features
    return _Sizes(kind, features, classes, size, rank, covariance, "raw_tau" in arrays)


def _sizes_in(head: Head) -> _Sizes:
    """The sizes that a given head has; raises for one that is another model than the layer."""
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
    return _Sizes(
        "het" if isinstance(head, HetHead) else "het-xl",
        head.in_features,
        head.num_classes,
        head.covariance.noise_features,
        head.covariance.rank,
        covariance,
        isinstance(head.temperature, LearnedTemperature),
        head.classifier.bias is not None,
    )


def _check(arrays: Arrays, sizes: _Sizes, mean: np.ndarray) -> None:
    """Raise unless exactly the entries of these sizes are there."""
    expected = sizes.shapes()
    missing = [name for name in expected if name not in arrays]
    unexpected = sorted(arrays.keys() - expected.keys() - SETTINGS)
    if missing or unexpected:
        parts = [
            f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("also has", unexpected)) if names
        ]
        temperature = "a learned" if sizes.learned else "a fixed"
        raise ValueError(
            f"params {' and '.join(parts)}; {sizes.kind} with the covariance {sizes.covariance} and {temperature} "
            f"temperature has {', '.join(expected)}"
        )
    for name, shape in expected.items():
        found = list(arrays[name].shape)
        if found != shape and not (name == "raw_tau" and found == [1]):
            raise ValueError(f"{name} must have shape {shape}, found {found}")
    if mean.any() and (list(mean.shape) != [sizes.noise] or "J" not in expected):
        raise ValueError(f"J_bias must go with J and have shape {[sizes.noise]}, found {list(mean.shape)}")
    for name in SETTINGS & arrays.keys():
        if arrays[name].size != 1:
            raise ValueError(f"{name} must be one number, found shape {list(arrays[name].shape)}")
    scale = _setting(arrays, "min_scale", MIN_SCALE)
    if not np.isclose(scale, MIN_SCALE):
        raise ValueError(f"min_scale must be {MIN_SCALE}, what heads add to the softplus, found {scale:g}")


def _setting(arrays: Arrays, name: str, otherwise: float) -> float:
    return float(arrays[name].reshape(())) if name in arrays else otherwise


def _build(arrays: Arrays, sizes: _Sizes, apart: bool, options: dict[str, Any]) -> Head:
    """A new head of these sizes; `apart` for a noise with a projection of its own."""
    given = {"covariance": sizes.covariance, "rank": sizes.rank, "residual": "rank1", "bias": True}
    for name, value in given.items():
        if options.setdefault(name, value) != value:
            raise ValueError(f"{name} must be {value!r}, as the weights have it, found {options[name]!r}")
    if options.get("classifier") is not None:
        raise ValueError("classifier must be left out: the weights hold it")
    if options.get("dtype") is None:
        options["dtype"] = torch.float64 if arrays["W"].dtype == np.float64 else torch.float32
    if options.get("temperature") is None:
        options["temperature"] = _setting(arrays, "tau", 1.0)
        if sizes.learned:
            low, high = _setting(arrays, "tau_min", 0.05), _setting(arrays, "tau_max", 5.0)
            where = {"device": options.get("device"), "dtype": options["dtype"]}
            options["temperature"] = LearnedTemperature(low, high, **where)
    if apart and sizes.kind == "het-xl":
        options["noise_features"] = sizes.features
    return build_head(sizes.kind, sizes.features, sizes.classes, **options)


def _check_temperature(arrays: Arrays, temperature: nn.Module) -> None:
    learned = isinstance(temperature, LearnedTemperature)
    if learned != ("raw_tau" in arrays):
        has = "a learned" if "raw_tau" in arrays else "no learned"
        raise ValueError(f"temperature must fit the weights, which have {has} one (raw_tau), found {temperature}")
    if isinstance(temperature, LearnedTemperature):
        for name, bound in (("tau_min", temperature.low), ("tau_max", temperature.high)):
            if not np.isclose(_setting(arrays, name, bound), bound):
                raise ValueError(
                    f"{name} is {_setting(arrays, name, bound):g}, but the bound in {temperature} is {bound:g}"
                )


def _centred(arrays: Arrays, mean: np.ndarray, kind: str) -> Arrays:
    """The weights of the same model with noise of mean 0: `mean` [N] ∘ v(x) is linear in the features."""
    if not mean.any():
        return arrays
    kernel, bias = (arrays[name].astype(np.float64) * mean for name in ("v_kernel", "v_bias"))
    if kind == "het-xl":
        kernel, bias = kernel @ arrays["W"], bias @ arrays["W"]
    return arrays | {"W": arrays["W"] + kernel, "b": arrays["b"] + bias}
