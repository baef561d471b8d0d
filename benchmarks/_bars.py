"""What a measurement must reach, and the table that says whether it does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["stretch", "pass", "fail"]


@dataclass(frozen=True)
class Bar:
    """The value that must be reached, and a better one to aim for.

    Attributes:
        value: the bar.
        stretch: the better value, or None.
        at_least: whether values must lie above, as speed-ups do, or below, as costs do.
        unit: "×", "%" (of a share) or "MB"
    """

    value: float
    stretch: float | None = None
    at_least: bool = False
    unit: str = "×"

    def verdict(self, measured: float) -> Verdict:
        """Whether a measured value reaches the bar, the stretch or neither."""
        if not self._reached(measured, self.value):
            return "fail"
        return "stretch" if self.stretch is not None and self._reached(measured, self.stretch) else "pass"

    def _reached(self, measured: float, value: float) -> bool:
        return measured >= value if self.at_least else measured <= value

    def limit(self, value: float | None) -> str:
        """A bar as text, such as "≥ 10×"."""
        return "" if value is None else f"{'≥' if self.at_least else '≤'} {amount(value, self.unit)}"


def amount(value: float, unit: str) -> str:
    """A value with its unit; as many digits as are worth reading."""
    if unit == "×":
        return f"{value:.3g}×" if abs(value) < 100 else f"{value:,.0f}×"
    if unit == "%":
        return f"{100 * value:.3g} %"
    if unit == "MB":
        return f"{value:,.0f} MB"
    return f"{value:.2g}{unit}"


@dataclass(frozen=True)
class Row:
    """A measured value beside its bar.

    Attributes:
        name: what was measured.
        measured: the value.
        bar: what it must reach.
        detail: the times or sizes behind the value.
    """

    name: str
    measured: float
    bar: Bar
    detail: str

    @property
    def verdict(self) -> Verdict:
        """Whether the bar is reached."""
        return self.bar.verdict(self.measured)

    def cells(self) -> list[str]:
        """The row as text, under `HEADER`."""
        return [
            self.name,
            self.detail,
            amount(self.measured, self.bar.unit),
            self.bar.limit(self.bar.value),
            self.bar.limit(self.bar.stretch),
            self.verdict,
        ]


HEADER = ("measure", "behind it", "measured", "bar", "stretch", "result")


def missed(rows: Sequence[Row]) -> list[Row]:
    """The rows that do not reach their bar."""
    return [row for row in rows if row.verdict == "fail"]
