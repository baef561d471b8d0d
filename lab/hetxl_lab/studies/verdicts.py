"""Describe differences and their significance in sentences and tables, and judge the paper's conclusions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetxl_train.formatting import decimal
from hetxl_train.report.statistics import PairedTest, mean, paired_test, two_sided_p
from hetxl_train.report.tables import Value, as_markdown, text_table

Summary = Mapping[str, Any]  # the measurements of a study as JSON values; a page is written from them alone

LEVEL = 0.05  # a difference is significant below this p-value
MARGIN = 0.01  # smaller differences, as a share of the NLL, are treated as none

Values = Mapping[str, Any]  # what `hetxl_lab.studies.runs.over_seeds` gives


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Return t with P(|T| ≤ t) = level for Student's t distribution, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2


def half_width(test: PairedTest) -> float:
    """Return half the 95 % interval of a difference; 0 for a single pair, whose interval is unknown."""
    return 0.0 if test.error is None else test.error * t_quantile(test.pairs - 1)


def against(first: Values | None, second: Values | None, metric: str = "nll") -> PairedTest | None:
    """Return a metric of one row less that of another, paired over the seeds; None where a loss was not finite."""
    if first is None or second is None:
        return None
    return paired_test(first[metric], second[metric])


def sign(test: PairedTest | None) -> int | None:
    """Return −1 or 1 for a significant difference, 0 for any other, None if there is nothing to test."""
    if test is None or test.p is None:
        return None
    if test.p >= LEVEL:
        return 0
    return -1 if test.difference < 0 else 1


def change(test: PairedTest | None, digits: int = 3, factor: float = 1.0, unit: str = "") -> str:
    """Describe a difference in words: "lower by 0.012 ± 0.003 (p = 0.021)"."""
    if test is None:
        return "not known, as a loss did not stay finite"
    size = factor * abs(test.difference)
    if round(size, digits) == 0:
        return "the same"
    word = "lower" if test.difference < 0 else "higher"
    error = "" if test.error is None else f" ± {decimal(factor * test.error, digits)}"
    level = "" if test.p is None else f" (p = {test.p:.3f})" if test.p >= 0.001 else " (p < 0.001)"
    return f"{word} by {decimal(size, digits)}{error}{unit}{level}"


def lower_in(tests: Iterable[PairedTest | None]) -> tuple[int, int, int]:
    """Count the differences that are below zero, significantly below, and significantly above."""
    known = [test for test in tests if test is not None]
    signs = [sign(test) for test in known]
    return sum(test.difference < 0 for test in known), signs.count(-1), signs.count(1)


def holds(verdict: bool | None, claim: str, why: str = "") -> str:
    """Say whether a conclusion of the paper holds; `claim` follows the word "that"; None means undecided."""
    reason = f": {why}" if why else ""
    if verdict is None:
        return f"The numbers here do not decide whether the paper's conclusion holds, that {claim}{reason}."
    return f"The paper's conclusion, that {claim}, {'holds' if verdict else 'does not hold'} here{reason}."


def within() -> str:
    """Return the margin as text, the reason for a conclusion."""
    return f"a difference counts from {MARGIN:.0%} of the NLL on"


def agree(signs: Sequence[int | None], side: int) -> bool | None:
    """Return whether all significant differences have a sign, −1 or 1; None if none is significant."""
    if -side in signs:
        return False
    return True if side in signs else None


def insensitive(tests: Sequence[PairedTest | None], reference: Values | None) -> bool | None:
    """Return whether all differences to the reference are within `MARGIN` of its NLL.

    False if one is significantly larger; None if undecided.
    """
    if reference is None or not tests or None in tests:
        return None
    limit = MARGIN * abs(sum(reference["nll"]) / len(reference["nll"]))
    large = [test for test in tests if test is not None and abs(test.difference) > limit]
    if not large:
        return True
    return False if any(sign(test) not in (0, None) for test in large) else None


def same(tests: Sequence[PairedTest | None], margin: float) -> bool | None:
    """Return whether the 95 % intervals of all differences are within a margin, in the units of the metric.

    False if one is significant and larger than the margin; else None.
    """
    known = [test for test in tests if test is not None]
    if any(abs(test.difference) > margin and sign(test) in (-1, 1) for test in known):
        return False
    if not known or len(known) < len(tests) or any(test.error is None for test in known):
        return None
    return True if all(abs(test.difference) + half_width(test) <= margin for test in known) else None


BASELINE = "DET"
WORSE = 0.05  # a difference against us is significant below this p-value
BETTER = 0.01  # a difference for us only below this one


@dataclass(frozen=True)
class Verdict:
    """A comparison of a head with DET in one setting."""

    setting: str
    nll: PairedTest  # difference over the seeds; below 0 is better
    precision: PairedTest  # difference of precision@1; above 0 is better

    @property
    def better(self) -> bool:
        """Return whether the NLL is significantly lower."""
        return self.nll.difference < 0 and self.nll.p is not None and self.nll.p < BETTER

    @property
    def worse(self) -> bool:
        """Return whether the NLL is significantly higher."""
        return self.nll.difference > 0 and self.nll.p is not None and self.nll.p < WORSE

    @property
    def less_precise(self) -> bool:
        """Return whether precision@1 is significantly lower."""
        return self.precision.difference < 0 and self.precision.p is not None and self.precision.p < WORSE


def judge(summary: Summary, head: str = "HET-XL", baseline: str = BASELINE) -> Verdict:
    """Compare two heads in one setting over the seeds that both have."""
    ours, theirs = (summary["heads"].get(label, {"seeds": ()}) for label in (head, baseline))
    seeds = sorted(set(ours["seeds"]) & set(theirs["seeds"]))
    if not seeds:
        raise ValueError(f"summary of {summary['setting']} has no seed of both {head} and {baseline}")

    def test(metric: str) -> PairedTest:
        return paired_test(*([row[metric][row["seeds"].index(seed)] for seed in seeds] for row in (ours, theirs)))

    return Verdict(summary["setting"], test("nll"), test("precision@1"))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts, which may hold markdown themselves."""
    return as_markdown(text_table("", header, rows), escape=False)


