"""The names of the authors' Flax layer, and plain ones for its weights.

| in the layer | as a plain name | in the head | shape |
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
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
"""The parameter of a head that each entry is."""

SETTINGS = {"tau", "tau_min", "tau_max", "min_scale"}
"""Numbers that say how the parameters are used."""

_LAYERS = {
    "loc_layer": "W",
    "diag_layer": "d",
    "scale_layer_homoscedastic": "J",
    "scale_layer_heteroscedastic": "v",
    "scale_layer": "V",
}
_SAME = {"W_kernel": "W", "W_bias": "b", "J_kernel": "J", "pre_sigmoid_temperature": "raw_tau"}
_BESIDE = re.compile(r"features|targets|probs|loss|z0?|grad_\w+")
"""What files of reference numbers hold beside the weights."""
_KNOWN = {*PARAMETERS, *SETTINGS, "J_bias"}
_SHOWN = 6

Arrays = dict[str, np.ndarray]


def read_params(params: Mapping[str, Any] | str | os.PathLike) -> Arrays:
    """The arrays of a layer under their plain names, in float32 or float64.

    Args:
        params: nested dicts, or names with "/" or "." between the parts, in dicts around them or not; or the path of an
            .npz file of them. What files of reference numbers hold beside the weights is left out.
    """
    if isinstance(params, str | os.PathLike):
        params = _read_file(Path(params))
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dict of arrays or the path of an .npz file, found {type(params).__name__}")
    entries = list(_flatten(params))
    # Dicts around the layer's own are left, as long as each holds nothing but the next.
    while not any(_plain_name(parts) in _KNOWN for parts, _ in entries):
        around = {parts[:-1][:1] for parts, _ in entries}
        if len(around) != 1 or not around.pop():
            break
        entries = [(parts[1:], value) for parts, value in entries]
    arrays: Arrays = {}
    unexpected = []
    for parts, value in entries:
        name, given = _plain_name(parts), "/".join(parts)
        if name in arrays:
            raise ValueError(f"params holds {name} twice, once as {given}; keep one")
        if name in _KNOWN:
            arrays[name] = _as_array(given, value)
        elif not _BESIDE.fullmatch(given):
            unexpected.append(given)
    if unexpected:
        more = f" and {len(unexpected) - _SHOWN} more" if len(unexpected) > _SHOWN else ""
        raise ValueError(
            f"params holds {', '.join(unexpected[:_SHOWN])}{more}, which the layer does not have; "
            "give its own dict alone, such as params['head']"
        )
    return arrays


def _read_file(path: Path) -> Arrays:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is not an .npz file of arrays; write one with numpy.savez") from None


def _flatten(params: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Entries by the parts of their names."""
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
            # Half precision fits into float32 as it is.
            return array if array.dtype == np.float64 else array.astype(np.float32)
        found = f"dtype {array.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{type(value).__name__} ({error})"
    raise TypeError(f"{name} must be an array of real numbers, found {found}")
