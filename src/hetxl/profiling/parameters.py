"""Count the parameters of a head and its backbone, and their training memory in float32.

The heads are created on the `meta` device, which gives exact counts without memory for the weights.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hetxl._checks import integer_at_least
from hetxl.nn import HEADS, Head, LearnedTemperature, build_head
from hetxl.registry import RANK, head_entry

FLOAT32_BYTES = 4

LARGEST_SIZE = 100_000_000
"""Upper limit of K, D, R, M and H, because HET-H computes its hash of K classes even without data."""


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module, counting shared parameters once."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class HeadParameters:
    """The parameters of one head, by part."""

    classifier: int  # W and b, D·K + K
    covariance: int  # parameters of the noise; 0 for DET
    projection: int  # W′, K·M; 0 unless HET-XL has a separate noise space
    temperature: int  # 1 if τ is learned

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return self.classifier + self.covariance + self.projection + self.temperature


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of parameters in training, without activations."""

    weights: int  # 4 bytes for each parameter
    gradients: int  # 4 bytes
    optimiser: int  # 8 bytes, the two moments of Adam

    @property
    def total(self) -> int:
        """Return 16 bytes per parameter."""
        return self.weights + self.gradients + self.optimiser


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a backbone (0 for a head alone) and its head."""

    backbone: int
    head: HeadParameters

    @property
    def total(self) -> int:
        """Return the sum of backbone and head."""
        return self.backbone + self.head.total

    @property
    def training_bytes(self) -> TrainingBytes:
        """Return the memory to train all of them with Adam in float32."""
        single = FLOAT32_BYTES * self.total
        return TrainingBytes(weights=single, gradients=single, optimiser=2 * single)


@dataclass(frozen=True)
class HeadRow:
    """One head of a comparison."""

    head: str  # its name, a key of `hetxl.nn.HEADS`
    count: ParameterCount | None  # None for a head that is impossible at these sizes
    added: float | None  # parameters added to DET's total, as a share: 0.05 for 5 % more; None if `count` is None
    refused: str | None = None  # reason for a missing count

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain numbers, for JSON."""
        row: dict[str, Any] = {"head": self.head, "refused": self.refused, "added_over_det": self.added}
        if self.count is not None:
            head, memory = self.count.head, self.count.training_bytes
            sums = {"head": head.total, "total": self.count.total}
            row["parameters"] = {"backbone": self.count.backbone, **asdict(head), **sums}
            row["bytes"] = {**asdict(memory), "total": memory.total}
        return row


def count_head(head: Head) -> HeadParameters:
    """Return the parameters of a head by part. A classifier that is a plain function has none."""

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
    rank: int = RANK,
    covariance: str = "efficient",
    residual: str = "rank1",
    noise_features: int | None = None,
    buckets: int | None = None,
) -> list[HeadRow]:
    """Return the four heads for given sizes, DET first.

    A head whose covariance would be too large has the reason in `refused`; invalid options raise.

    Args:
        backbone: number of parameters of the backbone.
        noise_features: M, HET-XL only: size of a separate noise space.
        buckets: H, HET-H only.
    """
    # Checked before the heads do, so that a head below can only fail because of its size.
    shared: dict[str, Any] = {"rank": rank, "covariance": covariance, "residual": residual, "device": "meta"}
    sizes = {"noise_features": noise_features, "buckets": buckets}
    for name, size in {"in_features": in_features, "num_classes": num_classes, "rank": rank, **sizes}.items():
        check_size(name, size, minimum=0 if name == "rank" else 1)
    det = ParameterCount(backbone, count_head(build_head("det", in_features, num_classes, **shared)))
    rows = [HeadRow("det", det, 0.0)]
    for name in HEADS:
        if name == "det":
            continue
        own = {option: sizes[option] for option in head_entry(name).options if option in sizes}
        try:
            temperature = LearnedTemperature(device="meta")  # one parameter, as in the paper
            head = build_head(name, in_features, num_classes, temperature=temperature, **shared, **own)
        except ValueError as error:
            rows.append(HeadRow(name, None, None, refused=str(error)))
            continue
        except RuntimeError as error:  # torch's error for a tensor that exceeds the address space
            rows.append(HeadRow(name, None, None, refused=f"too large for any memory: {str(error).splitlines()[0]}"))
            continue
        count = ParameterCount(backbone, count_head(head))
        rows.append(HeadRow(name, count, (count.total - det.total) / det.total))
    return rows


def format_count(parameters: int) -> str:
    """Format a number of parameters: all digits below a million, else in millions as in the paper."""
    return f"{parameters:,}" if parameters < 1_000_000 else f"{parameters / 1e6:,.2f}M"


def format_bytes(size: int) -> str:
    """Format a number of bytes in powers of 1024."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:,.2f} {unit}"
