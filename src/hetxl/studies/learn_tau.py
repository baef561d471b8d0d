"""`hetxl study learn-tau`: what is it worth to learn τ (Tables "Ablation on the effect of learning τ")?"""

from collections.abc import Sequence

from hetxl.studies.forms import FIXED, LEARNED, Bench, Form
from hetxl.studies.lines import LEARNED_TAU, NLL, PRECISION, Line, LineStudy, cells_of, values_of
from hetxl.studies.study import Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, change, holds, sign

HEADS = {"DET": "det", "HET": "het", "HET-XL": "het-xl"}
SHORT = 0.25
"""Of the steps, in the short training."""


def _label(head: str, learned: bool) -> str:
    return f"{head}, learned τ" if learned else f"{head}, τ = 1"


class LearnTau(LineStudy):
    """Three heads with τ = 1 and learned, and HET-XL in a shorter training."""

    name = "learn-tau"
    question = "What is it worth to learn τ with the weights, for each head, and does it depend on how long one trains?"
    paper = ("tab:temp_ablation", "tab:7_90_epoch_learn_tau")
    claim = (
        "learning τ helps all methods in large-scale settings, explains only part of HET-XL's gains, and helps more "
        "the "
        "shorter the training is"
    )
    title = "Learning τ"

    def lines(self, form: Form) -> Sequence[Line]:
        """All heads on all data, then the short training."""
        lines = []
        for bench in form.benches:
            for label, head in HEADS.items():
                lines += [
                    Line(_label(label, learned), head, bench, LEARNED if learned else FIXED, bench.name)
                    for learned in (False, True)
                ]
        lines += [
            Line(_label("HET-XL", learned), "het-xl", form.base, {**options, "scale": SHORT}, _short(form.base))
            for learned, options in ((False, FIXED), (True, LEARNED))
        ]
        return lines

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's two: heads by data, and short against long."""
        names = _data(summary)
        columns = [
            Column(f"{name} {kind.name}", kind.digits, kind.better)
            for name in names
            for kind in (NLL, PRECISION, LEARNED_TAU)
        ]
        rows = []
        for head in HEADS:
            for learned in (False, True):
                label = _label(head, learned)
                cells = []
                for name in names:
                    cells += cells_of(values_of(summary, label, name), (NLL, PRECISION, LEARNED_TAU))
                rows.append(Row(label, cells))
        short = [
            Row(label, cells_of(values_of(summary, label, group), (NLL, PRECISION)), title)
            for group, title in ((names[0], "all steps"), (f"{names[0]}, short", "a quarter of them"))
            for label in (_label("HET-XL", False), _label("HET-XL", True))
        ]
        return [
            Table(self.title, columns, rows),
            Table("Short against long training", (NLL, PRECISION), short, f"HET-XL on {names[0]}"),
        ]

    def conclusion(self, summary: Summary) -> str:
        """What learning is worth to each head, and in a short training."""
        names = _data(summary)

        def worth(head: str, group: str):
            return against(
                values_of(summary, _label(head, True), group), values_of(summary, _label(head, False), group)
            )

        counts = []
        signs: list[int | None] = []
        for head in HEADS:
            tests = [worth(head, name) for name in names]
            signs += [sign(test) for test in tests]
            gained = sum(test is not None and test.difference < 0 for test in tests)
            counts.append(f"{head} on {gained} of {len(names)}")
        long, short = worth("HET-XL", names[0]), worth("HET-XL", f"{names[0]}, short")
        found = False if 1 in signs else True if -1 in signs else None
        more = None if long is None or short is None else short.difference < long.difference
        return (
            f"Learning τ lowers the NLL of {', '.join(counts)} datasets. On {names[0]} HET-XL's NLL with a learned τ "
            "is "
            f"{change(long)}, and after a quarter of the steps {change(short)}: the gain is "
            f"{'not known' if more is None else 'larger' if more else 'not larger'} in the shorter training. "
            f"{holds(found, 'learning τ helps all methods')}"
        )


def _short(bench: Bench) -> str:
    return f"{bench.name}, short"


def _data(summary: Summary) -> list[str]:
    groups = dict.fromkeys(line["group"] for line in summary["lines"])
    return [group for group in groups if not group.endswith(", short")]


STUDY = LearnTau()
