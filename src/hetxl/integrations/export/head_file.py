"""Save a trained head as one safetensors file, with its configuration as JSON in the metadata.

Loading a file executes nothing from it, and checks everything before use.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least, one_of
from hetxl._tensors import StoredTensors, check_finite, read_tensors, write_tensors
from hetxl._version import __version__
from hetxl.nn import HEADS, DropoutHead, FixedTemperature, Head, HetHashHead, LaplaceHead, LearnedTemperature
from hetxl.nn.classifier import is_plain_linear
from hetxl.nn.covariance import COVARIANCE_CLASSES
from hetxl.registry import HEAD_ENTRIES, HeadEntry

FORMAT = 7
"""Format 1 had no `noise_scale`, 2 no `standardize`, 3 no checksum, 4 no `eval_seed`, 5 no `flip_rate`, 6 no averaged
heads."""
KEY = "hetxl_head"
"""Metadata entry with the configuration."""

_CLASSES: dict[str, type[Head]] = {**HEADS, "dropout": DropoutHead, "laplace": LaplaceHead}
_AVERAGED = (
    HeadEntry("dropout", "MC dropout", "DropoutHead", options=("dropout",), noise=False),
    HeadEntry("laplace", "Laplace", "LaplaceHead", noise=False),
)
_ENTRIES = {entry.name: entry for entry in (*HEAD_ENTRIES, *_AVERAGED)}
_COVARIANCES: dict[type, str] = {kind: name for name, kind in COVARIANCE_CLASSES.items()}
_SHARED = (
    "link",
    "train_samples",
    "eval_samples",
    "eval_seed",
    "sampler",
    "memory_budget",
    "bias",
    "bias_init",
    "standardize",
    "flip_rate",
)
_NOISE = ("covariance", "rank", "residual", "noise_init", "noise_scale")
_TEMPERATURES = {"fixed": (FixedTemperature, ("value",)), "learned": (LearnedTemperature, ("low", "high", "init"))}


def save_head(head: Head, path: str | Path, *, class_names: Sequence[str] | None = None) -> None:
    """Save a head to one file, atomically.

    Args:
        head: one of the four heads, a `DropoutHead` or a `LaplaceHead`, with a linear classifier, a named sampler and a
            fixed or learned temperature, so that it can be described without code.
        path: output file, usually .safetensors.
        class_names: K names, stored with the configuration; `describe_head` returns them.
    """
    configuration, tensors = _configuration(head, class_names), head.state_dict()
    if problem := _mixed_types(tensors):
        raise ValueError(f"head cannot be saved: {problem}; convert it with head.to(torch.float32) first")
    write_tensors(Path(path), tensors, configuration, KEY)


def load_head(path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Head:
    """Load a head in evaluation mode [default: on the CPU, with the saved dtype].

    With the saved dtype, its predictions are bit-identical to those of the saved head.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, found {dtype}")
    path = Path(path)
    stored = _read(path)
    tensors, configuration = stored.tensors, _read_configuration(path, stored)
    head = _build(path, configuration, {name: tuple(value.shape) for name, value in tensors.items()})
    if dtype is None and (problem := _mixed_types(tensors)):
        raise ValueError(f"{path} is damaged: {problem}; pass dtype= to convert them")
    check_finite(path, tensors, tensors)
    expected = head.state_dict()
    for name, value in tensors.items():
        if value.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{path} is damaged: {name} has dtype {value.dtype}, expected {expected[name].dtype}")
    if isinstance(head, HetHashHead):
        buckets = tensors["hash"]
        if buckets.dtype != torch.int64 or bool(((buckets < 0) | (buckets >= head.buckets)).any()):
            raise ValueError(f"{path} is damaged: hash must hold buckets 0 to {head.buckets - 1}")
    head.load_state_dict(tensors, assign=True)
    return head.to(device=device, dtype=dtype).eval()


def describe_head(path: str | Path) -> dict[str, Any]:
    """Return the configuration of a saved head, without its tensors.

    Returns:
        "head" (its name), "in_features", "num_classes", "options", "temperature", "class_names" (a list or None),
        "format" and "hetxl_version".
    """
    return _read_configuration(Path(path), _read(Path(path)))


