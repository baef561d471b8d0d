"""Parameters of a head beside its backbone, and the memory that training them takes in float32.

The heads are the real modules, made on the `meta` device: exact counts, and no memory for the weights themselves.
"""

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from torch import nn

from hetxl.functional._checks import integer_at_least
from hetxl.nn import HEADS, Head, build_head

FLOAT32_BYTES = 4

LARGEST_SIZE = 100_000_000
"""Limit on K, D, R, M and H here: HET-H computes its hash of K classes even without data."""


def count_parameters(module: nn.Module) -> int:
    """The parameters of a module; one that is shared inside it counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class HeadParameters:
    """The parameters of one head, by part.

    Attributes:
        classifier: W and b, D·K + K.
        covariance: all that makes the noise; 0 for DET.
        projection: W′, K·M; 0 unless HET-XL has a noise space of its own.
        temperature: 1 when τ is learned.
    """

    classifier: int
    covariance: int
    projection: int
    temperature: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.classifier + self.covariance + self.projection + self.temperature


@dataclass(frozen=True)
class TrainingBytes:
    """What parameters take in training, without activations.

    Attributes:
        weights: 4 bytes for each parameter.
        gradients: 4 bytes.
        optimiser: 8 bytes, the two moments of Adam.
    """

    weights: int
    gradients: int
    optimiser: int

    @property
    def total(self) -> int:
        """16 bytes for each parameter."""
        return self.weights + self.gradients + self.optimiser


@dataclass(frozen=True)
class ParameterCount:
    """A backbone and its head.

    Attributes:
        backbone: parameters of the backbone; 0 for a head alone.
        head: those of the head, by part.
    """

    backbone: int
    head: HeadParameters

    @property
    def total(self) -> int:
        """Backbone and head."""
        return self.backbone + self.head.total

    @property
    def training_bytes(self) -> TrainingBytes:
        """The memory to train all of them with Adam in float32."""
        single = FLOAT32_BYTES * self.total
        return TrainingBytes(weights=single, gradients=single, optimiser=2 * single)


@dataclass(frozen=True)
class HeadRow:
    """One head of a comparison.

    Attributes:
        head: its name, a key of `hetxl.nn.HEADS`.
        count: its parameters; None for a head that these sizes do not allow.
        added: share of parameters beyond DET's total, 0.05 for 5% more; None like `count`.
        refused: why there is no count, None when there is one.
    """

    head: str
    count: ParameterCount | None
    added: float | None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as plain numbers, for JSON."""
        row: dict[str, Any] = {"head": self.head, "refused": self.refused, "added_over_det": self.added}
        if self.count is not None:
            head, memory = self.count.head, self.count.training_bytes
            row["parameters"] = {
                "backbone": self.count.backbone,
                "classifier": head.classifier,
                "covariance": head.covariance,
                "projection": head.projection,
                "temperature": head.temperature,
                "head": head.total,
                "total": self.count.total,
            }
            row["bytes"] = {
                "weights": memory.weights,
                "gradients": memory.gradients,
                "optimiser": memory.optimiser,
                "total": memory.total,
            }
        return row


def count_head(head: Head) -> HeadParameters:
    """The parameters of a head by part. A classifier that is a plain function has none of its own."""

    def part(name: str) -> int:
        module = getattr(head, name, None)
        return count_parameters(module) if isinstance(module, nn.Module) else 0

    return HeadParameters(part("classifier"), part("covariance"), part("projection"), part("temperature"))


def check_size(name: str, size: int | None, minimum: int = 1) -> None:
    """Raise unless a size lies between `minimum` and LARGEST_SIZE, or is None."""
    if size is not None and integer_at_least(name, size, minimum) > LARGEST_SIZE:
        raise ValueError(f"{name} must be at most {LARGEST_SIZE:,}, found {size:,}")


def compare_heads(
    in_features: int,
    num_classes: int,
    *,
    backbone: int = 0,
    rank: int = 50,
    covariance: str = "efficient",
    residual: str = "rank1",
    noise_features: int | None = None,
    buckets: int | None = None,
) -> list[HeadRow]:
    """The four heads for one problem, DET first.

    A head whose covariance would be too large is a row with the reason in `refused`; wrong options raise.

    Args:
        in_features: D
        num_classes: K
        backbone: parameters of the backbone.
        rank: R
        covariance: "efficient", "low_rank", "diagonal" or "full".
        residual: "rank1" or "diagonal".
        noise_features: M, HET-XL only: noise in a space of its own.
        buckets: H, HET-H only.
    """
    # Checked here although the heads check them too: what a head refuses below is then a matter of its size alone.
    check_size("in_features", in_features)
    check_size("num_classes", num_classes)
    check_size("rank", rank, minimum=0)
    check_size("noise_features", noise_features)
    check_size("buckets", buckets)
    shared: dict[str, Any] = {"rank": rank, "covariance": covariance, "residual": residual, "device": "meta"}
    own: dict[str, dict[str, Any]] = {"het-h": {"buckets": buckets}, "het-xl": {"noise_features": noise_features}}

    det = ParameterCount(backbone, count_head(build_head("det", in_features, num_classes, **shared)))
    rows = [HeadRow("det", det, 0.0)]
    for name in HEADS:
        if name == "det":
            continue
        try:
            head = build_head(name, in_features, num_classes, **shared, **own.get(name, {}))
        except ValueError as error:
            rows.append(HeadRow(name, None, None, refused=str(error)))
            continue
        except RuntimeError as error:  # torch's word for a tensor with more bytes than an address can count
            rows.append(HeadRow(name, None, None, refused=f"too large for any memory: {str(error).splitlines()[0]}"))
            continue
        count = ParameterCount(backbone, count_head(head))
        rows.append(HeadRow(name, count, (count.total - det.total) / det.total))
    return rows


def format_count(parameters: int) -> str:
    """A number of parameters for people: all digits below a million, then millions as the paper gives them."""
    return f"{parameters:,}" if parameters < 1_000_000 else f"{parameters / 1e6:,.2f}M"


def format_bytes(size: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:,.2f} {unit}"


def parameter_table(rows: list[HeadRow], title: str) -> Table:
    """The parameters of each head, and what it adds over DET. Noise is all of the head beside its classifier."""
    table = _table(title, ("backbone", "classifier", "noise", "head", "total", "over DET"))
    for row in rows:
        if row.count is None or row.added is None:
            table.add_row(row.head.upper(), *["–"] * 6)
            continue
        head = row.count.head
        counts = (row.count.backbone, head.classifier, head.total - head.classifier, head.total, row.count.total)
        table.add_row(row.head.upper(), *map(format_count, counts), f"{row.added:+.2%}" if row.added else "–")
    return table


def memory_table(rows: list[HeadRow]) -> Table:
    """What training each head and its backbone takes; the total also in bytes."""
    title = "Memory to train them: float32, Adam, without activations"
    table = _table(title, ("weights", "gradients", "optimiser", "total", "bytes"))
    for row in rows:
        if row.count is None:
            table.add_row(row.head.upper(), *["–"] * 5)
            continue
        memory = row.count.training_bytes
        sizes = (memory.weights, memory.gradients, memory.optimiser, memory.total)
        table.add_row(row.head.upper(), *map(format_bytes, sizes), f"{memory.total:,}")
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    """A column for the name of the head, then numbers; narrow enough for 80 characters, and never cut short."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("head", min_width=6)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold", min_width=66 // len(columns) - 1)
    return table
