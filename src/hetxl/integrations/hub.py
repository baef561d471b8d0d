"""Save heads to a directory, load them from a directory or a Hugging Face repository, and push them to the hub.

save_pretrained(head, "my-head", class_names=names)
head = from_pretrained("my-head")                      # or from_pretrained("owner/my-head")
push_to_hub(head, "owner/my-head")

Directories need only hetxl; repositories need huggingface_hub and a login.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetxl._checks import needing
from hetxl._files import write_bytes
from hetxl.integrations.export.head_file import describe_head, load_head, save_head
from hetxl.nn import Head
from hetxl.registry import HEAD_LABELS

HEAD, CARD = "head.safetensors", "README.md"
"""The files of a saved head: its tensors and configuration, and its model card."""


def save_pretrained(
    head: Head, directory: str | Path, *, class_names: Sequence[str] | None = None, card: str | None = None
) -> None:
    """Save a head to a directory: `head.safetensors`, with a checksum, and a model card, `README.md`.

    Args:
        head: a head that `save_head` accepts.
        directory: created if missing; other files in it do not change.
        class_names: K names.
        card: text of the card; None for a default card, or to keep an existing card.
    """
    directory = Path(directory)
    save_head(head, directory / HEAD, class_names=class_names)
    if card is not None or not (directory / CARD).exists():
        write_bytes(directory / CARD, (card or _card(describe_head(directory / HEAD))).encode())


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Head:
    """Load a head from a directory or a repository of the hub, in evaluation mode.

    Args:
        name: a directory of `save_pretrained`, an exported `head.safetensors`, or "owner/repository".
        revision: branch, tag or commit of a repository.
        device: see `load_head`.
        dtype: see `load_head`.
    """
    path = Path(name) if Path(name).is_file() else local_directory(name, revision, [HEAD]) / HEAD
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {HEAD}; pass a directory written by save_pretrained")
    return load_head(path, device=device, dtype=dtype)


def push_to_hub(
    head: Head,
    name: str,
    *,
    class_names: Sequence[str] | None = None,
    card: str | None = None,
    private: bool | None = None,
) -> str:
    """Save a head to a repository of the hub, created if missing, and return its address.

    Args:
        name: "owner/repository"; a name that begins with "/", "./", "../" or "~" is a directory to write to.
        class_names: K names.
        card: text of the model card, see `save_pretrained`.
        private: whether a new repository is private.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(head, folder, class_names=class_names, card=card)
        return upload(folder, name, private=private)


def local_directory(name: str | Path, revision: str | None = None, files: Sequence[str] | None = None) -> Path:
    """Return a directory, or download a repository of the hub (all or some files) and return its local copy."""
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision is for repositories, and {path} is a directory; leave it out")
        return path
    if _is_path(name) or str(name).count("/") > 1:
        raise FileNotFoundError(f"{path} does not exist; pass a directory or a repository, as owner/name")
    hub = _huggingface_hub(f"{name} is not a directory, and to load it from the hub")
    try:
        return Path(hub.snapshot_download(str(name), revision=revision, allow_patterns=files and list(files)))
    except hub.errors.HFValidationError as error:
        raise ValueError(f"{name} is neither a directory nor the name of a repository: {error}") from None


def upload(folder: str | Path, name: str, *, private: bool | None = None) -> str:
    """Copy the files of a folder to a repository of the hub or to a directory, and return its address."""
    if _is_path(name):
        path = Path(name).expanduser()
        if path.is_file():
            raise NotADirectoryError(f"{path} is a file; pass a directory or a repository, as owner/name")
        shutil.copytree(folder, path, dirs_exist_ok=True)
        return str(path)
    hub = _huggingface_hub("to push to the hub")
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
    except hub.errors.HFValidationError as error:
        raise ValueError(f"{name} cannot be the name of a repository: {error}") from None
    hub.upload_folder(repo_id=address.repo_id, folder_path=str(folder), commit_message="Add a model of hetxl")
    return str(address)


def front_matter(values: Mapping[str, Any]) -> str:
    """Return the YAML front matter of a model card; values are JSON, which is valid YAML."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def _is_path(name: str | Path) -> bool:
    """Return whether a name is a path and cannot be a repository."""
    return isinstance(name, Path) or name.startswith(("/", "./", "../", "~")) or name in (".", "..")


def _huggingface_hub(purpose: str) -> Any:
    with needing(f"{purpose}, install huggingface_hub", "huggingface_hub"):
        import huggingface_hub
        import huggingface_hub.errors
    return huggingface_hub


def _card(about: Mapping[str, Any]) -> str:
    """Return the model card of a head from its configuration."""
    label = HEAD_LABELS[about["head"]]
    facts = front_matter({"library_name": "hetxl", "tags": ["hetxl", about["head"], "uncertainty"]})
    return f"""{facts}
# {label} head

A {label} head of hetxl: {about["in_features"]:,} features to {about["num_classes"]:,}
classes, {about["options"]["link"]} link. It takes the features of the backbone that it was trained with.

```python
from hetxl.integrations.hub import from_pretrained

head = from_pretrained("owner/name")
prediction = head.predict(features, top_k=1)  # probabilities, entropy, mutual information
```
"""
