"""Open data of any kind as a dataset: built in by name, or read from files and tables."""

import difflib
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.functional.targets import IGNORE_INDEX
from hetxl_train import plugins
from hetxl_train.config import DataOptions, TrainConfig
from hetxl_train.data import arrays
from hetxl_train.data.build_dataset import Part, Parts, Plan, assemble, choose_part
from hetxl_train.data.dataset import Dataset, InputSpec, Split
from hetxl_train.data.image_files import EncodedImages, PixelArray
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.label_noise import with_label_noise
from hetxl_train.data.labels import Labels, RawLabels, printable, some
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays
from hetxl_train.data.preprocessing import transform_of
from hetxl_train.data.read import Data, existing, read_data
from hetxl_train.data.remote import is_remote
from hetxl_train.data.shards import is_shards
from hetxl_train.data.tables import AUTO, LABELS, Columns
from hetxl_train.data.text import TextSplit, Tokenizer
from hetxl_train.data.transforms import GREY, PLAIN, ImageTransform, Preprocessing

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


def columns_of(options: DataOptions) -> Columns:
    """Return the columns that a configuration names."""
    return Columns(options.features_column, options.label_column, options.split_column, options.text_column)


def tokenizer_of(options: TrainConfig) -> Tokenizer | None:
    """Return the tokenizer of a configuration's backbone; None if it is not one of transformers."""
    library, _, model = options.backbone.partition(":")
    return Tokenizer(model, options.text_length) if library == "hf" and model else None


def _transform_of(options: TrainConfig) -> ImageTransform | None:
    """Return the transform of a configuration; None if nothing in it says what images become."""
    transform = transform_of(options)
    return None if transform == ImageTransform() and options.image_size is None else transform


def open_data(
    options: TrainConfig, transform: ImageTransform | None = None, data: Data | None = None, whole: bool = False
) -> Dataset:
    """Open the dataset of a configuration, with the configured label noise.

    A trained run uses its training transform for images; None is that of the configuration. `data`, such as a
    DataFrame, replaces the configured data. With `whole`, files without splits become one test split.
    """
    name, written = split_spec(options.data) if data is None else (data, {})
    arguments: dict[str, Any] = {"labels": options.labels, "validation": options.validation, "test": options.test}
    arguments["seed"] = options.data_seed
    arguments |= written  # options behind the name take precedence: `labels` may be one of them
    if whole and not (isinstance(name, str) and name in BUILT_IN):
        arguments["whole"] = True
    opening = {"transform": transform or _transform_of(options), "tokenizer": tokenizer_of(options)}
    dataset = open_dataset(name, **opening, columns=columns_of(options), **arguments)
    if dataset.not_for_training is not None:
        raise ValueError(f"data {options.data!r}: {dataset.not_for_training}")
    if options.label_noise == "none":
        return dataset
    return with_label_noise(dataset, options.label_noise, options.label_noise_rate, options.data_seed)


def open_dataset(
    data: Data,
    *,
    labels: str | os.PathLike[str] | None = None,
    validation: Data | None = None,
    test: Data | None = None,
    transform: ImageTransform | None = None,
    tokenizer: Tokenizer | None = None,
    columns: Columns = AUTO,
    seed: int = 0,
    cache: Path | None = None,
    classes: Sequence[str] | int | None = None,
    **options: Any,
) -> Dataset:
    """Open a dataset to train on or to evaluate.

    Args:
        data: "pycode", "synthetic", a dataset that another package adds (`hetxl_train.plugins`), or data of any kind
            of `hetxl_train.data.read`: a path, an address, `hf:NAME`, a DataFrame, a `datasets.Dataset`.
        labels: a file with the labels of a .npy file of features; or the option of that name of a built-in dataset.
        validation: the path of the validation rows, if `data` does not hold them.
        test: the path of the test rows, if `data` does not hold them.
        transform: what images go through; None for arrays of images as they are, and the usual one for others.
        tokenizer: of the model that reads texts.
        columns: of a table, or keys of arrays, if they are not to be found by their names and types.
        seed: of the split of data that has none, and of built-in datasets.
        cache: directory for files that can be made again; by default $HETXL_CACHE, or ~/.cache/hetxl.
        classes: class names of a trained run, to get the same ids; other labels are an error. A number is the option
            of built-in datasets: how many classes they have.
        **options: of a built-in dataset; for data from files `check` (search for NaN, True by default) and
            `whole` (use data without splits as one test split, False by default).
    """
    if isinstance(data, str) and data in BUILT_IN:
        files = {"labels": labels, "validation": validation, "test": test}
        return _open_built_in(data, files, options, seed=seed, cache=cache, classes=classes)
    if isinstance(classes, int):
        *names, last = BUILT_IN
        raise TypeError(
            f"classes must be names for data from files, found {classes}; a number is for {', '.join(names)} and {last}"
        )
    plan = Plan(seed, classes, bool(options.pop("whole", False)))
    check_options(options, ("check", "whole"), str(data))
    read = partial(read_data, columns=columns, cache=cache, known=BUILT_IN)
    parts = read(data, labels=_optional(labels, "labels"))
    name = printable(_stem(data))
    for split, other in {"validation": validation, "test": test}.items():
        if other is not None:
            parts = _with_split(parts, str(data), split, other, read(_address(other, split)))
    input, make = _splits_of(parts, transform, tokenizer, bool(options.get("check", True)))
    labelled = {split: (part, _require_labels(part, str(data))) for split, part in parts.by_split.items()}
    return assemble(name, input, labelled, make, plan, parts.class_names, parts.notes)


