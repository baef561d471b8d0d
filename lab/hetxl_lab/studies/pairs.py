"""`hetxl study contrastive` (Table "HET-XL LiT"), `normalisation` (Table "Placements of the normalization") and
`test-noise` (Section "Deterministic versus stochastic … at test time"): studies of `hetxl contrastive train`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl_lab.studies.charts import plot_dots, plot_lines
from hetxl_lab.studies.profiles import PROFILES, Profile
from hetxl_lab.studies.runs import PAIR_SAMPLES, SWAPS, PairRun, pair_values, placement_setting, swap_setting
from hetxl_lab.studies.study import Lab, PaperStudy, Summary, directory_suffix
from hetxl_lab.studies.verdicts import against, agree, change, difference_text, holds, mean_cell, p_text, same, sign
from hetxl_train.report.statistics import PairedTest, mean, paired_test, two_sided_p
from hetxl_train.report.tables import Column, Row, Table, Value

SEEDS = (1, 2, 3, 4, 5)  # of the full profile: the options were chosen with seed 0


class PairStudy(PaperStudy):
    """A study of runs of `hetxl contrastive train`."""

    settings: Sequence[str]  # names of the runs that it needs

    def seeds(self, profile: Profile) -> tuple[int, ...]:
        """Return five seeds in the full profile."""
        return SEEDS if profile.name == "full" else super().seeds(profile)

    def home(self, profile: Profile) -> Path:
        """Return the directory of the runs on pairs, one for each profile and data."""
        data = profile.pairs.data
        own = data == PROFILES[profile.name].pairs.data
        return Path("runs") / f"study-contrastive{directory_suffix(profile.name, None if own else data)}" / "runs"

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with the requested data."""
        if options.get("data") is None:
            return profile
        return dataclasses.replace(profile, pairs=dataclasses.replace(profile.pairs, data=options["data"]))

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[PairRun]:
        """Return all settings with the first seed, then with the next, so that a stopped study has partial results."""
        return [profile.pairs.run(setting, seed) for seed in seeds for setting in self.settings]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return metrics by setting, over the seeds, and the options that all runs share."""
        runs: dict[str, dict[str, list[float]] | None] = {}
        first: dict[str, Any] | None = None
        for setting in self.settings:
            results = [lab.cache.result(lab.profile.pairs.run(setting, seed)) for seed in lab.seeds]
            known = [result for result in results if result is not None]
            runs[setting] = pair_values(known) if len(known) == len(results) else None
            first = first or next(iter(known), None)
        if first is None:
            raise FloatingPointError("no run of the study kept a finite loss; there is nothing to measure")
        return {
            "data": lab.profile.pairs.data,
            "rows": first["data"]["rows"],
            "classes": first["metrics"]["test"]["zero_shot"]["classes"],
            "steps": first["steps"],
            "samples": lab.profile.pairs.options.get("eval_samples", PAIR_SAMPLES),
            "runs": runs,
        }


def percent(run: Mapping[str, Sequence[float]] | None, metric: str) -> Value:
    """Return the cell of a metric over the seeds, in percent; "not finite" if a loss was not finite."""
    return "not finite" if run is None else mean_cell(run.get(metric), 100)


def percents(run: Mapping[str, Sequence[float]] | None, metric: str) -> list[float]:
    """Return a metric in percent for each seed; empty if a loss was not finite."""
    return [100 * value for value in (run or {}).get(metric, ())]


PairRow = tuple[str | None, str, str, str]
"""Group and label of a row, the setting that it is of, and what the names of its metrics begin with."""


def accuracy_table(
    summary: Summary, title: str, metrics: Mapping[str, str], rows: Sequence[PairRow], about: str = ""
) -> Table:
    """Return a table of metrics, by name and heading, for some settings, in percent."""
    cells = [
        Row(label, [percent(summary["runs"][setting], f"{kind}{key}") for key in metrics], group)
        for group, label, setting, kind in rows
    ]
    columns = [Column(name, 2, "higher") for name in metrics.values()]
    return Table(title, columns, cells, f"{about}{setting_note(summary)}")


def accuracy_dots(summary: Summary, path: Path, metrics: Mapping[str, str], rows: Sequence[PairRow]) -> Path:
    """Draw the values of `accuracy_table`, a panel for each metric."""
    groups = list(dict.fromkeys(group for group, *_ in rows))
    panels = {
        f"{name}, %": [
            (
                group or "",
                [
                    (label, percents(summary["runs"][setting], f"{kind}{key}"))
                    for own, label, setting, kind in rows
                    if own == group
                ],
            )
            for group in groups
        ]
        for key, name in metrics.items()
    }
    return plot_dots(panels, path)


def swapped(swap: float) -> str:
    """Return the name of a group of rows."""
    return f"{share_text(swap)} swapped"


def changes_text(tests: Mapping[float, PairedTest | None]) -> str:
    """Describe differences in points, by the share of swapped texts."""
    return "; ".join(f"{change(test, 2, 100, ' points')} with {share_text(swap)}" for swap, test in tests.items())


def share_text(swap: float) -> str:
    """Return a share as text for tables."""
    return f"{100 * swap:.0f} %"


def setting_note(summary: Summary) -> str:
    """Return data, steps and classes in a sentence for tables."""
    return (
        f"{summary['data']}: {summary['rows']['train']:,} training pairs, {summary['steps']:,} steps; zero-shot among "
        f"{summary['classes']:,} names (chance {100 / summary['classes']:.3f} %); all in percent"
    )


HEADS = {"DET": "det", "HET-XL": "het-xl"}

ZERO_SHOT = {"zero_shot_top1": "top-1", "zero_shot_top5": "top-5", "unseen_top1": "top-1, names never seen"}
"""Metrics of the table that is the paper's."""

