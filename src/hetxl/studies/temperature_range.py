"""`hetxl study tau-range`: does it matter where τ starts and which range it has (Tables "Sensitivity to τ")?"""

from collections.abc import Sequence
from typing import NamedTuple

from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import LEARNED_TAU, NLL, PRECISION, Line, LineStudy, cells_of, values_of
from hetxl.studies.study import Summary
from hetxl.studies.tables import Row, Table
from hetxl.studies.verdicts import against, holds, insensitive, sign, within


class Start(NamedTuple):
    """How a learned τ begins: its value, and the bounds that it has."""

    init: float
    low: float = 0.05
    high: float = 5.0

    @property
    def label(self) -> str:
        """As the paper's tables name it here."""
        return f"{self.init:g} in {self.low:g} … {self.high:g}"


PAPER = Start(2.525)
STARTS = (Start(1.25), PAPER, Start(3.75), Start(4.9))
RANGES = (PAPER, Start(2.525, 0.001), Start(2.525, 0.01), Start(2.525, high=4.0), Start(2.525, high=3.0))
"""The paper's settings: eight, as one is in both tables."""

SETTINGS = tuple(dict.fromkeys((*STARTS, *RANGES)))
"""Each once."""


class TemperatureRange(LineStudy):
    """Eight starts and ranges of τ."""

    name = "tau-range"
    question = "Does it matter where a learned τ starts, and between which bounds it is kept?"
    paper = ("tab:tau_start_point", "tab:tau_range")
    claim = "performance is not sensitive to the start and the range of τ"
    title = "Start and range of τ"
    columns = (NLL, PRECISION, LEARNED_TAU)

    def lines(self, form: Form) -> Sequence[Line]:
        """Every setting once."""
        return [
            Line(
                one.label,
                "het-xl",
                form.base,
                {
                    **LEARNED,
                    "temperature_init": one.init,
                    "temperature_low": one.low,
                    "temperature_high": one.high,
                },
            )
            for one in SETTINGS
        ]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's two: starts, and ranges."""
        return [
            Table(
                title,
                self.columns,
                [Row(one.label, cells_of(values_of(summary, one.label), self.columns)) for one in settings],
                head="start and range",
            )
            for title, settings in (("Where τ starts", STARTS), ("The range of τ", RANGES))
        ]

    def conclusion(self, summary: Summary) -> str:
        """The spread over all settings, and which differ from the paper's own."""
        reference = values_of(summary, PAPER.label)
        tests = {
            line["label"]: against(line["values"], reference)
            for line in summary["lines"]
            if line["label"] != PAPER.label
        }
        known = [line["values"] for line in summary["lines"] if line["values"] is not None]
        means = [sum(values["nll"]) / len(values["nll"]) for values in known]
        ends = [sum(values["temperature"]) / len(values["temperature"]) for values in known]
        differing = [label for label, test in tests.items() if sign(test) not in (0, None)]
        found = insensitive(list(tests.values()), reference)
        told = f" ({'; '.join(differing)})" if differing else ""
        return (
            f"Over {len(known)} settings the mean NLL lies between {min(means):.3f} and {max(means):.3f}, and τ ends "
            f"between {min(ends):.2f} and {max(ends):.2f}. {len(differing)} of {len(tests)} settings differ "
            "significantly "
            f"from the paper's own{told}. {holds(found, self.claim, within())}"
        )


STUDY = TemperatureRange()
