"""`hetxl study flops`: operations of HET and HET-XL over the number of samples (Table "Time complexity", figures
of FLOPs)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.charts import plot_lines
from hetxl.studies.complexity import counted, crossing, line_in_samples, paper_operations, predicted, terms
from hetxl.studies.measure import HeadSize
from hetxl.studies.paper import classes_of, features_of, figures
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import holds

LABELS = ("HET", "HET-XL")
COUNTS = (1, 2, 4, 16, 64, 256, 1000)
WAYS = {
    "HET, samples first": ("HET", "samples"),
    "HET-XL, samples first": ("HET-XL", "samples"),
    "HET, factors first": ("HET", "factors"),
    "HET-XL, factors first": ("HET-XL", "factors"),
}


class Flops(Study):
    """The paper's formulas beside what our modules do, in its largest public setting."""

    name = "flops"
    question = (
        "How many operations do the sampled logits of one example take, and from how many samples on is HET cheaper "
        "than "
        "HET-XL? Counted on our modules, at the sizes of ResNet152x1 on ImageNet-21k."
    )
    claim = "HET-XL is cheaper than HET for few samples, and dearer for many"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Formulas and counts; without data, so that the full sizes cost nothing in any form."""
        sizes = {"D": features_of("ResNet152x1"), "K": classes_of("ImageNet-21k"), "R": figures()["settings"]["rank"]}
        size = HeadSize(sizes["D"], sizes["K"], sizes["R"])
        lines = {label: line_in_samples(label, sizes) for label in LABELS}
        counts = {
            name: {str(samples): counted(label, size, samples, order) for samples in COUNTS}  # pyright: ignore[reportArgumentType]
            for name, (label, order) in WAYS.items()
        }
        expected = {
            name: {str(samples): predicted(label, size, samples, order) for samples in COUNTS}  # pyright: ignore[reportArgumentType]
            for name, (label, order) in WAYS.items()
        }
        ours = {
            name: (2 * found["1"] - found["2"], found["2"] - found["1"]) for name, found in counts.items()
        }  # a + b·S
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
        found = {label: paper_operations(label, sizes) for label in LABELS}
        rows = []
        for number, operation in enumerate(operations):
            cells: list[Any] = []
            for label in LABELS:
                cells += [" + ".join(_formula(term) for term in terms(label)[number]), found[label][number] / 1e6]
            rows.append(Row(operation, cells))
        total: list[Any] = []
        for label in LABELS:
            flat = [term for row in terms(label) for term in row]
            text = " + ".join(f"{flat.count(t) if flat.count(t) > 1 else ''}{_formula(t)}" for t in dict.fromkeys(flat))
            total += [text, sum(found[label]) / 1e6]
        rows.append(Row("total, with its constants", total))
        counts = [
            Row(samples, [summary["counts"][name][samples] / 1e9 for name in WAYS])
            for samples in next(iter(summary["counts"].values()))
        ]
        sizes_text = ", ".join(f"{name} = {value:,}" for name, value in summary["sizes"].items())
        return [
            Table(
                "Complexity, evaluated", columns, rows, f"multiplications of one example at {sizes_text}", "operation"
            ),
            Table(
                "Counted on our modules, GFLOP an example", [Column(name, 2) for name in WAYS], counts, head="samples"
            ),
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
            name: [(float(samples), [value / 1e9]) for samples, value in found.items()]
            for name, found in summary["counts"].items()
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
            "and by "
            f"the products that our modules do samples first up to S = {_number(ours)}. At S = {last} HET-XL takes "
            f"{samples_first:.1f} times the operations of HET samples first, and {factors_first:.1f} times factors "
            "first, "
            f"where {never}; counts and formulas differ by {100 * off:.1f} % at most. "
            f"{holds(ours is not None and samples_first > 1, self.claim)}"
        )


def _formula(term: str) -> str:
    return term.replace("DD", "D²")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


STUDY = Flops()
