"""A trained head as one safetensors file: its tensors, and its configuration as JSON in the file's metadata.

Nothing in the file is executed when it is read, and everything is checked before it is used.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hetxl._version import __version__
from hetxl.data.build.files import write_whole
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.nn import HEADS, FixedTemperature, Head, HetHashHead, HetXLHead, LearnedTemperature, build_head
from hetxl.nn.classifier import is_plain_linear
from hetxl.nn.covariance import DiagonalCovariance, EfficientCovariance, FullCovariance, LowRankCovariance

FORMAT = 2
"""1 had no `noise_scale`."""
KEY = "hetxl_head"
"""The entry of the metadata that holds the configuration."""

_COVARIANCES: dict[type, str] = {
    EfficientCovariance: "efficient",
    LowRankCovariance: "low_rank",
    DiagonalCovariance: "diagonal",
    FullCovariance: "full",
}
_SHARED = ("link", "train_samples", "eval_samples", "sampler", "memory_budget", "bias", "bias_init")
_NOISE = ("covariance", "rank", "residual", "noise_init", "noise_scale")
_OWN = {"det": (), "het": _NOISE, "het-h": (*_NOISE, "buckets", "hash_seed"), "het-xl": (*_NOISE, "noise_features")}
_TEMPERATURES = {"fixed": (FixedTemperature, ("value",)), "learned": (LearnedTemperature, ("low", "high", "init"))}


def save_head(head: Head, path: str | Path, *, class_names: Sequence[str] | None = None) -> None:
    """Write a head to one file, whole or not at all.

    Args:
        head: one of the four, with a linear classifier, a named sampler and a fixed or learned temperature: what can be
            described without code.
        path: of the file, usually ending in .safetensors.
        class_names: K names, kept with the configuration; `describe_head` gives them back.
    """
    configuration = _configuration(head, class_names)
    # Own, contiguous memory: safetensors refuses tensors that share it.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in head.state_dict().items()}
    text = json.dumps(configuration, allow_nan=False)
    write_whole(Path(path), lambda temporary: save_file(tensors, temporary, {KEY: text}))


def load_head(path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Head:
    """The head of a file, in evaluation mode.

    Args:
        path: that `save_head` wrote.
        device: where it goes; the CPU without.
        dtype: of its floating-point tensors; as they were saved without.

    Returns:
        A head whose predictions are those of the saved one, to the bit if the dtype is the same.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, found {dtype}")
    path = Path(path)
    with _opened(path) as file:
        configuration = _read_configuration(path, file.metadata())
        names = set(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        head = _build(path, configuration, shapes)
        # In memory of their own, aligned as torch's: products of unaligned tensors may round otherwise.
        tensors = {name: file.get_tensor(name).clone() for name in names}
    expected = head.state_dict()
    for name, value in tensors.items():
        if value.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{path} is damaged: {name} has dtype {value.dtype}, expected {expected[name].dtype}")
    if isinstance(head, HetHashHead) and not _within(tensors["hash"], head.buckets):
        raise ValueError(f"{path} is damaged: hash must hold buckets 0 to {head.buckets - 1}")
    head.load_state_dict(tensors, assign=True)
    return head.to(device=device, dtype=dtype).eval()


def describe_head(path: str | Path) -> dict[str, Any]:
    """The configuration of a saved head, without its tensors.

    Args:
        path: that `save_head` wrote.

    Returns:
        "head" (its name), "in_features", "num_classes", "options", "temperature", "class_names" (a list or None),
        "format" and "hetxl_version".
    """
    path = Path(path)
    with _opened(path) as file:
        return _read_configuration(path, file.metadata())


def _configuration(head: Head, class_names: Sequence[str] | None) -> dict[str, Any]:
    """What a head is made of; raises for what JSON cannot hold."""
    kinds: dict[type, str] = {kind: name for name, kind in HEADS.items()}
    if type(head) not in kinds:
        raise TypeError(
            f"head must be one of {', '.join(kind.__name__ for kind in kinds)}, found {type(head).__name__}"
        )
    kind = kinds[type(head)]
    if not is_plain_linear(head.classifier):
        found = getattr(head.classifier, "__name__", type(head.classifier).__name__)
        raise TypeError(
            f"classifier is {found}, code that a file cannot hold; save a head with an nn.Linear without hooks as "
            "classifier, or this one's state_dict()"
        )
    if not isinstance(head.sampler, str):
        raise TypeError(
            'sampler is a function, code that a file cannot hold; set head.sampler to the name of one, as "orthogonal"'
        )
    if any(value.is_meta for value in head.state_dict().values()):
        raise ValueError("head is on the meta device and has no weights; load or reset them before it is saved")
    options = {name: getattr(head, name) for name in _SHARED if name != "bias"}
    options["bias"] = head.classifier.bias is not None
    if head.covariance is not None:
        covariance = head.covariance
        if type(covariance) not in _COVARIANCES:
            raise TypeError(
                f"covariance is a {type(covariance).__name__}, code that a file cannot hold; use one by name"
            )
        options["covariance"] = _COVARIANCES[type(covariance)]
        options |= {"rank": covariance.rank, "noise_init": covariance.init, "noise_scale": head.noise_scale}
        options["residual"] = covariance.residual_kind or "rank1"  # `full` has none and takes no notice
    if isinstance(head, HetHashHead):
        options |= {"buckets": head.buckets, "hash_seed": head.hash_seed}
    if isinstance(head, HetXLHead):
        options["noise_features"] = None if head.projection is None else head.noise_features
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
    # Parametrised or adapted parts keep the type of a linear layer and not its tensors.
    problem = _mismatch(_made(configuration), {name: tuple(value.shape) for name, value in head.state_dict().items()})
    if problem:
        raise ValueError(f"head cannot be saved: {problem}; take parametrisations and adapters off first")
    return configuration


def _describe_temperature(temperature: nn.Module) -> dict[str, Any]:
    for name, (kind, arguments) in _TEMPERATURES.items():
        if type(temperature) is kind:
            return {"kind": name} | {argument: getattr(temperature, argument) for argument in arguments}
    raise TypeError(
        f"temperature is a {type(temperature).__name__}, code that a file cannot hold; "
        "set head.temperature = hetxl.FixedTemperature(float(head.temperature())) first"
    )


def check_names(class_names: Sequence[str], num_classes: int) -> list[str]:
    """Class names as a list; raises unless they are K strings."""
    names = [] if isinstance(class_names, str | dict) else list(class_names)
    if len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names must be {num_classes} strings, one for each class, found {class_names!r:.80}")
    return [str(name) for name in names]  # numpy's strings too


def _opened(path: Path) -> Any:
    """The file, its header read and checked against its length."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the one that save_head wrote")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, or it was cut short: {' '.join(str(error).split())}"
        ) from None


def _read_configuration(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    """The configuration from a file's metadata: all of its entries, and no others."""
    if KEY not in (metadata or {}):
        raise ValueError(f"{path} holds tensors but no head: its metadata has no {KEY!r}; save_head writes it")
    assert metadata is not None
    try:
        found = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its configuration is not valid JSON ({error})") from None
    try:
        version = integer_at_least("format", found["format"] if isinstance(found, dict) else found, 1)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: its configuration has no format number") from None
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer hetxl (format {version}; this one reads up to {FORMAT}); upgrade hetxl"
        )
    try:
        _exactly("entries", found, ("format", "hetxl_version", "head", "in_features", "num_classes", "options",
                                    "temperature", "class_names"))  # fmt: skip
        one_of("head", found["head"], HEADS)
        if version == 1 and found["head"] != "det" and isinstance(found["options"], dict):
            found["options"].setdefault("noise_scale", 1.0)
        _exactly("options", found["options"], (*_SHARED, *_OWN[found["head"]]))
        _exactly("temperature", found["temperature"], None)
        one_of("temperature", found["temperature"].get("kind"), _TEMPERATURES)
        _exactly("temperature", found["temperature"], ("kind", *_TEMPERATURES[found["temperature"]["kind"]][1]))
        if found["class_names"] is not None:
            check_names(found["class_names"], integer_at_least("num_classes", found["num_classes"], 1))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: in its configuration, {error}") from None
    return found


