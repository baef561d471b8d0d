"""`hetxl study learn-tau`: what is it worth to learn τ (Tables "Ablation on the effect of learning τ")?"""

from collections.abc import Sequence

from hetxl.report.statistics import PairedTest
from hetxl.studies.forms import FIXED, LEARNED, Form
from hetxl.studies.lines import LEARNED_TAU, NLL, PRECISION, Line, LineStudy, cells_of, values_of
from hetxl.studies.study import Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, agree, change, holds, sign

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
            Line(_label("HET-XL", learned), "het-xl", form.base, {**options, "scale": SHORT}, _short_of(form.base.name))
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
            for group, title in ((names[0], "all steps"), (_short_of(names[0]), "a quarter of them"))
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
        long, short = worth("HET-XL", names[0]), worth("HET-XL", _short_of(names[0]))
        found = False if 1 in signs else True if -1 in signs else None
        heads = [_against_det(summary, name) for name in names]
        told = ", ".join(f"{change(test)} on {name}" for test, name in zip(heads, names, strict=True))
        return (
            f"Learning τ lowers the NLL of {', '.join(counts)} datasets. "
            f"{holds(found, 'learning τ helps all methods')} "
            f"With τ learned for both, HET-XL's NLL compared with DET's is {told}. "
            f"{holds(agree([sign(test) for test in heads], -1), 'learning τ explains only part of its gains')} "
            f"On {names[0]} HET-XL's NLL with a learned τ is {change(long)}, and after a quarter of the steps "
            f"{change(short)}: {_compared(long, short)}."
        )


def _against_det(summary: Summary, name: str) -> PairedTest | None:
    """HET-XL against DET, τ learned for both."""
    xl, det = (values_of(summary, _label(head, True), name) for head in ("HET-XL", "DET"))
    return against(xl, det)


def _compared(long: PairedTest | None, short: PairedTest | None) -> str:
    """What learning τ gains in a short training, beside what it gains in a long one."""
    if long is None or short is None:
        return "whether the gain is larger in the shorter training is not known"
    if min(long.difference, short.difference) >= 0:
        return "no gain in either"
    return f"the gain is {'larger' if short.difference < long.difference else 'not larger'} in the shorter training"


def _short_of(name: str) -> str:
    return f"{name}, short"


def _data(summary: Summary) -> list[str]:
    groups = dict.fromkeys(line["group"] for line in summary["lines"])
    return [group for group in groups if not group.endswith(", short")]


STUDY = LearnTau()
