"""Tensors in safetensors files that carry a checksum of their content: one way to write them, one way to read them."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hetxl._files import parse_json, whole_file

KEY, CHECKSUM = "hetxl", "sha256"
"""The entry of a file's metadata that describes it, a JSON object, and the checksum in that.

One entry alone, because the order of several differs from file to file: equal content gives equal bytes.
"""


_DIGEST = re.compile("[0-9a-f]{64}")


class StoredTensors(NamedTuple):
    """The content of a file, its checksum verified if it has one."""

    tensors: dict[str, Tensor]  # on the CPU
    about: dict[str, Any]  # the JSON object, without the checksum; empty if there is none
    metadata: dict[str, str]  # as stored
    checked: bool  # False for a file without a checksum, of another program or an older version


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None, key: str = KEY
) -> None:
    """Write tensors and a description for JSON with a checksum of both, whole or not at all.

    A full disk is an OSError.
    """
    # Own, contiguous memory: safetensors refuses tensors that share it.
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    described = dict(about or {})
    text = json.dumps(described | {CHECKSUM: content_checksum(own, described)}, allow_nan=False)
    with whole_file(path) as temporary:
        try:
            save_file(own, temporary, {key: text})
        except SafetensorError as error:  # a full disk is no OSError there
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise OSError(f"{path} cannot be written: {_one_line(error)}") from None
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def read_tensors(path: Path, key: str = KEY) -> StoredTensors:
    """Read a file and compare it with its checksum; raise a ValueError that names the file if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # In memory of their own, aligned as torch's: products of unaligned tensors may round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, TypeError) as error:  # TypeError: a type of numbers that torch does not have
        raise ValueError(f"{path} is not a complete safetensors file: {_one_line(error)}") from None
    about = parse_json(metadata.get(key, "{}"), f"{path} is damaged: {key} in its metadata", dict)
    checksum = about.pop(CHECKSUM, None)
    # A checksum that is there, but not under its name: the name was damaged.
    hidden = checksum is None and any(_DIGEST.search(text) for text in metadata.values())
    if hidden or (checksum is not None and checksum != content_checksum(tensors, about)):
        raise ValueError(
            f"{path} was changed or damaged: its content does not match its checksum; restore or rewrite it"
        )
    return StoredTensors(tensors, about, metadata, checksum is not None)


def content_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a description and of tensors on the CPU: names, types, shapes and bytes, in any order."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():  # an empty one has no bytes, and strides that no view takes
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_finite(path: Path, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise unless the named tensors hold finite numbers alone."""
    for name in names:
        value = tensors.get(name)
        if value is not None and value.is_floating_point() and not value.isfinite().all():
            count = int((~value.isfinite()).sum())
            raise ValueError(
                f"{path} cannot be used: {count:,} of the {value.numel():,} numbers of {name} are NaN or infinite; "
                "train again with a lower learning rate, or restore the file"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
