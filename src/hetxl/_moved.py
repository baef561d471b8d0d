"""Keep old import paths working, with a DeprecationWarning, until the next release.

`hetxl` used to be one package. Now the app is `hetxl_train`, `hetxl.evaluation` is `hetxl.metrics`, and the studies and
benchmark datasets are in the lab (`hetxl_lab`).
"""

import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLES = json.loads((Path(__file__).parent / "moved.json").read_text(encoding="utf-8"))
PACKAGES: dict[str, str] = _TABLES["packages"]  # new package of the modules of an old one, unless listed in `MODULES`
MODULES: dict[str, list[str]] = _TABLES["modules"]  # new modules of the names of an old one, searched in order
NAMES: dict[str, str] = _TABLES["names"]  # new names of renamed objects


def homes(module: str) -> list[str]:
    """Return the modules that replace an old module; none if the module is not an old one."""
    if module in MODULES:
        return MODULES[module]
    package, _, name = module.rpartition(".")
    if module in PACKAGES:
        return [PACKAGES[module]]
    if package in PACKAGES and importlib.util.find_spec(f"{PACKAGES[package]}.{name}") is not None:
        return [f"{PACKAGES[package]}.{name}"]
    return []


class _Moved(MetaPathFinder, Loader):
    """Find modules by their old names, after all other finders, and look their attributes up in the new modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True) if fullname.startswith("hetxl.") and homes(fullname) else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, f"Moved to {', '.join(homes(spec.name))}.")

        def look_up(name: str) -> Any:
            if not name.startswith("__"):
                new = NAMES.get(name, name)
                for home in homes(spec.name):
                    value = getattr(importlib.import_module(home), new, None)
                    if value is not None:
                        message = f"{spec.name}.{name} is now {home}.{new}; the old path will be removed in 0.2"
                        warnings.warn(message, DeprecationWarning, stacklevel=2)
                        return value
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}; it moved to {homes(spec.name)}")

        module.__getattr__ = look_up  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # no code to run


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