COMPARED = {
    **{f"zero_shot_{kind}": f"zero-shot {kind[:3]}-{kind[3:]}" for kind in ("top1", "top5")},
    "unseen_top1": "zero-shot top-1, names never seen",
    **{
        f"validation_{way}@{k}": f"validation, {way.replace('_', ' ')}, recall@{k}"
        for way in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    },
    "test_image_to_text@1": "test, image to text, recall@1",
    "test_text_to_image@1": "test, text to image, recall@1",
}
"""Metrics whose differences are tested."""


class Contrastive(PairStudy):
    """Both heads with none, a fifth and two fifths of the texts swapped."""

    name = "contrastive"
    question = (
        "Does HET-XL help two towers that are trained on pairs of an image and its name, from clean pairs and from "
        "pairs whose texts are partly swapped?"
    )
    paper = (
        "tab:contrastive_zero_shot",
        "section HET-XL LiT, 4 billion examples",
        "section HET-XL LiT, p-values",
    )
    claim = "HET-XL gives a small but significant gain in zero-shot accuracy over DET"
    settings = tuple(swap_setting(head, swap) for swap in SWAPS for head in HEADS.values())

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout for every share of swapped texts, all differences, and the detection of swaps."""
        rows = [(swapped(swap), label, swap_setting(head, swap), "") for swap in SWAPS for label, head in HEADS.items()]
        zero_shot = accuracy_table(summary, "Zero-shot accuracy of HET-XL and DET", ZERO_SHOT, rows)
        return [zero_shot, _differences(summary), _audit(summary)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw zero-shot accuracy over the share of swapped texts."""
        panels = {
            f"zero-shot {ZERO_SHOT[key]}, %": {
                label: [(100 * swap, percents(_swap_run(summary, label, swap), key)) for swap in SWAPS]
                for label in HEADS
            }
            for key in ("zero_shot_top1", "zero_shot_top5")
        }
        return plot_lines(panels, path, "texts swapped, %")

    def conclusion(self, summary: Summary) -> str:
        """State the difference in zero-shot top-1 at every share."""
        tests = {
            swap: against(_swap_run(summary, "HET-XL", swap), _swap_run(summary, "DET", swap), "zero_shot_top1")
            for swap in SWAPS
        }
        signs = [sign(test) for test in tests.values()]
        return (
            f"HET-XL's zero-shot top-1 accuracy compared with DET's is, by the share of swapped texts, "
            f"{changes_text(tests)}. It is significantly higher in {signs.count(1)} and significantly lower in "
            f"{signs.count(-1)} of {len(signs)} comparisons. {holds(agree(signs, 1), self.claim)}"
        )


