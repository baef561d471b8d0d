"""Data that is built on the user's machine, out of packages: where they come from, and what is kept."""

from hetxl.data.build.packages import Package, Unavailable, debian_package, python_package
from hetxl.data.build.registry import BUILDERS, Builder
from hetxl.data.build.store import (
    Built,
    Damaged,
    Made,
    array,
    build,
    find,
    packages_folder,
    read_json,
    watched,
    write_array,
    write_json,
)

__all__ = [
    "BUILDERS",
    "Builder",
    "Built",
    "Damaged",
    "Made",
    "Package",
    "Unavailable",
    "array",
    "build",
    "debian_package",
    "find",
    "packages_folder",
    "python_package",
    "read_json",
    "watched",
    "write_array",
    "write_json",
]