def verdict_table(summaries: Sequence[Summary], head: str = "HET-XL", baseline: str = BASELINE) -> str:
    """Return the comparison of two heads in every setting, in markdown."""
    names = [f"{_head_name(label)}'s NLL" for label in (baseline, head)]
    rows = []
    for summary in summaries:
        verdict, heads = judge(summary, head, baseline), summary["heads"]
        word = "better" if verdict.better else "worse" if verdict.worse else "tie"
        losses = [mean_text(heads[label]["nll"]) for label in (baseline, head)]
        precision = [f"{difference_text(verdict.precision, 2, 100)} %", p_text(verdict.precision.p)]
        tests = [difference_text(verdict.nll, 3), p_text(verdict.nll.p), *precision]
        word += ", less precise" if verdict.less_precise else ""
        rows.append([summary["setting"], f"{summary['num_classes']:,}", *losses, *tests, word])
    return markdown(["setting", "K", *names, "difference", "p", "precision@1", "p", ""], rows)


def _head_name(label: str) -> str:
    """Return the head of a label such as "DET, equal time" or "HET-XL + scaling"."""
    return label.split(",")[0].split(" +")[0]


def heads_table(summary: Summary) -> str:
    """Return all heads of one setting in markdown; times are multiples of DET's."""
    rows = []
    for label, values in summary["heads"].items():
        temperature = f"{mean(values['temperature']).value:.2f}" if "temperature" in values else "–"
        if any(scale != 1 for scale in values.get("noise_scale", ())):
            temperature += f", noise × {mean(values['noise_scale']).value:.2f}"
        test = ["–", "–"]
        # An ensemble of all seeds has a single value, so there are no pairs to test.
        if label != BASELINE and BASELINE in summary["heads"] and not _is_ensemble(values):
            nll = judge(summary, label).nll
            test = [difference_text(nll, 3), p_text(nll.p)]
        shares = [f"{mean_text(values[metric], 2, 100)} %" for metric in ("precision@1", "calibration_error")]
        others = [mean_text(values["brier"]), temperature, cost_text(summary, label)]
        rows.append([label, mean_text(values["nll"]), *test, *shares, *others])
    measures = ["precision@1", "calibration error", "Brier", "τ", "time"]
    return markdown(["head", "NLL", "less that of DET", "p", *measures], rows)


def cost_text(summary: Summary, label: str) -> str:
    """Return the training time relative to DET's: steps times the time of a step."""
    values = summary["heads"][label]
    if _is_ensemble(values):
        return f"{len(values['seeds'])}×"
    head = _head_name(label).lower()
    if head not in summary.get("pace", ()):
        return "–"
    return f"{summary['pace'][head] * values['steps'] / summary['steps']:.1f}×"


def _is_ensemble(values: Mapping[str, Any]) -> bool:
    """Return whether a single value represents all seeds."""
    return len(values["nll"]) < len(values["seeds"])


def count_verdicts(summaries: Sequence[Summary], head: str = "HET-XL", baseline: str = BASELINE) -> str:
    """Return one sentence about all settings."""
    verdicts = [judge(summary, head, baseline) for summary in summaries]
    better, worse = sum(verdict.better for verdict in verdicts), sum(verdict.worse for verdict in verdicts)
    imprecise = sum(verdict.less_precise for verdict in verdicts)
    return (
        f"{head} against {baseline.split(',')[0]} in {len(verdicts)} settings: NLL significantly better "
        f"(p < {BETTER:g}) in {better}, significantly worse (p < {WORSE:g}) in {worse}; precision@1 significantly "
        f"worse in {imprecise}."
    )


def mean_cell(values: Sequence[float] | None, factor: float = 1.0) -> Value:
    """Return the cell of values over seeds: mean and standard error; the value of a single seed; empty for none."""
    if not values:
        return None
    average = mean([factor * value for value in values])
    return average.value if average.error is None else (average.value, average.error)


def mean_text(values: Sequence[float], digits: int = 3, factor: float = 1) -> str:
    """Return mean ± standard error of values multiplied by a factor."""
    average = mean([factor * value for value in values])
    error = "" if average.error is None else f" ± {average.error:.{digits}f}"
    return f"{average.value:.{digits}f}{error}".replace("-", "−")


def difference_text(test: PairedTest, digits: int, factor: float = 1) -> str:
    """Return a difference with its sign ± its standard error."""
    error = "" if test.error is None else f" ± {factor * test.error:.{digits}f}"
    return f"{factor * test.difference:+.{digits}f}{error}".replace("-", "−")


def p_text(p: float | None) -> str:
    """Return a p-value as text; a dash for None."""
    if p is None:
        return "–"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"
