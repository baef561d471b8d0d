"""Trainings on pairs that several studies share: DET and HET-XL, with swapped texts, and normalised at other places.

Each is in a directory named by its setting and its seed. Of a seed, towers, order and swaps are the same in all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl.contrastive.config import LABELS, ContrastiveConfig
from hetxl.contrastive.run import open_run
from hetxl.functional._checks import one_of
from hetxl.training.run import compare_options

SWAPS = (0.0, 0.2, 0.4)
"""Shares of the training pairs whose texts are swapped."""

PLACEMENTS = ("before", "after", "both", "none")
"""When embeddings are normalised; the first is the default."""

SAMPLES = 22
"""Draws of the sampled zero-shot evaluation, as in the paper."""


def swap_setting(head: str, swap: float) -> str:
    """The name of a head with a share of the texts swapped."""
    return f"{head}-swap{round(100 * swap)}"


def placement_setting(placement: str) -> str:
    """The name of HET-XL on clean pairs with embeddings normalised at some place."""
    return swap_setting("het-xl", 0.0) if placement == PLACEMENTS[0] else f"het-xl-normalize-{placement}"


SETTINGS: dict[str, dict[str, Any]] = {
    **{swap_setting(head, swap): {"head": head, "swap": swap} for swap in SWAPS for head in ("det", "het-xl")},
    **{placement_setting(one): {"head": "het-xl", "normalize": one} for one in PLACEMENTS[1:]},
}
"""The options in which the trainings differ, by name."""

METRICS: dict[str, tuple[str, ...]] = {
    "zero_shot_top1": ("metrics", "test", "zero_shot", "top1"),
    "zero_shot_top5": ("metrics", "test", "zero_shot", "top5"),
    "unseen_top1": ("metrics", "test", "zero_shot", "unseen_top1"),
    "sampled_top1": ("metrics", "test", "zero_shot_sampled", "top1"),
    "sampled_top5": ("metrics", "test", "zero_shot_sampled", "top5"),
    **{
        f"{split}_{way}@{k}": ("metrics", split, f"{way}@{k}")
        for split in ("validation", "test")
        for way in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    },
    "noise_auroc": ("swaps", "noise_auroc"),
    "distance_auroc": ("swaps", "distance_auroc"),
}
"""Where each is in result.json."""


@dataclass(frozen=True)
class PairTraining:
    """One run on pairs that a study needs.

    Attributes:
        setting: of `SETTINGS`.
        config: its options; the directory among them plays no part.
    """

    setting: str
    config: ContrastiveConfig

    @property
    def key(self) -> str:
        """The name of its directory."""
        return f"{self.setting}-seed{self.config.seed}"

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"{self.config.data} {LABELS[self.config.head]} ({self.setting}) seed {self.config.seed}"

    def check(self, place: Path) -> None:
        """Raise if the run in a directory has other options: its name does not tell all of them."""
        if (place / "config.json").exists():
            compare_options(self.config, lambda: open_run(place).config, place)


@dataclass(frozen=True)
class PairBench:
    """Pairs with the options of their trainings.

    Attributes:
        data: as for `hetxl contrastive train`; empty where it has to be given.
        options: beyond the defaults.
    """

    data: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def training(self, setting: str, seed: int) -> PairTraining:
        """A run with a seed, which is also that of the swaps.

        Args:
            setting: a key of `SETTINGS`.
            seed: of the run.
        """
        one_of("setting", setting, SETTINGS)
        if not self.data:
            raise ValueError("data must be given: this form of the studies on pairs has none of its own")
        values: dict[str, Any] = {"eval_samples": SAMPLES, **self.options, **SETTINGS[setting], "data": self.data}
        return PairTraining(setting, ContrastiveConfig(**{**values, "seed": seed, "data_seed": seed}))


def pair_values(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The metrics of runs that differ in their seeds, as lists in their order; those that one has not are left out.

    Args:
        results: what result.json of each holds.
    """
    found = {metric: [_at(result, keys) for result in results] for metric, keys in METRICS.items()}
    return {metric: values for metric, values in found.items() if None not in values}


def _at(result: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        result = result.get(key) if isinstance(result, Mapping) else None
    return result
