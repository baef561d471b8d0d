"""`hetxl study flops`: operations of all heads over the number of samples (Table "Time complexity", figures of FLOPs),
by the paper's formulas with their constants and counted on our modules, in training and prediction."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hetxl.functional.distribution import Order
from hetxl.registry import HEAD_LABELS
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.measure import MODES, HeadSize, Mode
from hetxl_lab.studies.paper import classes_of, features_of, figures
from hetxl_lab.studies.study import Lab, PaperStudy, Summary
from hetxl_lab.studies.verdicts import holds
from hetxl_train.report.tables import Column, Row, Table

HEADS = {label: name for name, label in HEAD_LABELS.items()}
LABELS = ("HET", "HET-XL")  # heads with formulas in the paper


def terms(label: str) -> list[list[str]]:
    """Return the terms of each operation of the paper's table, as products of letters: "DKS" is D·K·S."""
    return figures()["complexity"][label]


def evaluated(term: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a product of letters."""
    return prod(sizes[letter] for letter in term)


def paper_operations(label: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the multiplications of each operation of the paper's table at sizes D, K, R and S, with all terms."""
    return [sum(evaluated(term, sizes) for term in row) for row in terms(label)]


def line_in_samples(label: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return a and b of the paper's total a + b·S."""
    none, single = (sum(paper_operations(label, {**sizes, "S": samples})) for samples in (0, 1))
    return none, single - none


def crossing(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return S above which the second a + b·S exceeds the first, each as (a, b); None without a crossing at S > 0."""
    if second[1] == first[1]:
        return None
    samples = (first[0] - second[0]) / (second[1] - first[1])
    return samples if samples > 0 and second[1] > first[1] else None


def counted(label: str, size: HeadSize, samples: int, order: Order, mode: Mode = "eval") -> int:
    """Count the floating-point operations in our module's matrix products for one example, without computing them.

    In training they include the loss and all gradients, also those of the features, under autograd.
    """
    head = size.build(HEADS[label], device="meta")
    features = torch.empty(1, size.features, device="meta", requires_grad=True)
    with torch.set_grad_enabled(mode == "train"), FlopCounterMode(display=False) as counter:
        if label == "DET":
            logits = head.classifier(features)
        else:
            distribution = head.logit_distribution(features)
            logits = distribution.sample(torch.empty(1, samples, distribution.size, device="meta"), order)
        if mode == "train":
            logits.sum().backward()  # the link has no matrix products
    return counter.get_total_flops()


def backbone_counted(size: HeadSize, mode: Mode) -> int:
    """Count the backbone's floating-point operations for one image, in training with all its gradients."""
    backbone = size.build_backbone("meta")
    backbone.module.train(mode == "train")
    images = torch.empty(1, 3, backbone.image_size, backbone.image_size, device="meta")
    with torch.set_grad_enabled(mode == "train"), FlopCounterMode(display=False) as counter:
        features = backbone(images)
        if mode == "train":
            features.sum().backward()
    return counter.get_total_flops()


def predicted(label: str, size: HeadSize, samples: int, order: Order) -> int:
    """Predict the result of `counted`: two operations for each multiplication in a matrix product.

    Two linear maps compute the scales, one the mean logits; then S draws of R factors go through W (samples first), or
    R + 1 rows go through W and are mixed S times (factors first).
    """
    features, classes, rank = size.features, size.classes, size.rank
    space = classes if label == "HET" else features  # N
    products = 2 * features * space + features * classes
    lift = features * classes if label == "HET-XL" else 0
    if order == "samples":
        products += samples * (rank * space + lift)
    else:
        products += (rank + 1) * lift + samples * (rank + 1) * classes
    return 2 * products


COUNTS = (1, 2, 4, 16, 64, 256, 1000)
ORDERS: tuple[Order, ...] = ("samples", "factors")
WAYS: dict[str, tuple[str, Order]] = {
    "DET": ("DET", "samples"),
    **{
        f"{label}, {order} first": (label, order)
        for order in ORDERS
        for label in HEADS
        if label != "DET" and (label != "HET-H" or order == "samples")
    },
}
"""Rows by the samples first, or by their factors. HET-H's lift is a copy: it has no product to save."""
SETTINGS = {"ResNet152x1, ImageNet-21k": "resnet152", "ViT-L/32, JFT-4B": "vit-l/32"}
FIRST = next(iter(SETTINGS))


def setting_size(name: str) -> HeadSize:
    """Return D, K and R of a setting of the paper."""
    backbone, dataset = name.split(", ")
    return HeadSize(features_of(backbone), classes_of(dataset), figures()["settings"]["rank"], SETTINGS[name])


class Flops(PaperStudy):
    """The paper's formulas and the counts of our modules, in the paper's two settings."""

    name = "flops"
    question = (
        "How many operations does one example take, in training and in prediction, with and without the backbone, and "
        "from how many samples on is HET cheaper than HET-XL? Counted on our modules."
    )
    claim = "HET-XL is cheaper than HET for few samples, and dearer for many"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return formulas and counts; they need no data, so every profile uses the full sizes."""
        size = setting_size(FIRST)
        sizes = {"D": size.features, "K": size.classes, "R": size.rank}
        lines = {label: line_in_samples(label, sizes) for label in LABELS}
        settings = {name: setting_size(name) for name in SETTINGS}
        counts = {
            name: {mode: {way: _over_samples(way, own, mode) for way in WAYS} for mode in MODES}
            for name, own in settings.items()
        }
        first = counts[FIRST]["eval"]
        ours = {n: (2 * c["1"] - c["2"], c["2"] - c["1"]) for n, c in first.items()}  # a + b·S
        formulas = {
            n: {s: predicted(WAYS[n][0], size, int(s), WAYS[n][1]) for s in first[n]}
            for n in WAYS
            if WAYS[n][0] in LABELS
        }
        return {
            "sizes": sizes,
            "lines": {label: list(line) for label, line in lines.items()},
            "counts": counts,
            "predicted": formulas,
            "backbones": {
                name: {mode: backbone_counted(own, mode) for mode in MODES} for name, own in settings.items()
            },
            "crossing": crossing(lines["HET"], lines["HET-XL"]),
            "crossing_ours": crossing(ours["HET, samples first"], ours["HET-XL, samples first"]),
            "crossing_factors": crossing(ours["HET, factors first"], ours["HET-XL, factors first"]),
        }

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's table with its constants, and our counts."""
        sizes = {**summary["sizes"], "S": figures()["settings"]["samples"]}
        operations = figures()["complexity"]["operations"]
        columns = [Column(f"{label} {what}", 1) for label in LABELS for what in ("complexity", "at S = 1,000, M")]
        operations_of = {label: paper_operations(label, sizes) for label in LABELS}
        rows = []
        for number, operation in enumerate(operations):
            formulas = [" + ".join(_formula(term) for term in terms(label)[number]) for label in LABELS]
            millions = [operations_of[label][number] / 1e6 for label in LABELS]
            rows.append(Row(operation, [formulas[0], millions[0], formulas[1], millions[1]]))
        total: list[Any] = []
        for label in LABELS:
            flat = [term for row in terms(label) for term in row]
            text = " + ".join(f"{flat.count(t) if flat.count(t) > 1 else ''}{_formula(t)}" for t in dict.fromkeys(flat))
            total += [text, sum(operations_of[label]) / 1e6]
        rows.append(Row("total, with its constants", total))
        sizes_text = ", ".join(f"{name} = {value:,}" for name, value in summary["sizes"].items())
        note = f"multiplications of one example at {sizes_text}"
        return [Table("Complexity, evaluated", columns, rows, note, "operation"), *_count_tables(summary)]

    def paper_tables(self) -> Sequence[Table]:
        """Return the table as in the paper, in orders of magnitude."""
        columns = [Column(label) for label in LABELS]
        operations = figures()["complexity"]["operations"]
        rows = [
            Row(operation, [f"O({' + '.join(_formula(term) for term in terms(label)[number])})" for label in LABELS])
            for number, operation in enumerate(operations)
        ]
        return [Table("Time complexity of HET and HET-XL", columns, rows, head="operation")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the counts over the samples in the first setting."""
        panels = {
            f"GFLOP an example, {MODES[mode]}": {
                name: [(float(samples), [value / 1e9]) for samples, value in values.items()]
                for name, values in counts.items()
            }
            for mode, counts in summary["counts"][FIRST].items()
        }
        return plot_lines(panels, path, "samples", log_x=True, log_y=tuple(panels))

    def conclusion(self, summary: Summary) -> str:
        """State the crossing points, and the effect of factors-first."""
        ours, paper = summary["crossing_ours"], summary["crossing"]
        last = str(COUNTS[-1])
        counts = summary["counts"][FIRST]["eval"]
        samples_first, factors_first = (
            counts[f"HET-XL, {order} first"][last] / counts[f"HET, {order} first"][last]
            for order in ("samples", "factors")
        )
        off = max(
            abs(counts[name][samples] / summary["predicted"][name][samples] - 1)
            for name in summary["predicted"]
            for samples in counts[name]
        )
        factors = summary["crossing_factors"]
        never = "they do not cross" if factors is None else f"they cross at S = {factors:.1f}"
        return (
            f"By the paper's formulas with their constants HET-XL is cheaper than HET up to S = {_number(paper)}, "
            f"and by the products that our modules do samples first up to S = {_number(ours)}. At S = {last} HET-XL "
            f"takes {samples_first:.1f} times the operations of HET samples first, and {factors_first:.1f} times "
            f"factors first, where {never}; counts and formulas differ by {100 * off:.1f} % at most. "
            f"{holds(ours is not None and samples_first > 1, self.claim)} {_beside_backbones(summary)}"
        )


def _over_samples(way: str, size: HeadSize, mode: Mode) -> dict[str, int]:
    """Return counts by S. They are linear in S, so two of them determine all; a test checks a third."""
    label, order = WAYS[way]
    single, double = (counted(label, size, samples, order, mode) for samples in (1, 2))
    return {str(samples): single + (samples - 1) * (double - single) for samples in COUNTS}


def _count_tables(summary: Summary) -> list[Table]:
    """Return tables of the heads' counts over the samples, by setting and mode, and relative to the backbone."""
    tables, whole = [], []
    for name, modes in summary["counts"].items():
        for mode, counts in modes.items():
            rows = [Row(samples, [counts[way][samples] / 1e9 for way in WAYS]) for samples in counts["DET"]]
            title = f"GFLOP an example, {MODES[mode]}: {name}"
            tables.append(Table(title, [Column(way, 2) for way in WAYS], rows, "the head alone", "samples"))
            own, last = summary["backbones"][name][mode], str(COUNTS[-1])
            cells = [own / 1e9, *((own + counts[way][last]) / 1e9 for way in WAYS)]
            whole.append(Row(f"{name}, {MODES[mode]}", cells))
    columns = [Column("backbone alone", 1), *(Column(way, 1) for way in WAYS)]
    note = f"S = {COUNTS[-1]:,}, 224 × 224 images; convolutions and matrix products"
    return [*tables, Table("With the backbone, GFLOP an example", columns, whole, note)]


def _beside_backbones(summary: Summary) -> str:
    """Say how much the heads add to a backbone with the most samples."""
    last, parts = str(COUNTS[-1]), []
    for name, modes in summary["backbones"].items():
        for mode, own in modes.items():
            added = [
                f"{summary['counts'][name][mode][f'HET-XL, {order} first'][last] / own:.2f} ({order} first)"
                for order in ORDERS
            ]
            parts.append(f"{name}, {MODES[mode]}: {' and '.join(added)}")
    return f"At S = {last} HET-XL's head takes as many operations as the backbone, times: {'; '.join(parts)}."


def _formula(term: str) -> str:
    return term.replace("DD", "D²")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


STUDIES = (Flops(),)
