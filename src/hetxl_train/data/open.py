"""Open data by name or path: a built-in dataset, arrays, or images."""

import difflib
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.functional.targets import IGNORE_INDEX
from hetxl_train import plugins
from hetxl_train.config import DataOptions
from hetxl_train.data import arrays
from hetxl_train.data.build_dataset import Plan, choose_part
from hetxl_train.data.dataset import Dataset, InputSpec, Split
from hetxl_train.data.images import IMAGE_SUFFIXES, ImageSplit, find_images, load_images
from hetxl_train.data.label_noise import with_label_noise
from hetxl_train.data.labels import Labels, printable, some
from hetxl_train.data.manifests import TABLE_SUFFIXES, find_column, parquet_columns
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays

BUILT_IN = {
    "pycode": "hetxl_train.data.pycode:load_pycode",
    "synthetic": "hetxl_train.data.synthetic:load_synthetic",
    **{name: entry.value for name, entry in plugins.entries("datasets").items()},
}
"""Datasets known by name, also those of other packages: the function that loads each."""

Value = int | float | bool | str


def split_spec(data: str) -> tuple[str, dict[str, Value]]:
    """Split the name of a built-in dataset from the options behind it; a path has no options.

    >>> split_spec("synthetic:noise=2,rows=50000")
    ('synthetic', {'noise': 2, 'rows': 50000})
    """
    name, colon, rest = data.partition(":")
    if name not in BUILT_IN or not colon:
        return data, {}
    options: dict[str, Value] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"data {data!r}: write options as {name}:option=value,option=value, found {part!r}")
        option = key.strip().replace("-", "_")
        if option in options:
            raise ValueError(f"data {data!r}: {option} is given twice; keep one")
        options[option] = _parse(text.strip())
    return name, options