def welch_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t test; None with fewer than two values on a side."""
    ours, theirs = mean(first), mean(second)
    if ours.error is None or theirs.error is None:
        return None
    total = ours.error**2 + theirs.error**2
    if total == 0:  # all values are equal
        return 1.0 if ours.value == theirs.value else 0.0
    freedom = total**2 / (ours.error**4 / (ours.number - 1) + theirs.error**4 / (theirs.number - 1))
    # Rounding can give a value just below 1, the minimum.
    return two_sided_p((ours.value - theirs.value) / math.sqrt(total), max(1.0, freedom))


def _swap_run(summary: Summary, label: str, swap: float) -> dict[str, list[float]] | None:
    return summary["runs"][swap_setting(HEADS[label], swap)]


def _differences(summary: Summary) -> Table:
    rows = []
    for swap in SWAPS:
        det, xl = (_swap_run(summary, label, swap) for label in HEADS)
        for key, title in COMPARED.items():
            cells: list[Value] = [percent(run, key) for run in (det, xl)]
            if det is not None and xl is not None and key in det and key in xl:
                test = paired_test(xl[key], det[key])
                cells += [difference_text(test, 2, 100), p_text(test.p), p_text(welch_p(xl[key], det[key]))]
                rows.append(Row(title, cells, swapped(swap)))
    columns = [Column(label, 2) for label in HEADS]
    columns += [Column("difference", 2), Column("p, paired"), Column("p, Welch")]
    note = "the p-values are of the t test paired over the seeds, and of Welch's, which is the paper's; all in percent"
    return Table("HET-XL less DET", columns, rows, note)


def _audit(summary: Summary) -> Table:
    rows = []
    for swap in SWAPS:
        det, xl = (_swap_run(summary, label, swap) for label in HEADS)
        if swap:
            asked = ((xl, "noise_auroc"), (xl, "distance_auroc"), (det, "distance_auroc"))
            rows.append(Row(share_text(swap), [percent(run, key) for run, key in asked]))
    names = ("HET-XL, noise", "HET-XL, distance", "DET, distance")
    note = (
        "AUROC in percent for telling the training pairs with swapped texts from the others: by the scale of the "
        "noise, and by the distance of the two embeddings"
    )
    return Table("Finding swapped pairs", [Column(name, 2) for name in names], rows, note, "texts swapped")


ROWS = {
    "neither before nor after the noise": "none",
    "after the noise": "after",
    "before the noise": "before",
    "before and after the noise": "both",
}
"""Placements by the names that the paper's table has for them here, in its order."""

PLACED = [(None, label, placement_setting(placement), "") for label, placement in ROWS.items()]
PLACEMENT_METRICS = {
    "zero_shot_top1": "zero-shot top-1",
    "zero_shot_top5": "zero-shot top-5",
    "validation_image_to_text@1": "validation recall@1, image to text",
}


