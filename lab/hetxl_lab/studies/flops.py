"""`hetxl study flops`: operations of HET and HET-XL over the number of samples (Table "Time complexity", figures of
FLOPs), by the paper's formulas with their constants and counted on our modules."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hetxl.functional.distribution import Order
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.measure import HeadSize
from hetxl_lab.studies.paper import classes_of, features_of, figures
from hetxl_lab.studies.study import Lab, PaperStudy, Summary
from hetxl_lab.studies.verdicts import holds
from hetxl_train.report.tables import Column, Row, Table

HEADS = {"HET": "het", "HET-XL": "het-xl"}
LABELS = tuple(HEADS)


def terms(label: str) -> list[list[str]]:
    """The terms of each operation of the paper's table, as products of letters: "DKS" is D·K·S."""
    return figures()["complexity"][label]


def evaluated(term: str, sizes: Mapping[str, int]) -> int:
    """The value of a product of letters."""
    return prod(sizes[letter] for letter in term)


def paper_operations(label: str, sizes: Mapping[str, int]) -> list[int]:
    """The multiplications of each operation of the paper's table at sizes D, K, R and S, without dropping any term."""
    return [sum(evaluated(term, sizes) for term in row) for row in terms(label)]


def line_in_samples(label: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The paper's total as a + b·S: a, b."""
    none, single = (sum(paper_operations(label, {**sizes, "S": samples})) for samples in (0, 1))
    return none, single - none


def crossing(first: Sequence[float], second: Sequence[float]) -> float | None:
    """S from which the second is above the first, both (a, b) for a + b·S; None if they do not cross for S above 0."""
    if second[1] == first[1]:
        return None
    samples = (first[0] - second[0]) / (second[1] - first[1])
    return samples if samples > 0 and second[1] > first[1] else None


def counted(label: str, size: HeadSize, samples: int, order: Order) -> int:
    """Floating-point operations in the matrix products of our module, for one example; nothing is computed."""
    head = size.build(HEADS[label], device="meta")
    features = torch.empty(1, size.features, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        distribution = head.logit_distribution(features)
        distribution.sample(torch.empty(1, samples, distribution.size, device="meta"), order)
    return counter.get_total_flops()


def predicted(label: str, size: HeadSize, samples: int, order: Order) -> int:
    """What `counted` should find: two for each multiplication in a product of matrices.

    Two linear maps make the scales, one the mean logits; then S draws of R factors go through W (samples first), or
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
WAYS: dict[str, tuple[str, Order]] = {f"{label}, {order} first": (label, order) for order in ORDERS for label in LABELS}


class Flops(PaperStudy):
    """The paper's formulas beside what our modules do, in its largest public setting."""

    name = "flops"
    question = (
        "How many operations do the sampled logits of one example take, and from how many samples on is HET cheaper "
        "than HET-XL? Counted on our modules, at the sizes of ResNet152x1 on ImageNet-21k."
    )
    claim = "HET-XL is cheaper than HET for few samples, and dearer for many"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Formulas and counts; without data, so that the full sizes cost nothing in any profile."""
        sizes = {"D": features_of("ResNet152x1"), "K": classes_of("ImageNet-21k"), "R": figures()["settings"]["rank"]}
        size = HeadSize(sizes["D"], sizes["K"], sizes["R"])
        lines = {label: line_in_samples(label, sizes) for label in LABELS}
        counts, expected = (
            {
                name: {str(samples): count(label, size, samples, order) for samples in COUNTS}
                for name, (label, order) in WAYS.items()
            }
            for count in (counted, predicted)
        )
        ours = {n: (2 * counts[n]["1"] - counts[n]["2"], counts[n]["2"] - counts[n]["1"]) for n in counts}  # a + b·S
        return {
            "sizes": sizes,
            "lines": {label: list(line) for label, line in lines.items()},
            "counts": counts,
            "predicted": expected,
            "crossing": crossing(lines["HET"], lines["HET-XL"]),
            "crossing_ours": crossing(ours["HET, samples first"], ours["HET-XL, samples first"]),
            "crossing_factors": crossing(ours["HET, factors first"], ours["HET-XL, factors first"]),
        }

    def tables(self, summary: Summary) -> Sequence[Table]:
        """The paper's table with its constants, and our counts."""
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
        counts = [
            Row(samples, [summary["counts"][name][samples] / 1e9 for name in WAYS])
            for samples in next(iter(summary["counts"].values()))
        ]
        sizes_text = ", ".join(f"{name} = {value:,}" for name, value in summary["sizes"].items())
        note, ways = f"multiplications of one example at {sizes_text}", [Column(name, 2) for name in WAYS]
        return [
            Table("Complexity, evaluated", columns, rows, note, "operation"),
            Table("Counted on our modules, GFLOP an example", ways, counts, head="samples"),
        ]

    def paper_tables(self) -> Sequence[Table]:
        """The table as the paper gives it, in order of magnitude."""
        columns = [Column(label) for label in LABELS]
        operations = figures()["complexity"]["operations"]
        rows = [
            Row(operation, [f"O({' + '.join(_formula(term) for term in terms(label)[number])})" for label in LABELS])
            for number, operation in enumerate(operations)
        ]
        return [Table("Time complexity of HET and HET-XL", columns, rows, head="operation")]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Counts over the samples."""
        series = {
            name: [(float(samples), [value / 1e9]) for samples, value in values.items()]
            for name, values in summary["counts"].items()
        }
        axis = "GFLOP an example"
        return plot_lines({axis: series}, path, "samples", log_x=True, log_y=(axis,))

    def conclusion(self, summary: Summary) -> str:
        """The crossing points, and what factors-first changes."""
        ours, paper = summary["crossing_ours"], summary["crossing"]
        last = str(COUNTS[-1])
        counts = summary["counts"]
        samples_first, factors_first = (
            counts[f"HET-XL, {order} first"][last] / counts[f"HET, {order} first"][last]
            for order in ("samples", "factors")
        )
        off = max(
            abs(counts[name][samples] / summary["predicted"][name][samples] - 1)
            for name in WAYS
            for samples in counts[name]
        )
        factors = summary["crossing_factors"]
        never = "they do not cross" if factors is None else f"they cross at S = {factors:.1f}"
        return (
            f"By the paper's formulas with their constants HET-XL is cheaper than HET up to S = {_number(paper)}, "
            f"and by the products that our modules do samples first up to S = {_number(ours)}. At S = {last} HET-XL "
            f"takes {samples_first:.1f} times the operations of HET samples first, and {factors_first:.1f} times "
            f"factors first, where {never}; counts and formulas differ by {100 * off:.1f} % at most. "
            f"{holds(ours is not None and samples_first > 1, self.claim)}"
        )


def _formula(term: str) -> str:
    return term.replace("DD", "D²")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


STUDIES = (Flops(),)