def _parse(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def open_data(options: DataOptions) -> Dataset:
    """Open the dataset that a configuration names, with the label noise that it asks for."""
    name, written = split_spec(options.data)
    arguments: dict[str, Any] = {"labels": options.labels, "validation": options.validation, "test": options.test}
    arguments |= written  # options behind the name take precedence: `labels` may be one of them
    dataset = open_dataset(name, image_size=options.image_size, seed=options.data_seed, **arguments)
    if dataset.not_for_training is not None:
        raise ValueError(f"data {options.data!r}: {dataset.not_for_training}")
    if options.label_noise == "none":
        return dataset
    return with_label_noise(dataset, options.label_noise, options.label_noise_rate, options.data_seed)


def open_dataset(
    data: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    validation: str | os.PathLike[str] | None = None,
    test: str | os.PathLike[str] | None = None,
    image_size: int = 224,
    grey: bool = False,
    seed: int = 0,
    cache: Path | None = None,
    classes: Sequence[str] | int | None = None,
    **options: Any,
) -> Dataset:
    """Open a dataset to train on or to evaluate.

    Args:
        data: "pycode", "synthetic", a dataset that another package adds (`hetxl_train.plugins`), or the path of
            arrays (`hetxl_train.data.arrays`) or images (`hetxl_train.data.images`).
        labels: a file with the labels of a .npy file of features; or the option of that name of a built-in dataset.
        validation: the path of the validation rows, if `data` does not hold them.
        test: the path of the test rows, if `data` does not hold them.
        grey: whether to convert images to greyscale, as a model of greyscale images needs it.
        seed: of the split of data that has none, and of built-in datasets.
        cache: directory for files that can be made again; by default $HETXL_CACHE, or ~/.cache/hetxl.
        classes: class names of a trained run, to get the same ids; other labels are an error. A number is the option
            of built-in datasets: how many classes they have.
        **options: of a built-in dataset; for arrays `check` (search for NaN, True by default); for images `mean` and
            `std`; for both `whole` (use data without splits as one test split, False by default).
    """
    if isinstance(data, str) and data in BUILT_IN:
        files = {"labels": labels, "validation": validation, "test": test}
        return _open_built_in(data, files, options, seed=seed, cache=cache, classes=classes)
    if isinstance(classes, int):
        *names, last = BUILT_IN
        raise TypeError(
            f"classes must be names for data from files, found {classes}; a number is for {', '.join(names)} and {last}"
        )
    path = _existing(data)
    plan = Plan(seed, classes, bool(options.pop("whole", False)))
    others = {"validation": _optional(validation, "validation"), "test": _optional(test, "test")}
    if _holds_arrays(path):
        check_options(options, ("check", "whole"), os.fspath(data))
        return arrays.load_arrays(path, plan, labels=_optional(labels, "labels"), cache=cache, **others, **options)
    check_options(options, ("mean", "std", "whole"), os.fspath(data))
    if labels is not None:
        raise ValueError(
            f"labels={os.fspath(labels)} goes with a .npy file of features, not with images; use a manifest"
        )
    return load_images(path, plan, image_size=image_size, grey=grey, **others, **options)


def _open_built_in(
    name: str,
    files: Mapping[str, Any],
    options: dict[str, Any],
    *,
    seed: int,
    cache: Path | None,
    classes: Sequence[str] | int | None,
) -> Dataset:
    """Load a built-in dataset; the parameters of its loader declare the options that it takes."""
    load: Callable[..., Dataset] = pkgutil.resolve_name(BUILT_IN[name])
    declared = tuple(inspect.signature(load).parameters)
    for argument, value in files.items():
        if value is not None and argument not in declared:
            raise ValueError(f"{argument}={os.fspath(value)} goes with files; {name!r} is built in and has its own")
    options = {**options, **{argument: value for argument, value in files.items() if value is not None}}
    check_options(options, declared, name)
    general = {"seed": seed, "cache": cache, "classes": classes if isinstance(classes, int) else None}
    options |= {option: value for option, value in general.items() if option in declared and value is not None}
    dataset = load(**options)
    if classes is not None and not isinstance(classes, int) and list(classes) != list(dataset.class_names):
        raise ValueError(
            f"the classes of {name!r} as opened now ({dataset.num_classes:,}) differ from the {len(classes):,} classes "
            "of the run; open it with the same options and the same version of Python"
        )
    return dataset


def check_options(options: Mapping[str, Any], valid: Sequence[str], data: str) -> None:
    """Raise a TypeError for an option that is not among the valid ones of the data, given by name or path."""
    for option in options:
        if option not in valid:
            near = difflib.get_close_matches(option, valid, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{printable(data)!r} has no option {option!r}, only {', '.join(valid)}{hint}")


def _optional(path: str | os.PathLike[str] | None, argument: str) -> Path | None:
    if path is None:
        return None
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise FileNotFoundError(f"{argument}={printable(os.fspath(path))} does not exist")
    return expanded


def _existing(data: str | os.PathLike[str]) -> Path:
    text = os.fspath(data)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    near = difflib.get_close_matches(text, BUILT_IN, 1)
    beside = [] if not text or not path.parent.is_dir() else os.listdir(path.parent)
    near += [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, beside, 1)] if path.name else []
    hint = f"; did you mean {printable(near[0])!r}?" if near else ""
    raise FileNotFoundError(
        f"data={printable(text)!r} is neither a built-in dataset ({', '.join(BUILT_IN)}) nor an existing path{hint}"
    )


def _holds_arrays(path: Path) -> bool:
    """Whether a path is of arrays rather than of images; neither is an error."""
    if path.is_dir():
        return arrays.is_array_directory(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return find_column(parquet_columns(path), arrays.FEATURES) is not None
    if suffix in arrays.ARRAY_SUFFIXES:
        return True
    if suffix in TABLE_SUFFIXES:
        return False
    if suffix in IMAGE_SUFFIXES:
        raise ValueError(f"{path} is a single image; give a directory of class directories or a manifest")
    raise ValueError(
        f"{path} is not a known kind of data: looked for arrays ({', '.join(arrays.ARRAY_SUFFIXES)}), a manifest of "
        f"images ({', '.join(TABLE_SUFFIXES)}), or a directory of either"
    )


def open_inputs(data: str | os.PathLike[str], input: InputSpec, *, cache: Path | None = None) -> Split:
    """Open data to predict with a trained model. Labels are not needed, and ignored if present.

    Of tables, parquet files and manifests, all rows are predicted, whatever their split. For features, `data` is the
    path of arrays; for tokens, of a .npy file [n, C] or a .npz or .safetensors file with the key `tokens`; for images,
    of a directory (all below it), a manifest or a single image. The labels of the split are all −100.
    """
    path = _existing(data)
    if input.kind == "image":
        paths = find_images(path)
        grey = input.shape[0] == 1
        return ImageSplit(paths, _no_labels(len(paths)), size=input.shape[-1], grey=grey)
    if input.kind == "tokens":
        return _open_tokens(path, input)
    if not _holds_arrays(path):
        raise ValueError(
            f"{path} must hold features: a file that ends in {', '.join(arrays.ARRAY_SUFFIXES)} or a directory of them"
        )
    array = choose_part(arrays.read_parts(path, cache=cache, split_column=False).by_split, path, "test").features
    _check_shape(array, input, array.is_float, "floating-point features")
    arrays.check_finite(array)
    return arrays.ArraySplit(array, _no_labels(len(array)))


def _no_labels(count: int) -> Labels:
    return Labels(np.full(count, IGNORE_INDEX, dtype=np.int64))


def _open_tokens(path: Path, input: InputSpec) -> Split:
    by_name = open_arrays(path)
    array = by_name.get("", by_name.get("tokens"))
    if array is None:
        raise ValueError(f"{path} must have a key tokens, found {some(by_name, 20) or 'none'}")
    _check_shape(array, input, array.is_integer, "whole numbers, ids of tokens")
    for start, block in array.blocks():
        bad = ((block < 0) | (block >= input.vocabulary)).any(axis=1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{path} has ids of tokens outside 0 to {input.vocabulary - 1} in row {start + row:,} (counted from 0)"
            )
    return arrays.ArraySplit(array, _no_labels(len(array)))


def _check_shape(array: MappedArray, input: InputSpec, right_type: bool, what: str) -> None:
    if not right_type:
        raise TypeError(f"{array.path} must hold {what}, found {array.dtype}")
    if array.shape[1:] != tuple(input.shape) or len(array) == 0:
        expected = ", ".join(map(str, ("n", *input.shape)))
        raise ValueError(
            f"{array.path} has shape {list(array.shape)}, but the model takes [{expected}] with at least one row"
        )
