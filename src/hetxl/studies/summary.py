"""What the summaries of a study say: differences to DET with their tests, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetxl.report.statistics import PairedTest, mean, paired_test

BASELINE = "DET"
WORSE = 0.05
"""A difference against us counts below this p-value."""
BETTER = 0.01
"""One for us counts only below this one."""

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A head against DET in one setting.

    Attributes:
        setting: its name.
        nll: difference of test NLL over the seeds; below 0 is better.
        precision: difference of precision@1; above 0 is better.
    """

    setting: str
    nll: PairedTest
    precision: PairedTest

    @property
    def better(self) -> bool:
        """Significantly lower NLL."""
        return self.nll.difference < 0 and self.nll.p is not None and self.nll.p < BETTER

    @property
    def worse(self) -> bool:
        """Significantly higher NLL."""
        return self.nll.difference > 0 and self.nll.p is not None and self.nll.p < WORSE

    @property
    def less_precise(self) -> bool:
        """Significantly lower precision@1."""
        return self.precision.difference < 0 and self.precision.p is not None and self.precision.p < WORSE


def judge(summary: Summary, head: str = "HET-XL", baseline: str = BASELINE) -> Verdict:
    """A head against another in the setting of a summary, over the seeds that both have."""
    ours, theirs = (_by_seed(summary, label) for label in (head, baseline))
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise ValueError(f"summary of {summary['setting']} has no seed of both {head} and {baseline}")

    def test(metric: str) -> PairedTest:
        return paired_test([ours[seed][metric] for seed in seeds], [theirs[seed][metric] for seed in seeds])

    return Verdict(summary["setting"], test("nll"), test("precision@1"))


def _by_seed(summary: Summary, label: str) -> dict[int, dict[str, float]]:
    values = summary["heads"].get(label)
    if values is None:
        return {}
    return {
        seed: {metric: values[metric][place] for metric in ("nll", "precision@1")}
        for place, seed in enumerate(values["seeds"])
    }


def verdict_table(summaries: Sequence[Summary], head: str = "HET-XL", baseline: str = BASELINE) -> str:
    """A head against another in every setting, in markdown."""
    names = (label.split(",")[0].split(" +")[0] for label in (baseline, head))
    lines = [
        f"| setting | K | {next(names)}'s NLL | {next(names)}'s NLL | difference | p | precision@1 | p | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for summary in summaries:
        verdict = judge(summary, head, baseline)
        heads = summary["heads"]
        word = "better" if verdict.better else "worse" if verdict.worse else "tie"
        if verdict.less_precise:
            word += ", less precise"
        lines.append(
            f"| {summary['setting']} | {summary['num_classes']:,} | {mean_text(heads[baseline]['nll'])} | "
            f"{mean_text(heads[head]['nll'])} | {difference_text(verdict.nll, 3)} | {p_text(verdict.nll)} | "
            f"{difference_text(verdict.precision, 2, 100)} % | {p_text(verdict.precision)} | {word} |"
        )
    return "\n".join(lines) + "\n"


def heads_table(summary: Summary) -> str:
    """All heads of one setting, in markdown; the time of a training is a multiple of DET's."""
    lines = [
        "| head | NLL | less that of DET | p | precision@1 | calibration error | Brier | τ | time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label, values in summary["heads"].items():
        temperature = f"{mean(values['temperature']).value:.2f}" if "temperature" in values else "–"
        if any(scale != 1 for scale in values.get("noise_scale", ())):
            temperature += f", noise × {mean(values['noise_scale']).value:.2f}"
        lines.append(
            f"| {label} | {mean_text(values['nll'])} | {_against(summary, label)} | "
            f"{mean_text(values['precision@1'], 2, 100)} % | "
            f"{mean_text(values['calibration_error'], 2, 100)} % | {mean_text(values['brier'])} | {temperature} | "
            f"{cost_text(summary, label)} |"
        )
    return "\n".join(lines) + "\n"


def _against(summary: Summary, label: str) -> str:
    """Two cells: NLL less that of DET with its p-value. An ensemble of all seeds has no seeds to pair."""
    values = summary["heads"][label]
    if label == BASELINE or BASELINE not in summary["heads"] or _is_ensemble(values):
        return "– | –"
    test = judge(summary, label).nll
    return f"{difference_text(test, 3)} | {p_text(test)}"


def cost_text(summary: Summary, label: str) -> str:
    """The time that a training takes over that of DET: its steps, each at the pace of its head."""
    values = summary["heads"][label]
    if _is_ensemble(values):
        return f"{len(values['seeds'])}×"
    head = label.split(",")[0].split(" +")[0].lower()  # "DET, as much time …", "HET-XL + scaling"
    if head not in summary.get("pace", ()):
        return "–"
    return f"{summary['pace'][head] * values['steps'] / summary['steps']:.1f}×"


def _is_ensemble(values: Mapping[str, Any]) -> bool:
    """Whether a single value stands for all seeds."""
    return len(values["nll"]) < len(values["seeds"])


def count_verdicts(summaries: Sequence[Summary], head: str = "HET-XL", baseline: str = BASELINE) -> str:
    """One sentence on all settings."""
    verdicts = [judge(summary, head, baseline) for summary in summaries]
    better, worse = sum(one.better for one in verdicts), sum(one.worse for one in verdicts)
    imprecise = sum(one.less_precise for one in verdicts)
    return (
        f"{head} against {baseline.split(',')[0]} in {len(verdicts)} settings: NLL significantly better "
        f"(p < {BETTER:g}) in {better}, significantly worse (p < {WORSE:g}) in {worse}; precision@1 significantly "
        f"worse in {imprecise}."
    )


def mean_text(values: Sequence[float], digits: int = 3, factor: float = 1) -> str:
    """Mean ± standard error of values, each times a factor."""
    found = mean([factor * value for value in values])
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}".replace("-", "−")


def difference_text(test: PairedTest, digits: int, factor: float = 1) -> str:
    """A difference ± its standard error, with its sign."""
    error = "" if test.error is None else f" ± {factor * test.error:.{digits}f}"
    return f"{factor * test.difference:+.{digits}f}{error}".replace("-", "−")


def p_text(test: PairedTest) -> str:
    """Its p-value."""
    if test.p is None:
        return "–"
    return f"{test.p:.3f}" if test.p >= 0.001 else "< 0.001"
