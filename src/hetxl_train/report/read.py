"""Read run directories, including those of unfinished runs."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl._files import read_json
from hetxl.registry import HEAD_LABELS
from hetxl_train.formatting import finite
from hetxl_train.log import log_lines

RUN_FILES = ("result.json", "config.json", "log.jsonl")  # a run directory has at least one of these

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Comparison:
    """The content of a comparison's `compare.json`."""

    baseline: str | None = None  # the label that the others are compared with; None for the default
    heads: tuple[str, ...] = ()  # labels in the order of the report


@dataclass(frozen=True)
class Run:
    """The content of a run directory. Missing parts are empty, and `problems` names them."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration
    result: dict[str, Any] = field(default_factory=dict)  # the content of result.json
    steps: Sequence[dict[str, Any]] = ()  # the log's records of steps, by step, one for each
    evaluations: Sequence[dict[str, Any]] = ()  # the log's records of evaluations, by step, one for each
    curves: dict[str, Any] = field(default_factory=dict)  # reliability and risk–coverage points
    confusions: Sequence[dict[str, Any]] = ()  # pairs of classes
    examples: dict[str, Any] = field(default_factory=dict)  # test examples to show, by kind
    problems: tuple[str, ...] = ()  # missing or unreadable files, one line each
    comparison: Comparison | None = None  # the comparison that the run belongs to, if any

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def head(self) -> str | None:
        """The kind of head, such as "het-xl"."""
        for source in (self.result, self.config):
            head = source.get("head")
            if isinstance(head, dict):
                head = head.get("kind", head.get("name", head.get("head")))
            if isinstance(head, str) and head:
                return head
        return None

    @property
    def label(self) -> str:
        """The name of the run in tables; runs with the same label differ only in their seed."""
        for source in (self.result, self.config):
            if isinstance(source.get("label"), str) and source["label"].strip():
                return source["label"].strip()
        planned = re.fullmatch(r"(.+)-seed\d+", self.name)  # in a comparison, the name is more specific than the head
        kind = planned[1] if planned else self.head or self.name
        return HEAD_LABELS.get(kind, kind)

    @property
    def seed(self) -> int | None:
        """The seed; None if it is unknown."""
        sources = (self.result, self.config, _mapping(self.config.get("training")))
        return next((int(seed) for source in sources if (seed := finite(source.get("seed"))) is not None), None)

    @property
    def dataset(self) -> str | None:
        """The name of the data; None if it is unknown."""
        names = (source.get("dataset") for source in (self.result, self.config))
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def data(self) -> dict[str, Any]:
        """The description of the data."""
        return _mapping(self.result.get("data"))

    @property
    def averaged(self) -> bool:
        """Whether the run's probabilities are averages over members, a posterior or dropout masks."""
        dropout = finite(_mapping(self.config.get("head")).get("mc_dropout"))
        return bool(dropout or self.value("members") or self.value("laplace_prior"))

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return bool(self.result)

    def metrics(self, split: str) -> dict[str, float]:
        """Return those metrics of a split that are finite numbers."""
        metrics = _mapping(_mapping(self.result.get("metrics")).get(split))
        numbers = {key: finite(value) for key, value in metrics.items()}
        return {key: number for key, number in numbers.items() if number is not None}

    def parameters(self, part: str = "total") -> float | None:
        """Return the number of parameters of a part: "total", "head" or "backbone"."""
        return finite(_mapping(self.result.get("parameters")).get(part))

    def value(self, key: str) -> float | None:
        """Return a number from the result, such as "train_seconds"."""
        return finite(self.result.get(key))


