"""Data by name or path: a built-in dataset, arrays, or pictures."""

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data.arrays import (
    ARRAY_SUFFIXES,
    FEATURES,
    ArraySplit,
    check_finite,
    choose_part,
    is_array_folder,
    load_arrays,
    read_parts,
)
from hetxl.data.assembly import Plan
from hetxl.data.build.registry import BUILDERS
from hetxl.data.classes import printable, some
from hetxl.data.dataset import Dataset, InputSpec, Split
from hetxl.data.folders import find_images, load_images
from hetxl.data.images import IMAGE_SUFFIXES, MEAN, STD, ImageSplit
from hetxl.data.labels import Labels
from hetxl.data.parquet import parquet_columns
from hetxl.data.stored import Stored, open_arrays
from hetxl.data.tables import TABLE_SUFFIXES, find_column
from hetxl.functional.targets import IGNORE_INDEX

BUILT_IN = {
    "pycode": ("hetxl.data.pycode", "load_pycode"),
    "synthetic": ("hetxl.data.synthetic", "load_synthetic"),
    **{name: (builder.module, builder.load) for name, builder in BUILDERS.items()},
}
"""Datasets that are made and not read: where each is loaded."""


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
    """A dataset to train on or to evaluate.

    Args:
        data: "pycode", "synthetic", a dataset that was built (see `hetxl.data.build`), or the path of arrays (see
            `hetxl.data.arrays`) or pictures (`hetxl.data.folders`).
        labels: a file with the labels of a .npy file of features.
        validation: the path of the validation rows, where `data` does not hold them.
        test: the path of the test rows, where `data` does not hold them.
        image_size: height and width of pictures.
        grey: whether pictures lose their colours, as a model of grey pictures needs it.
        seed: of the split of data that has none, and of built-in datasets.
        cache: folder for files that can be made again; by default $HETXL_CACHE, or ~/.cache/hetxl.
        classes: class names of a trained run, to get the same ids; labels that are none of them are an error. A number
            is the option of built-in datasets: how many classes they have.
        **options: of a built-in dataset; for arrays `check` (look for NaN, True by default); for pictures `mean` and
            `std`; for both `whole` (data without splits is one test split, False by default).
    """
    if isinstance(data, str) and data in BUILT_IN:
        for name, given in (("labels", labels), ("validation", validation), ("test", test)):
            if given is not None and name in inspect.signature(_loader(data)).parameters:
                options[name] = given  # what is a file elsewhere may be an option here: wordnet has kinds of labels
            elif given is not None:
                raise ValueError(f"{name}={os.fspath(given)} goes with files; {data!r} is built in and has its own")
        return _open_built_in(data, seed, cache, classes, options)
    if isinstance(classes, int):
        raise TypeError(f"classes must be names for data from files, found {classes}; a number is for {_names()}")
    path = _existing(data)
    plan = Plan(seed, classes, bool(options.pop("whole", False)))
    others = {"validation": _optional(validation, "validation"), "test": _optional(test, "test")}
    if _holds_arrays(path):
        check_options(options, ("check", "whole"), os.fspath(data))
        return load_arrays(path, plan, labels=_optional(labels, "labels"), cache=cache, **others, **options)
    check_options(options, ("mean", "std", "whole"), os.fspath(data))
    if labels is not None:
        raise ValueError(
            f"labels={os.fspath(labels)} goes with a .npy file of features, not with pictures; use a manifest"
        )
    return load_images(path, plan, image_size=image_size, grey=grey, **others, **options)