def _exactly(what: str, found: object, names: tuple[str, ...] | None) -> None:
    """Raise unless something is a dictionary, with exactly some keys."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a table, found {found!r:.80}")
    if names is not None and set(found) != set(names):
        raise ValueError(f"{what}: {_differences(set(names), set(found))}")


def _build(path: Path, configuration: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Head:
    """The head of a configuration on the meta device, without memory; raises unless tensors of these shapes fit it."""
    sizes = (configuration["num_classes"], configuration["in_features"])
    # Before a head of stated sizes is made, the file must hold a classifier of those sizes.
    if shapes.get("classifier.weight") != sizes:
        found = "missing" if "classifier.weight" not in shapes else f"of shape {list(shapes['classifier.weight'])}"
        raise ValueError(f"{path} is damaged: classifier.weight is {found}, and its configuration says {list(sizes)}")
    try:
        head = _made(configuration)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]  # torch's own go on with a trace
        raise ValueError(f"{path} is damaged: in its configuration, {reason}") from None
    problem = _mismatch(head, shapes)
    if problem:
        raise ValueError(f"{path} is damaged: {problem}")
    return head


def _made(configuration: dict[str, Any]) -> Head:
    entries = dict(configuration["temperature"])
    kind, _ = _TEMPERATURES[entries.pop("kind")]
    with torch.device("meta"):
        temperature = kind(**entries)
        return build_head(
            configuration["head"],
            configuration["in_features"],
            configuration["num_classes"],
            temperature=temperature,
            **configuration["options"],
        )


def _mismatch(head: Head, shapes: dict[str, tuple[int, ...]]) -> str:
    """How tensors of these shapes differ from those of a head; empty if they do not."""
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    if set(expected) != set(shapes):
        return f"tensors: {_differences(set(expected), set(shapes))}"
    for name, shape in sorted(expected.items()):
        if shapes[name] != shape:
            return f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
    return ""


def _differences(expected: set[str], found: set[str]) -> str:
    parts = [("missing", sorted(expected - found)), ("unknown", sorted(found - expected))]
    return "; ".join(
        f"{what} {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" for what, names in parts if names
    )


def _within(buckets: Tensor, count: int) -> bool:
    return buckets.dtype == torch.int64 and bool(((buckets >= 0) & (buckets < count)).all())