class Normalisation(PairStudy):
    """HET-XL on clean pairs, with embeddings normalised before and after the noise, or not."""

    name = "normalisation"
    question = (
        "Embeddings can be brought to length 1 before the noise is added, after it, both times or never: does it "
        "matter when?"
    )
    paper = ("tab:contrastive_normalization",)
    claim = (
        "the noise has to be added after the normalisation, while normalising once more behind it has no consistent "
        "effect"
    )
    settings = tuple(placement_setting(placement) for placement in ROWS.values())

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return a table with the paper's layout."""
        return [accuracy_table(summary, "Where to normalise", PLACEMENT_METRICS, PLACED, "HET-XL on ")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw zero-shot accuracy and recall of the four placements."""
        shown = {key: PLACEMENT_METRICS[key] for key in ("zero_shot_top1", "validation_image_to_text@1")}
        return accuracy_dots(summary, path, shown, PLACED)

    def conclusion(self, summary: Summary) -> str:
        """Judge both parts of the claim, each by its own differences."""
        first = {
            "without normalisation after it": _placement_less(summary, "before", "none"),
            "with it": _placement_less(summary, "both", "after"),
        }
        first_changes = " and ".join(f"{change(test, 2, 100, ' points')} {name}" for name, test in first.items())
        signs = [sign(test) for test in first.values()]
        # Needed means in both cases; a single one that counts against it is enough to deny that.
        needed = False if -1 in signs else True if set(signs) == {1} else None
        why = "" if needed is not None else f"{signs.count(1)} of the two differences counts"
        again = {name: _placement_less(summary, "both", "before", key) for key, name in PLACEMENT_METRICS.items()}
        effects = [sign(test) for test in again.values()]
        consistent = None if None in effects else len(set(effects)) > 1 or set(effects) == {0}
        changes = "; ".join(f"{name} is {change(test, 2, 100, ' points')}" for name, test in again.items())
        return (
            f"Normalising before the noise, zero-shot top-1 is {first_changes}. "
            f"{holds(needed, 'the noise has to be added after the normalisation', why)} "
            f"With normalisation before the noise, one more behind it changes this: {changes}. "
            f"{holds(consistent, 'normalising once more has no consistent effect')}"
        )


def _placement_less(summary: Summary, first: str, second: str, metric: str = "zero_shot_top1") -> PairedTest | None:
    ours, theirs = (summary["runs"][placement_setting(placement)] for placement in (first, second))
    return against(ours, theirs, metric)


MARGIN = 0.0025
"""Differences of an accuracy within this are called none: about half the standard error that two thousand test images
leave an accuracy of a few percent."""

TEST_NOISE_METRICS = {"top1": "zero-shot top-1", "top5": "zero-shot top-5"}


class NoiseAtTestTime(PairStudy):
    """The same models of HET-XL, evaluated without noise and by the mean over draws of the noise."""

    name = "test-noise"
    question = (
        "HET-XL is trained with noise on the embeddings. Does zero-shot classification need draws of it too, or do the "
        "representations without noise serve as well?"
    )
    paper = ("app:het_hom_contrastive",)
    claim = "zero-shot accuracy is the same with draws of the noise at test time and without"
    settings = tuple(swap_setting("het-xl", swap) for swap in SWAPS)

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout for every share of swapped texts."""
        title = "Deterministic against sampled representations at test time"
        return [accuracy_table(summary, title, TEST_NOISE_METRICS, _noise_rows(summary), "HET-XL on ")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw both accuracies with and without noise, by the share of swapped texts."""
        return accuracy_dots(summary, path, TEST_NOISE_METRICS, _noise_rows(summary))

    def conclusion(self, summary: Summary) -> str:
        """State the differences in top-1 at every share of swapped texts."""
        runs = {swap: summary["runs"][swap_setting("het-xl", swap)] for swap in SWAPS}
        tests = {swap: run and paired_test(run["sampled_top1"], run["zero_shot_top1"]) for swap, run in runs.items()}
        why = f"a difference counts from {100 * MARGIN:g} points on"
        return (
            f"With {summary['samples']} draws at test time, compared with none, zero-shot top-1 accuracy is, by the "
            f"share of swapped texts, {changes_text(tests)}. "
            f"{holds(same(list(tests.values()), MARGIN), self.claim, why)}"
        )


def _noise_rows(summary: Summary) -> list[PairRow]:
    ways = {"deterministic": "zero_shot_", f"{summary['samples']} MC samples": "sampled_"}
    return [
        (swapped(swap), label, swap_setting("het-xl", swap), kind) for swap in SWAPS for label, kind in ways.items()
    ]


STUDIES = (Contrastive(), Normalisation(), NoiseAtTestTime())