def open_inputs(
    data: str | os.PathLike[str],
    input: InputSpec,
    *,
    cache: Path | None = None,
    check: bool = True,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Split:
    """Data to predict, for a model that is there already. Labels are not needed, and ignored where there are any.

    Of tables, parquet files and manifests, all rows are predicted, whatever their split.

    Args:
        data: for features, the path of arrays; for tokens, of a .npy file [n, C] or a .npz or .safetensors file with
            the key `tokens`; for pictures, of a folder (all below it), a manifest or a single picture.
        input: what the model gets.
        cache: folder for arrays made of parquet files.
        check: whether to look through all features for NaN and infinite ones.
        mean: of red, green and blue, for pictures in colour.
        std: of red, green and blue, for pictures in colour.

    Returns:
        A split whose labels are all −100.
    """
    path = _existing(data)
    if input.kind == "image":
        paths = find_images(path)
        grey = input.shape[0] == 1
        return ImageSplit(paths, _no_labels(len(paths)), size=input.shape[-1], mean=mean, std=std, grey=grey)
    if input.kind == "tokens":
        return _open_tokens(path, input)
    if not _holds_arrays(path):
        raise ValueError(
            f"{path} must hold features: a file that ends in {', '.join(ARRAY_SUFFIXES)} or a folder of them"
        )
    stored = choose_part(read_parts(path, cache=cache, split_column=False), path, "test").features
    _check_shape(stored, input, stored.is_float, "floating-point features")
    if check:
        check_finite(stored)
    return ArraySplit(stored, _no_labels(len(stored)))


def _no_labels(count: int) -> Labels:
    return Labels(np.full(count, IGNORE_INDEX, dtype=np.int64))


def _open_tokens(path: Path, input: InputSpec) -> Split:
    arrays = open_arrays(path)
    stored = arrays.get("", arrays.get("tokens"))
    if stored is None:
        raise ValueError(f"{path} must have a key tokens, found {some(arrays, 20) or 'none'}")
    _check_shape(stored, input, stored.dtype.kind in "iu" and not stored.bfloat16, "whole numbers, ids of tokens")
    for start, block in stored.blocks():
        bad = ((block < 0) | (block >= input.vocabulary)).any(axis=1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{path} has ids of tokens outside 0 to {input.vocabulary - 1} in row {start + row:,} (counted from 0)"
            )
    return ArraySplit(stored, _no_labels(len(stored)))


def _check_shape(stored: Stored, input: InputSpec, right_type: bool, what: str) -> None:
    if not right_type:
        raise TypeError(f"{stored.path} must hold {what}, found {stored.dtype}")
    if stored.shape[1:] != tuple(input.shape) or len(stored) == 0:
        wanted = ", ".join(map(str, ("n", *input.shape)))
        raise ValueError(f"{stored.path} has shape {list(stored.shape)}, and the model takes [{wanted}], n from 1")


def _open_built_in(
    name: str, seed: int, cache: Path | None, classes: Sequence[str] | int | None, options: dict[str, Any]
) -> Dataset:
    load = _loader(name)
    valid = tuple(inspect.signature(load).parameters)
    check_options(options, valid, name)
    for option, value in (("seed", seed), ("cache", cache), ("classes", classes)):
        if option in valid and value is not None and (option != "classes" or isinstance(value, int)):
            options[option] = value
    dataset = load(**options)
    if classes is not None and not isinstance(classes, int) and list(classes) != list(dataset.class_names):
        raise ValueError(
            f"the classes of {name!r} as opened now ({dataset.num_classes:,}) are not the {len(classes):,} that were "
            "trained on; open it with the same options, and for pycode with the same Python"
        )
    return dataset


def _loader(name: str) -> Callable[..., Dataset]:
    module, function = BUILT_IN[name]
    return getattr(importlib.import_module(module), function)


def check_options(options: Mapping[str, Any], valid: Sequence[str], data: str) -> None:
    """Raise a TypeError for an option that data does not have.

    Args:
        options: that were given.
        valid: names of those that it has.
        data: name or path of the data.
    """
    for option in options:
        if option not in valid:
            near = difflib.get_close_matches(option, valid, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{printable(data)!r} has no option {option!r}, only {', '.join(valid)}{hint}")


def _names() -> str:
    *most, last = BUILT_IN
    return f"{', '.join(most)} and {last}"


def _optional(path: str | os.PathLike[str] | None, argument: str) -> Path | None:
    if path is None:
        return None
    found = Path(path).expanduser()
    if not found.exists():
        raise FileNotFoundError(f"{argument}={printable(os.fspath(path))} does not exist")
    return found


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
        f"data={printable(text)!r} is no built-in dataset ({', '.join(BUILT_IN)}) and no file or folder{hint}"
    )


def _holds_arrays(path: Path) -> bool:
    """Whether a path is one of arrays, and not of pictures; neither is an error."""
    if path.is_dir():
        return is_array_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return find_column(parquet_columns(path), FEATURES) is not None
    if suffix in ARRAY_SUFFIXES:
        return True
    if suffix in TABLE_SUFFIXES:
        return False
    if suffix in IMAGE_SUFFIXES:
        raise ValueError(f"{path} is a single picture; give a folder of class folders or a manifest")
    raise ValueError(
        f"{path} is no kind of data that is known: looked for arrays ({', '.join(ARRAY_SUFFIXES)}), a manifest of "
        f"pictures ({', '.join(TABLE_SUFFIXES)}), or a folder of either"
    )
