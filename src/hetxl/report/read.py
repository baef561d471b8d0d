"""Run directories as training writes them. A run that is still going is read as far as it got."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl.report.format import finite

HEAD_LABELS = {"det": "DET", "het": "HET", "het-h": "HET-H", "het-xl": "HET-XL"}
"""What a head is called when its run does not say."""
RUN_FILES = ("result.json", "config.json", "log.jsonl")
"""A directory with any of these is a run."""

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Comparison:
    """What `compare.json` says about the runs beside it.

    Attributes:
        path: the comparison's directory.
        baseline: the label that the others are compared with, None for the default.
        heads: labels in their order.
        seeds: what was planned.
    """

    path: Path
    baseline: str | None = None
    heads: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """One training run. What is missing is empty, and `problems` says so.

    Attributes:
        path: its directory.
        config: the resolved configuration.
        result: what it reached.
        steps: the records of single steps, in order, one for each step.
        evaluations: those of evaluations, likewise.
        curves: reliability and risk–coverage points.
        confusions: pairs of classes.
        examples: test examples to show, by kind.
        problems: what is missing or could not be read, one line each.
        comparison: the comparison that it is part of, if any.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[dict[str, Any]] = ()
    evaluations: Sequence[dict[str, Any]] = ()
    curves: dict[str, Any] = field(default_factory=dict)
    confusions: Sequence[dict[str, Any]] = ()
    examples: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def head(self) -> str | None:
        """The kind of head, like "het-xl"."""
        for source in (self.result, self.config):
            found = source.get("head")
            if isinstance(found, dict):
                found = found.get("kind", found.get("name", found.get("head")))
            if isinstance(found, str) and found:
                return found
        return None

    @property
    def label(self) -> str:
        """What the run is called in tables; runs with the same label differ in their seed alone."""
        for source in (self.result, self.config):
            if isinstance(source.get("label"), str) and source["label"].strip():
                return source["label"].strip()
        planned = re.fullmatch(r"(.+)-seed\d+", self.name)  # in a comparison, the name says more than the head
        kind = planned[1] if planned else self.head or self.name
        return HEAD_LABELS.get(kind, kind)

    @property
    def seed(self) -> int | None:
        """The seed, None when it is not known."""
        for source in (self.result, self.config, _mapping(self.config.get("training"))):
            seed = finite(source.get("seed"))
            if seed is not None:
                return int(seed)
        return None

    @property
    def dataset(self) -> str | None:
        """The name of the data, None when it is not known."""
        for source in (self.result, self.config):
            found = source.get("dataset")
            if isinstance(found, str) and found:
                return found
        return None

    @property
    def data(self) -> dict[str, Any]:
        """The description of the data."""
        return _mapping(self.result.get("data"))

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return bool(self.result)

    def metrics(self, split: str) -> dict[str, float]:
        """The metrics of a split that are numbers."""
        found = _mapping(_mapping(self.result.get("metrics")).get(split))
        return _numbers(found)

    def parameters(self, part: str = "total") -> float | None:
        """The number of parameters: "total", "head" or "backbone"."""
        return finite(_mapping(self.result.get("parameters")).get(part))

    def value(self, key: str) -> float | None:
        """A number of the result, like "train_seconds"."""
        return finite(self.result.get(key))


def read_run(path: PathLike, comparison: Comparison | None = None) -> Run:
    """Read a run directory.

    Files that are missing or cut short are named in `problems`; the rest is read all the same.

    Args:
        path: a directory with any of `result.json`, `config.json` and `log.jsonl`.
        comparison: what it is part of.
    """
    folder = Path(path)
    _check_folder(folder)
    if not _is_run(folder):
        raise FileNotFoundError(
            f"{folder} is no run: it has none of {', '.join(RUN_FILES)}; give a directory that training wrote"
        )
    problems: list[str] = []
    steps, evaluations = _read_log(folder / "log.jsonl", problems)
    confusions = _read_json(folder / "confusions.json", list, problems)
    result = _read_json(folder / "result.json", dict, problems)
    if result.get("derived_from") and "log.jsonl is missing" in problems:
        problems.remove("log.jsonl is missing")  # it was not trained
    return Run(
        path=folder,
        config=_read_json(folder / "config.json", dict, problems),
        result=result,
        steps=steps,
        evaluations=evaluations,
        curves=_read_json(folder / "curves.json", dict, problems),
        confusions=tuple(pair for pair in confusions if isinstance(pair, dict)),
        examples=_read_json(folder / "examples.json", dict, problems),
        problems=tuple(problems),
        comparison=comparison,
    )


def find_runs(paths: PathLike | Iterable[PathLike]) -> list[Run]:
    """Read all runs of some directories, each once.

    Args:
        paths: run directories and comparison directories, whose runs are in `runs/`; a single path will do.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    runs: dict[Path, Run] = {}
    for path in paths:
        folder = Path(path)
        _check_folder(folder)
        if _is_run(folder) or not (folder / "runs").is_dir():
            found = [read_run(folder, _comparison_above(folder))]
        else:
            comparison = _read_comparison(folder)
            inside = sorted(child for child in (folder / "runs").iterdir() if child.is_dir() and _is_run(child))
            if not inside:
                raise FileNotFoundError(f"{folder} has no runs yet: {folder / 'runs'} holds no run directory")
            found = [read_run(child, comparison) for child in inside]
        for run in found:
            runs.setdefault(run.path.resolve(), run)
    if not runs:
        raise ValueError("paths must name at least one run or comparison directory, found none")
    return list(runs.values())


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; give a run or comparison directory")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give the run directory that it is in")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _comparison_above(folder: Path) -> Comparison | None:
    """The comparison that a run given by itself is part of."""
    above = folder.resolve().parent
    if above.name == "runs" and (above.parent / "compare.json").is_file():
        return _read_comparison(above.parent)
    return None


def _read_comparison(folder: Path) -> Comparison:
    found = _read_json(folder / "compare.json", dict, [])
    baseline, heads, seeds = found.get("baseline"), found.get("heads"), found.get("seeds")
    return Comparison(
        path=folder,
        baseline=baseline if isinstance(baseline, str) else None,
        heads=tuple(head for head in heads if isinstance(head, str)) if isinstance(heads, list) else (),
        seeds=tuple(seed for seed in seeds if isinstance(seed, int)) if isinstance(seeds, list) else (),
    )


def _read_json(path: Path, kind: type, problems: list[str]) -> Any:
    """A JSON file of one kind, dict or list; an empty one, and a line in `problems`, when there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "cut short or not JSON"
        problems.append(f"{path.name} could not be read: {reason}")
    else:
        if isinstance(found, kind):
            return found
        problems.append(f"{path.name} holds a {type(found).__name__}, not a {kind.__name__}")
    return kind()


def _read_log(path: Path, problems: list[str]) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """The records of steps and of evaluations, by step. A run that was resumed repeats steps: the last one counts."""
    kinds: dict[str, dict[float, dict[str, Any]]] = {"step": {}, "evaluation": {}}
    broken = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    kind, step = str(record["kind"]), finite(record["step"])
                except (ValueError, TypeError, KeyError, RecursionError):
                    broken += 1
                    continue
                if kind in kinds and step is not None:
                    kinds[kind][step] = record
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}")
    if broken:
        problems.append(f"{path.name} has {broken} line{'' if broken == 1 else 's'} that could not be read")
    steps, evaluations = ([found[step] for step in sorted(found)] for found in kinds.values())
    return steps, evaluations


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: finite(value) for key, value in values.items()}
    return {key: number for key, number in numbers.items() if number is not None}
