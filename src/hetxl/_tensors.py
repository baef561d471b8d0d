"""Read and write safetensors files with a checksum of their content."""

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
"""The metadata entry with a JSON object that describes the file, and the checksum inside that object.

There is a single entry because the order of several entries varies; this way equal content gives equal bytes.
"""


_DIGEST = re.compile("[0-9a-f]{64}")


class StoredTensors(NamedTuple):
    """The content of a file, its checksum verified if it has one."""

    tensors: dict[str, Tensor]  # on the CPU
    about: dict[str, Any]  # the JSON object, without the checksum; empty if there is none
    metadata: dict[str, str]  # as stored
    checked: bool  # False for a file without a checksum, from another program or an older version


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None, key: str = KEY
) -> None:
    """Write tensors, a JSON description and a checksum of both atomically. A full disk raises an OSError."""
    # Copies in contiguous memory, because safetensors refuses tensors that share memory.
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    described = dict(about or {})
    text = json.dumps(described | {CHECKSUM: content_checksum(own, described)}, allow_nan=False)
    with whole_file(path) as temporary:
        try:
            save_file(own, temporary, {key: text})
        except SafetensorError as error:  # safetensors does not raise an OSError for a full disk
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise OSError(f"{path} cannot be written: {_one_line(error)}") from None
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def read_tensors(path: Path, key: str = KEY) -> StoredTensors:
    """Read a file and verify its checksum; raise a ValueError that names the file if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            # Clones are aligned like other torch tensors; products of unaligned tensors can round differently.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, TypeError) as error:  # TypeError: a number format that torch lacks
        raise ValueError(f"{path} is not a complete safetensors file: {_one_line(error)}") from None
    about = parse_json(metadata.get(key, "{}"), f"{path} is damaged: {key} in its metadata", dict)
    checksum = about.pop(CHECKSUM, None)
    # A checksum under another key means that the key was damaged.
    hidden = checksum is None and any(_DIGEST.search(text) for text in metadata.values())
    if hidden or (checksum is not None and checksum != content_checksum(tensors, about)):
        raise ValueError(
            f"{path} was changed or damaged: its content does not match its checksum; restore or rewrite it"
        )
    return StoredTensors(tensors, about, metadata, checksum is not None)


def content_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a description and of CPU tensors: names, dtypes, shapes and bytes, in any order."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():  # an empty tensor has no bytes, and strides that `view` rejects
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_finite(path: Path, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise unless all numbers of the named tensors are finite."""
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