def read_run(path: PathLike, comparison: Comparison | None = None) -> Run:
    """Read a run directory; `problems` names files that are missing or damaged."""
    directory = Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"{directory} does not exist; pass a run or comparison directory")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; pass the run directory that it is in")
    if not _is_run(directory):
        raise FileNotFoundError(
            f"{directory} is not a run directory (it has none of {', '.join(RUN_FILES)}). "
            "Pass a directory created by `hetxl train`."
        )
    problems: list[str] = []
    confusions = _read_json(directory / "confusions.json", list, problems)
    result = _read_json(directory / "result.json", dict, problems)
    steps, evaluations = _read_log(directory / "log.jsonl", result.get("log_lines"), problems)
    if result.get("derived_from") and "log.jsonl is missing" in problems:
        problems.remove("log.jsonl is missing")  # derived runs are not trained and have no log
    contents = {
        name: _read_json(directory / f"{name}.json", dict, problems) for name in ("config", "curves", "examples")
    }
    pairs = tuple(pair for pair in confusions if isinstance(pair, dict))
    rest = {"confusions": pairs, "problems": tuple(problems), "comparison": comparison}
    return Run(directory, result=result, steps=steps, evaluations=evaluations, **contents, **rest)


def find_runs(paths: PathLike | Iterable[PathLike]) -> list[Run]:
    """Read all runs of run directories and of comparison directories (in their `runs/`), each run once."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    runs: dict[Path, Run] = {}
    for path in paths:
        directory = Path(path)
        if _is_run(directory) or not (directory / "runs").is_dir():
            members = [read_run(directory, _comparison_above(directory))]
        else:
            comparison = _read_comparison(directory)
            inside = sorted(child for child in (directory / "runs").iterdir() if child.is_dir() and _is_run(child))
            if not inside:
                raise FileNotFoundError(f"{directory} has no runs yet: {directory / 'runs'} holds no run directory")
            members = [read_run(child, comparison) for child in inside]
        for run in members:
            runs.setdefault(run.path.resolve(), run)
    if not runs:
        raise ValueError("paths must name at least one run or comparison directory, found none")
    return list(runs.values())


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in RUN_FILES)


def _comparison_above(directory: Path) -> Comparison | None:
    """Return the comparison that a single run belongs to; None if there is none."""
    above = directory.resolve().parent
    if above.name == "runs" and (above.parent / "compare.json").is_file():
        return _read_comparison(above.parent)
    return None


def _read_comparison(directory: Path) -> Comparison:
    content = _read_json(directory / "compare.json", dict, [])
    baseline, heads = content.get("baseline"), content.get("heads")
    return Comparison(
        baseline=baseline if isinstance(baseline, str) else None,
        heads=tuple(head for head in heads if isinstance(head, str)) if isinstance(heads, list) else (),
    )


def _read_json(path: Path, kind: type, problems: list[str]) -> Any:
    """Read a dict or list from a JSON file; on failure, add to `problems` and return an empty one."""
    try:
        content = read_json(path, finite=False)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "changed, cut short or not JSON"
        problems.append(f"{path.name} could not be read: {reason}")
    else:
        if kind is list and isinstance(content, dict):
            content = content.get("pairs")  # files of older versions hold only the list
        if isinstance(content, kind):
            return content
        problems.append(f"{path.name} holds a {type(content).__name__}, not a {kind.__name__}")
    return kind()


def _read_log(
    path: Path, expected: object, problems: list[str]
) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Return the records of steps and of evaluations, by step. A resumed run may repeat steps; the last record counts.

    `expected` is the number of lines according to the result; None for a run without a result or of an older version.
    """
    kinds: dict[str, dict[float, dict[str, Any]]] = {"step": {}, "evaluation": {}}
    lines, broken = 0, 0
    try:
        for record in log_lines(path):
            lines += 1
            kind, step = (None, None) if record is None else (record.get("kind"), finite(record.get("step")))
            if record is None or not isinstance(kind, str) or step is None:
                broken += 1
            elif kind in kinds:
                kinds[kind][step] = record
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}")
    else:
        if isinstance(expected, int) and lines != expected:
            problems.append(f"{path.name} has {lines:,} lines, of {expected:,} that the run wrote")
    if broken:
        problems.append(f"{path.name} has {broken} line{'' if broken == 1 else 's'} that could not be read")
    steps, evaluations = ([records[step] for step in sorted(records)] for records in kinds.values())
    return steps, evaluations


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