def _configuration(head: Head, class_names: Sequence[str] | None) -> dict[str, Any]:
    """Return the configuration of a head; raise if JSON cannot represent it."""
    kinds: dict[type, str] = {kind: name for name, kind in _CLASSES.items()}
    if type(head) not in kinds:
        raise TypeError(
            f"head must be one of {', '.join(kind.__name__ for kind in kinds)}, found {type(head).__name__}"
        )
    kind = kinds[type(head)]
    if not is_plain_linear(head.classifier):
        name = getattr(head.classifier, "__name__", type(head.classifier).__name__)
        raise TypeError(
            f"classifier is {name}, which needs code and cannot be saved; use an nn.Linear without hooks as "
            "classifier, or save this head's state_dict()"
        )
    if not isinstance(head.sampler, str):
        raise TypeError('sampler is a function and cannot be saved; set head.sampler to a name, such as "orthogonal"')
    if any(value.is_meta for value in head.state_dict().values()):
        raise ValueError("head is on the meta device and has no weights; load or initialise them before you save it")
    options = {name: getattr(head, name) for name in _SHARED if name not in ("bias", "standardize")}
    options |= {"bias": head.classifier.bias is not None, "standardize": head.standardize is not None}
    if head.covariance is not None:
        covariance = head.covariance
        if type(covariance) not in _COVARIANCES:
            raise TypeError(
                f"covariance is a {type(covariance).__name__}, which cannot be saved; use a covariance by name"
            )
        options["covariance"] = _COVARIANCES[type(covariance)]
        options |= {"rank": covariance.rank, "noise_init": covariance.init, "noise_scale": head.noise_scale}
        options["residual"] = covariance.residual_kind or "rank1"  # `full` has none and ignores it
    options |= head.own_options()
    configuration = {
        "format": FORMAT,
        "hetxl_version": __version__,
        "head": kind,
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "options": options,
        "temperature": _describe_temperature(head.temperature),
        "class_names": None if class_names is None else check_names(class_names, head.num_classes),
    }
    # Parametrised or adapted layers have the type of a linear layer, but other tensors.
    shapes = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if problem := _mismatch(_empty_head(configuration), shapes):
        raise ValueError(f"head cannot be saved: {problem}; remove parametrisations and adapters first")
    return configuration


def _describe_temperature(temperature: nn.Module) -> dict[str, Any]:
    for name, (kind, arguments) in _TEMPERATURES.items():
        if type(temperature) is kind:
            return {"kind": name} | {argument: getattr(temperature, argument) for argument in arguments}
    raise TypeError(
        f"temperature is a {type(temperature).__name__}, which cannot be saved; "
        "set head.temperature = hetxl.FixedTemperature(float(head.temperature())) first"
    )


def check_names(class_names: Sequence[str], num_classes: int) -> list[str]:
    """Return class names as a list; raise unless they are K strings."""
    names = [] if isinstance(class_names, str | dict) else list(class_names)
    if len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names must be {num_classes} strings, one for each class, found {class_names!r:.80}")
    return [str(name) for name in names]  # numpy's strings too


def _read(path: Path) -> StoredTensors:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; pass a file written by save_head")
    return read_tensors(path, KEY)


def _mixed_types(tensors: Mapping[str, Tensor]) -> str:
    """Return the problem if weights other than τ have several floating-point types; empty otherwise."""
    weights = (value for name, value in tensors.items() if not name.startswith("temperature."))
    types = sorted({str(value.dtype) for value in weights if value.is_floating_point()})
    return f"its weights have the types {', '.join(types)}" if len(types) > 1 else ""


