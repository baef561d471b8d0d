"""The forms that a study has: full (for the record), quick (minutes) and miniature (seconds, what tests run).

A profile sets the data, the steps and the sizes; a study sets what is compared on them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetxl._checks import one_of
from hetxl._files import read_json
from hetxl_lab.presets import PUBLISHED
from hetxl_lab.studies.measure import HeadSize
from hetxl_lab.studies.runs import PairBench, StudyRun
from hetxl_train.config import TrainConfig
from hetxl_train.presets import preset_for

FIXED: dict[str, Any] = {"temperature": "1.0"}
LEARNED: dict[str, Any] = {"temperature": "learned", "temperature_learning_rate": 1.0}
"""τ learned like any other parameter, as the paper does. It starts at 1, and not in the middle of its range: hundreds
of steps may be too few to come back from there, which the study of its start and range looks at."""


@dataclass(frozen=True)
class Bench:
    """Data with the options of its runs."""

    name: str  # in tables
    data: str  # as for `hetxl train`
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)  # beyond the preset of the data
    backbones: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    every: int = 5  # one in this many classes is held out of training, for studies of unknown classes
    defaults: Mapping[str, Any] = field(default_factory=lambda: PUBLISHED)  # override those of `hetxl train`

    def config(self, head: str, *, backbone: str | None = None, scale: float = 1.0, **more: Any) -> TrainConfig:
        """The options of a run; `more` goes over all others, `scale` is of the number of steps."""
        chosen = next(iter(self.backbones)) if backbone is None else backbone
        one_of("backbone", chosen, self.backbones)
        steps = max(1, round(self.steps * scale))
        values: dict[str, Any] = {
            **self.defaults,
            **preset_for(self.data),
            **FIXED,
            "steps": steps,
            "epochs": 1.0,  # has no effect, because steps are set
            "evaluate_every": steps,
            "checkpoint_every": max(50, -(-steps // 3)),
            **self.options,
            **self.backbones[chosen],
        }
        return TrainConfig(**{**values, **more, "data": self.data, "head": head})

    def run(self, head: str, seed: int, *, view: str = "", **options: Any) -> StudyRun:
        """Return a run with a seed; for the options see `config`."""
        return StudyRun(self.config(head, seed=seed, **options), view)


@dataclass(frozen=True)
class Sizes:
    """The sizes at which time and memory of heads are measured."""

    settings: Mapping[str, HeadSize]  # D, K, R and the backbone, by name
    batches: tuple[int, ...]  # B
    whole_batch: int  # B of the memory of whole steps, with the backbone
    samples: tuple[int, ...]  # S
    repeats: int  # of the time of a step
    seconds: float  # a cell whose step is longer than this is timed once
    budget: int  # bytes that a step may take, to fit


@dataclass(frozen=True)
class Profile:
    """One profile of all studies."""

    name: str
    options: Mapping[str, Any]  # of all runs
    seeds: int  # how many by default
    own_steps: int | None  # of runs on a user's own data, at most; None for as many as `hetxl train` takes
    benches: tuple[Bench, ...]  # of the comparison of methods; the first is that of the ablations
    sigmoid: tuple[Bench, ...]  # of the same with any number of labels for each example
    repeated: Bench  # small data for many epochs; its steps are one epoch
    epochs: tuple[int, ...]  # numbers of epochs on it
    grid: tuple[float, ...]  # values of τ to try on it
    sampling: Bench  # of the study of the samples, with few classes so that 1,000 samples are affordable
    samples: tuple[int, ...]  # S that it compares
    pairs: PairBench
    few_shot: tuple[Bench, ...]  # data whose unknown classes are learned from a few examples
    shots: tuple[int, ...]
    temperatures: tuple[float, ...]  # values searched for τ* of HET, besides 1
    sizes: Sizes  # of heads without backbones
    angles: int  # validation examples for the study of angles

    @property
    def base(self) -> Bench:
        """Return the data of the ablations."""
        return self.benches[0]

    def changed(self, change: Callable[[Bench], Bench]) -> "Profile":
        """Return the profile with all its benches changed."""
        several = {name: tuple(map(change, getattr(self, name))) for name in _SEVERAL}
        return replace(self, **several, **{name: change(getattr(self, name)) for name in _SINGLE})

    def on(self, bench: Bench, epoch: int) -> "Profile":
        """Return the profile with one bench instead of all, whose epoch has the given number of steps."""
        several = dict.fromkeys(_SEVERAL, (bench,))
        return replace(self, **several, sampling=bench, repeated=replace(bench, steps=epoch))


_SEVERAL, _SINGLE = ("benches", "sigmoid", "few_shot"), ("sampling", "repeated")  # fields of a profile with benches


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists in values to tuples, since JSON has only lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _sizes(settings: Mapping[str, Mapping[str, Any]], **values: Any) -> Sizes:
    return Sizes(settings={name: HeadSize(**size) for name, size in settings.items()}, **values)


def _profile(name: str, options: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]], **values: Any) -> Profile:
    """Return a profile of the file: `data` has its benches by name, whose options go over those of the profile."""
    benches = {
        key: Bench(**{**bench, "options": {**options, **bench.get("options", {})}}) for key, bench in data.items()
    }
    chosen: dict[str, Any] = {use: tuple(benches[key] for key in values.pop(use)) for use in _SEVERAL}
    chosen |= {use: benches[values.pop(use)] for use in _SINGLE}
    sizes, pairs = _sizes(**_tuples(values.pop("sizes"))), PairBench(**values.pop("pairs"))
    return Profile(name=name, options=options, sizes=sizes, pairs=pairs, **chosen, **_tuples(values))


_FILE = read_json(Path(__file__).with_name("profiles.json"))
MINI: dict[str, Any] = _FILE["miniature"]["options"]  # of the smallest runs
PROFILES = {name: _profile(name, **values) for name, values in _FILE.items() if name != "about"}
"""By name, as `profiles.json` has them."""