def _stem(data: Data) -> str:
    """Return a name for data: the stem of its path."""
    return Path(os.fspath(data).removeprefix("hf:")).stem if isinstance(data, str | os.PathLike) else "table"


def _with_split(parts: Parts, name: str, split: str, other: Any, added: Parts) -> Parts:
    """Return parts with those of another file for a split."""
    if split in parts.by_split:
        raise ValueError(f"{split}={other} was passed, but {name} already has {split} rows; use only one of them")
    if added.kind != parts.kind:
        raise ValueError(f"{split}={other} holds inputs of kind {added.kind}, but {name} of kind {parts.kind}")
    names = parts.class_names if added.class_names is None else added.class_names
    if parts.class_names is not None and list(names or ()) != list(parts.class_names):
        raise ValueError(f"class_names of {other} differ from those of {name}; write the same in both")
    by_split = {**parts.by_split, split: choose_part(added.by_split, Path(str(other)), split)}
    return Parts(parts.kind, by_split, names, (*parts.notes, *added.notes))


def _require_labels(part: Part, data: str) -> RawLabels:
    if part.labels is None:
        raise ValueError(
            f"{part.inputs if isinstance(part.inputs, MappedArray) else data} has no labels: looked for "
            f"{', '.join(LABELS[:7])}, … in the same file (another name with --label-column), or beside a .npy file as "
            "NAME_labels.npy; or give labels=FILE"
        )
    return part.labels


def _splits_of(
    parts: Parts, transform: ImageTransform | None, tokenizer: Tokenizer | None, check: bool
) -> tuple[InputSpec, Callable[[Part, Labels, np.ndarray | None], Split]]:
    """Return the input of a model for these parts, and what makes a split of one of them."""
    sources = [part.inputs for part in parts.by_split.values()]
    if parts.kind == "image":
        transform = transform or _own_transform(sources)
        make: Callable[..., Split] = partial(ImageSplit, transform=transform)
        input = InputSpec("image", transform.shape, image=transform.preprocessing)
    elif parts.kind == "text":
        if tokenizer is None:
            raise ValueError("texts need a model that reads them: use --backbone hf:NAME, or store embeddings")
        make, input = partial(TextSplit, tokenizer=tokenizer), tokenizer.input
    else:
        make, input = arrays.ArraySplit, arrays.check_features(sources, check)

    def make_split(part: Part, labels: Labels, rows: np.ndarray | None) -> Split:
        if part.rows is not None:
            rows = part.rows if rows is None else part.rows[rows]
        return make(part.inputs, labels, rows)

    return input, make_split


def _own_transform(sources: Sequence[Any]) -> ImageTransform:
    """Return the transform of images that none was chosen for: arrays keep their size and their channels."""
    if not all(isinstance(source, PixelArray) for source in sources):
        return PLAIN
    grey = all(source.grey for source in sources)
    return ImageTransform(max(source.size for source in sources), GREY if grey else Preprocessing(crop=1.0))


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
            raise ValueError(f"{argument}={os.fspath(value)} is only for files; {name!r} is built in and has its own")
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


def _address(data: Data, argument: str) -> Data:
    """Return other data for a split; a path of this machine must exist."""
    if not isinstance(data, str | os.PathLike) or is_remote(data) or is_shards(str(data)) or str(data)[:3] == "hf:":
        return data
    return _optional(data, argument)


def open_inputs(
    data: Data,
    input: InputSpec,
    *,
    cache: Path | None = None,
    columns: Columns = AUTO,
    tokenizer: Tokenizer | None = None,
) -> Split:
    """Open data to predict with a trained model. Labels are not needed, and ignored if present.

    Of tables all rows are predicted, whatever their split; of a directory of images all below it. Tokens are in a .npy
    file [n, C] or a .npz or .safetensors file with the key `tokens`. The labels of the split are all −100.
    """
    if input.kind == "tokens":
        return _open_tokens(existing(os.fspath(data), BUILT_IN), input)
    columns = columns._replace(label=None, split=None)
    parts = read_data(data, columns, cache=cache, labelled=False, splits=False, known=BUILT_IN)
    if parts.kind != input.kind:
        raise ValueError(f"{data} must hold inputs of kind {input.kind}, as the model takes; found {parts.kind}")
    inputs = choose_part(parts.by_split, Path(_stem(data)), "test").inputs
    labels = _no_labels(len(inputs))
    if input.kind == "image":
        return ImageSplit(inputs, labels, transform=input.transform)
    if input.kind == "text" and tokenizer is not None:
        return TextSplit(inputs, labels, tokenizer=tokenizer)
    _check_shape(inputs, input, inputs.is_float, "floating-point features")
    arrays.check_finite(inputs)
    return arrays.ArraySplit(inputs, labels)


def open_encoded(images: Sequence[bytes], input: InputSpec) -> Split:
    """Open images that are in memory, as the contents of their files, to predict with a trained model."""
    return ImageSplit(EncodedImages(images), _no_labels(len(images)), transform=input.transform)


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
        raise TypeError(f"{array} must hold {what}, found {array.dtype}")
    if array.shape[1:] != tuple(input.shape) or len(array) == 0:
        expected = ", ".join(map(str, ("n", *input.shape)))
        raise ValueError(
            f"{array} has shape {list(array.shape)}, but the model takes [{expected}] with at least one row"
        )