def _read_configuration(path: Path, stored: StoredTensors) -> dict[str, Any]:
    """Return the configuration from a file's metadata, with exactly its known entries."""
    if KEY not in stored.metadata:
        raise ValueError(
            f"{path} has tensors but no head (no {KEY!r} in its metadata); pass a file written by save_head"
        )
    configuration = stored.about
    try:
        version = integer_at_least("format", configuration["format"], 1)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: its configuration has no format number") from None
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer hetxl (format {version}; this one reads up to {FORMAT}); upgrade hetxl"
        )
    if version >= 4 and not stored.checked:
        raise ValueError(f"{path} is damaged: its checksum is missing; export the head again")
    try:
        _exactly("entries", configuration, ("format", "hetxl_version", "head", "in_features", "num_classes", "options",
                                    "temperature", "class_names"))  # fmt: skip
        one_of("head", configuration["head"], _CLASSES)
        if version == 1 and configuration["head"] != "det" and isinstance(configuration["options"], dict):
            configuration["options"].setdefault("noise_scale", 1.0)
        if version <= 2 and isinstance(configuration["options"], dict):
            configuration["options"].setdefault("standardize", False)
        if version <= 4 and isinstance(configuration["options"], dict):
            configuration["options"].setdefault("eval_seed", 0)
        if version <= 5 and isinstance(configuration["options"], dict):
            configuration["options"].setdefault("flip_rate", 0.0)
        entry = _ENTRIES[configuration["head"]]
        _exactly("options", configuration["options"], (*_SHARED, *(_NOISE if entry.noise else ()), *entry.options))
        temperature = configuration["temperature"]
        _exactly("temperature", temperature, None)
        one_of("temperature", temperature.get("kind"), _TEMPERATURES)
        _exactly("temperature", temperature, ("kind", *_TEMPERATURES[temperature["kind"]][1]))
        if configuration["class_names"] is not None:
            check_names(configuration["class_names"], integer_at_least("num_classes", configuration["num_classes"], 1))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: in its configuration, {error}") from None
    return configuration


def _exactly(what: str, table: object, names: tuple[str, ...] | None) -> None:
    """Raise unless `table` is a dictionary with exactly these keys."""
    if not isinstance(table, dict):
        raise ValueError(f"{what} must be a table, found {table!r:.80}")
    if names is not None and set(table) != set(names):
        raise ValueError(f"{what}: {_differences(set(names), set(table))}")


def _build(path: Path, configuration: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Head:
    """Return the head of a configuration on the meta device; raise unless tensors of these shapes fit."""
    sizes = (configuration["num_classes"], configuration["in_features"])
    # The file must have a classifier of the configured sizes before a head of those sizes is created.
    if shapes.get("classifier.weight") != sizes:
        actual = "missing" if "classifier.weight" not in shapes else f"of shape {list(shapes['classifier.weight'])}"
        raise ValueError(f"{path} is damaged: classifier.weight is {actual}, and its configuration says {list(sizes)}")
    try:
        head = _empty_head(configuration)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]  # torch's errors end with a trace
        raise ValueError(f"{path} is damaged: in its configuration, {reason}") from None
    if problem := _mismatch(head, shapes):
        raise ValueError(f"{path} is damaged: {problem}")
    return head


def _empty_head(configuration: dict[str, Any]) -> Head:
    """Return the head of a configuration on the meta device."""
    entries = dict(configuration["temperature"])
    kind, _ = _TEMPERATURES[entries.pop("kind")]
    name, *sizes = (configuration[entry] for entry in ("head", "in_features", "num_classes"))
    with torch.device("meta"):
        return _CLASSES[name](*sizes, temperature=kind(**entries), **configuration["options"])


def _mismatch(head: Head, shapes: dict[str, tuple[int, ...]]) -> str:
    """Return how tensor shapes differ from those of a head; empty if they do not."""
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if set(expected) != set(shapes):
        return f"tensors: {_differences(set(expected), set(shapes))}"
    for name, shape in sorted(expected.items()):
        if shapes[name] != shape:
            return f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
    return ""


def _differences(expected: set[str], names: set[str]) -> str:
    parts = [("missing", sorted(expected - names)), ("unknown", sorted(names - expected))]
    return "; ".join(
        f"{what} {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" for what, names in parts if names
    )
