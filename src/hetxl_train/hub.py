"""Save, load and push runs by the conventions of the Hugging Face hub, with a model card.

A saved run holds what prediction needs. It leaves out what may reveal the data: examples, records, the log,
checkpoints, the fingerprint of the inputs, names of files that could not be read, and directories in the options.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from hetxl._files import read_json, write_bytes, write_checked
from hetxl.integrations import hub
from hetxl.integrations.export.head_file import save_head
from hetxl.nn import Head
from hetxl_train.calibration import FILE
from hetxl_train.console import Console
from hetxl_train.report.card import model_card
from hetxl_train.runs import WEIGHTS, Trained, load_run

COPIED = (WEIGHTS, "confusions.json", "curves.json", FILE)
"""Files that are published unchanged, if a run has them; other files are published without `PRIVATE`."""
PRIVATE = {"model.json": ("data",), "result.json": ("broken",)}
"""Entries that are not published: fingerprints of the inputs, and names of files."""


def save_pretrained(run: str | Path, directory: str | Path, *, license: str | None = None) -> None:
    """Write a finished run to a directory: files for prediction, the head alone if it can be saved, and a model card.

    Args:
        directory: created if missing; other files in it do not change.
        license: identifier of the license in the card, such as "apache-2.0".
    """
    trained, target = load_run(run), Path(directory)
    source = trained.run.path
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the run itself; choose another directory")
    if not (source / WEIGHTS).exists():
        raise ValueError(f"{source} has no result yet; let hetxl train finish it")
    card = model_card(source, license=license)
    target.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    write_checked(target / "config.json", _public(trained.run.config).to_dict())
    for name, private in PRIVATE.items():
        content = read_json(source / name, dict)
        write_checked(target / name, {key: value for key, value in content.items() if key not in private})
    if isinstance(trained.model.head, Head):
        try:
            save_head(trained.model.head, target / hub.HEAD, class_names=trained.class_names)
        except TypeError:  # only code can build this head; the run has its weights
            (target / hub.HEAD).unlink(missing_ok=True)
    write_bytes(target / hub.CARD, card.encode())


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Trained:
    """Load a trained classifier from a directory or from a repository of the hub ("owner/name")."""
    return load_run(hub.local_directory(name, revision), device, console)


def push_to_hub(run: str | Path, name: str, *, private: bool | None = None, license: str | None = None) -> str:
    """Push a finished run to a repository of the hub, created if missing; return its address.

    Args:
        name: "owner/repository"; or a path that begins with "/", "./", "../" or "~", to write a directory instead.
        private: whether a new repository is private.
        license: as in `save_pretrained`.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(run, folder, license=license)
        return hub.upload(folder, name, private=private)


def _public(config: Any) -> Any:
    """Return a configuration with only the last part of each path, and without the run's own directory."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    paths = {key: Path(value).name for key, value in values.items() if isinstance(value, str) and _is_local(value)}
    return dataclasses.replace(config, **paths | {"out": None})


def _is_local(value: str) -> bool:
    return value.startswith("~") or Path(value).is_absolute()
