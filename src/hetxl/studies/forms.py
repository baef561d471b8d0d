"""The forms that a study has: full (for the record), quick (minutes) and miniature (seconds, what tests run).

A form says which data, how many steps and which sizes; a study says what is compared on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetxl.functional._checks import one_of
from hetxl.studies.cache import Training
from hetxl.studies.pair_trainings import PairBench
from hetxl.training.config import TrainConfig
from hetxl.training.presets import preset_for

FIXED: dict[str, Any] = {"temperature": "1.0"}
LEARNED: dict[str, Any] = {"temperature": "learned", "temperature_learning_rate": 1.0}
"""τ learned like any other parameter, as the paper does. It starts at 1, and not in the middle of its range: hundreds
of steps may be too few to come back from there, which the study of its start and range looks at."""


@dataclass(frozen=True)
class Bench:
    """Data with the options of its trainings.

    Attributes:
        name: how tables call it.
        data: as for `hetxl train`.
        steps: of a training.
        options: beyond the preset of the data.
        backbones: options by the name that tables have for it; the first is that of all studies but the main one.
        every: of so many classes one is kept away from training where unknown classes are asked for.
    """

    name: str
    data: str
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    backbones: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    every: int = 5

    def config(self, head: str, *, backbone: str | None = None, scale: float = 1.0, **more: Any) -> TrainConfig:
        """The options of a run.

        Args:
            head: a head's name.
            backbone: a key of `backbones`; the first without.
            scale: of the number of steps.
            **more: options over all others.
        """
        chosen = next(iter(self.backbones)) if backbone is None else backbone
        one_of("backbone", chosen, self.backbones)
        steps = max(1, round(self.steps * scale))
        values: dict[str, Any] = {
            **preset_for(self.data),
            **FIXED,
            "steps": steps,
            "epochs": 1.0,  # unused beside steps
            "evaluate_every": steps,
            "checkpoint_every": max(50, -(-steps // 3)),
            **self.options,
            **self.backbones[chosen],
        }
        return TrainConfig(**{**values, **more, "data": self.data, "head": head})

    def training(self, head: str, seed: int, *, view: str = "", **options: Any) -> Training:
        """A run with a seed; options as of `config`."""
        return Training(self.config(head, seed=seed, **options), view)


@dataclass(frozen=True)
class Sizes:
    """What time and memory of heads are measured at.

    Attributes:
        features: D
        classes: K
        rank: R
        batches: B, several.
        samples: S, several.
        repeats: how often a step is timed.
        seconds: a cell whose step is longer than this is timed once.
        budget: bytes that a step may take, to fit.
    """

    features: int
    classes: int
    rank: int
    batches: tuple[int, ...]
    samples: tuple[int, ...]
    repeats: int
    seconds: float
    budget: int


@dataclass(frozen=True)
class Form:
    """One form of all studies.

    Attributes:
        name: "full", "quick" or "miniature".
        seeds: how many, unless told.
        benches: of the comparison of methods; the first is that of the ablations.
        sampling: of the study of the samples, with few classes so that 1,000 samples are affordable.
        samples: S that it compares.
        pairs: of the studies on pairs.
        few_shot: data whose unknown classes are learned from a few examples.
        shots: how many.
        temperatures: among which τ* of HET is searched, beside 1.
        sizes: of heads alone.
        angles: validation examples whose angle is measured.
    """

    name: str
    seeds: int
    benches: tuple[Bench, ...]
    sampling: Bench
    samples: tuple[int, ...]
    pairs: PairBench
    few_shot: tuple[Bench, ...]
    shots: tuple[int, ...]
    temperatures: tuple[float, ...]
    sizes: Sizes
    angles: int

    @property
    def base(self) -> Bench:
        """The data of the ablations."""
        return self.benches[0]


_SHARED: dict[str, Any] = {"rank": 10, "train_samples": 4, "eval_samples": 64, "evaluation_examples": 1000}
_FULL: dict[str, Any] = {**_SHARED, "test_examples": 3000}
# Learning rates and weight decays are those that the study of the defaults found best for DET on validation data.
PYCODE = Bench(
    "pycode",
    "pycode",
    240,
    {**_FULL, "learning_rate": 0.012, "weight_decay": 0.5},
    {"MLP, 2 × 512": {}, "MLP, 4 × 256": {"depth": 4, "width": 256}},
)
WORDNET = Bench(
    "wordnet", "wordnet", 360, {**_FULL, "learning_rate": 3e-3}, {"linear": {}, "MLP, 2 × 512": {"backbone": "mlp"}}
)
GLYPHS = Bench(
    "glyphs", "glyphs", 500, {**_FULL, "learning_rate": 4e-3}, {"CNN, 1 a stage": {}, "CNN, 2 a stage": {"depth": 2}}
)
# Every third class is unknown: with fewer, some hundred test pictures would be left.
ICONS = Bench("icons", "icons:labels=categories", 400, {**_FULL, "learning_rate": 4e-3}, every=3)
_SAMPLING = Bench(
    "pycode, 1,024 classes",
    "pycode:classes=1024",
    200,
    {**_FULL, "test_examples": 2000, "batch_size": 128, "learning_rate": 6e-3, "evaluation_examples": 200},
)

_QUICK: dict[str, Any] = {**_SHARED, "batch_size": 128, "evaluation_examples": 300, "test_examples": 1000, "rank": 5}
_QUICK_CODE = Bench(
    "pycode, 1,024 classes",
    "pycode:classes=1024",
    80,
    {**_QUICK, "learning_rate": 0.012},
    {"MLP, 2 × 128": {"width": 128, "features": 64}, "MLP, 4 × 64": {"width": 64, "depth": 4, "features": 64}},
)
_QUICK_DRAWN = Bench(
    "synthetic",
    "synthetic:rows=20000,classes=50",
    120,
    {**_QUICK, "train_samples": 16},
    {"linear": {}, "MLP, 2 × 64": {"backbone": "mlp", "width": 64, "features": 32}},
)

_MINI: dict[str, Any] = {
    "batch_size": 32,
    "rank": 2,
    "train_samples": 2,
    "eval_samples": 4,
    "evaluation_examples": 20,
    "test_examples": 20,
    "learning_rate": 0.01,
}
_MINI_PAIRS: dict[str, Any] = {
    "steps": 2,
    "batch_size": 16,
    "features": 8,
    "rank": 2,
    "buckets": 64,
    "embedding": 8,
    "text_width": 16,
    "eval_samples": 3,
    "workers": 0,
}
_MINI_BENCH = Bench(
    "synthetic",
    "synthetic:rows=400,classes=20,features=8",
    3,
    _MINI,
    {"MLP": {"backbone": "mlp", "width": 8, "features": 8, "depth": 1}, "linear": {}},
)

FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form(
            name="full",
            seeds=3,
            benches=(PYCODE, GLYPHS, WORDNET),
            sampling=_SAMPLING,
            samples=(1, 4, 16, 64, 256, 512, 1000),
            pairs=PairBench("icons"),
            few_shot=(GLYPHS, ICONS, PYCODE),
            shots=(1, 5, 10, 25),
            temperatures=(0.5, 2.0),
            sizes=Sizes(2048, 21_843, 50, (1, 8, 32), (1, 10, 100, 1000), 3, 20.0, 4 * 2**30),
            angles=500,
        ),
        Form(
            name="quick",
            seeds=2,
            benches=(_QUICK_CODE, _QUICK_DRAWN),
            sampling=_QUICK_CODE,
            samples=(1, 4, 16, 64),
            pairs=PairBench("icons:limit=2000", {"steps": 20, "batch_size": 128}),
            few_shot=(_QUICK_CODE,),
            shots=(1, 5, 10),
            temperatures=(0.5, 2.0),
            sizes=Sizes(256, 2000, 10, (1, 8, 32), (1, 10, 100), 3, 2.0, 64 * 2**20),
            angles=100,
        ),
        Form(
            name="miniature",
            seeds=2,
            benches=(_MINI_BENCH,),
            sampling=_MINI_BENCH,
            samples=(1, 4),
            pairs=PairBench("", _MINI_PAIRS),
            few_shot=(_MINI_BENCH,),
            shots=(1, 2),
            temperatures=(2.0,),
            sizes=Sizes(8, 30, 2, (2, 4), (1, 8, 200), 1, 1.0, 2**16),
            angles=10,
        ),
    )
}
"""By name."""
