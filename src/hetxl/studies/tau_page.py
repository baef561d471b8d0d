"""The study of τ as a page: our tables beside the paper's, and which of its conclusions hold here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetxl.report.statistics import PairedTest, mean, paired_test
from hetxl.studies.paper import paper_table
from hetxl.studies.plot import plot_groups
from hetxl.studies.summary import difference_text, mean_text, p_text


class Paper(NamedTuple):
    """A row of the paper's table: NLL and precision@1, each with its standard error."""

    nll: float
    nll_error: float
    precision: float
    precision_error: float


def _paper() -> dict[str, Paper]:
    """The rows of Table "app_tuning_tau" by our labels: ResNet50x2 on ImageNet-21k, 7 passes."""
    found = {}
    for row in paper_table("tab:app_tuning_tau").rows:
        label = row.name.replace("%)", " %)").replace(" (as in HET-XL)", "")
        found[label] = Paper(*(number for cell in row.cells if isinstance(cell, tuple) for number in cell))
    return found


PAPER = _paper()
"""In its order."""
PICTURE = "tau.svg"
OURS = ("Simple training, τ ten times slower", "Fitted afterwards", "τ = 1")
"""Rows that the paper does not have."""
MAIN = ("Grid search", "Bayesian optimization", "Luketina et al.", "Simple training")
"""Those of its first table (Table "tuning_tau")."""
NEEDS_NO_VALIDATION = ("12.5 %", "25.0 %", "Simple training", "τ = 1")
SIGNIFICANT = 0.05


def single_training(label: str) -> bool:
    """Whether a method trains once."""
    return not label.startswith(("Grid", "Bayesian"))


def no_validation(label: str) -> bool:
    """Whether a method needs no validation rows."""
    return any(part in label for part in NEEDS_NO_VALIDATION)


def table(methods: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Our numbers and the paper's, in markdown.

    Args:
        methods: of one setting, by label.
        labels: rows, those that were not run are left out.
    """
    lines = [
        "| method | NLL | precision@1 | single training? | no validation set needed? | τ | training | paper: NLL | "
        "paper: precision@1 |",
        "| --- | ---: | ---: | :---: | :---: | ---: | ---: | ---: | ---: |",
    ]
    for label in labels:
        if label not in methods:
            continue
        values, paper = methods[label], PAPER.get(label)
        theirs = "– | –"
        if paper is not None:
            theirs = f"{paper.nll:.2f} ± {paper.nll_error:.2f} | {paper.precision:.3f} ± {paper.precision_error:.3f}"
        lines.append(
            f"| {label} | {mean_text(values['nll'])} | {mean_text(values['precision@1'])} | "
            f"{_mark(single_training(label))} | {_mark(no_validation(label))} | "
            f"{mean_text(values['temperature'], 2)} | {mean(values['seconds']).value:.0f} s | {theirs} |"
        )
    return "\n".join(lines) + "\n"


def _mark(yes: bool) -> str:
    return "✓" if yes else "×"


class Claim(NamedTuple):
    """A conclusion of the paper: that of two methods the first has no higher NLL, or a higher one.

    Attributes:
        told: in its words, shortened.
        first: a method.
        second: another.
        worse: whether the paper finds the first worse; otherwise that it is no worse.
    """

    told: str
    first: str
    second: str
    worse: bool = False


CLAIMS = (
    Claim("Simple training costs nothing against grid search", "Simple training", "Grid search"),
    Claim("Simple training costs nothing against Bayesian optimization", "Simple training", "Bayesian optimization"),
    Claim("Simple training costs nothing against Luketina et al.", "Simple training", "Luketina et al."),
    Claim("Choosing on the test split (grid) gains nothing", "Grid search", "Grid search (2 folds)"),
    Claim("Choosing on the test split (Bayes) gains nothing", "Bayesian optimization",
          "Bayesian optimization (2 folds)"),
    Claim("Training once more on all rows (grid) does not help", "Grid search", "Grid search (+ retrain)"),
    Claim("Training once more on all rows (Bayes) does not help", "Bayesian optimization",
          "Bayesian optimization (+ retrain)"),
    Claim("The simple gradient is worse than Luketina et al.", "Simple gradient (val)", "Luketina et al.", True),
    Claim("Luketina et al. suffers from a held-out share of the batch", "Luketina et al. (25.0 %)", "Luketina et al.",
          True),
    Claim("and is then worse than the simple gradient", "Luketina et al. (25.0 %)", "Simple gradient (25.0 %)", True),
)  # fmt: skip


def compared(methods: Mapping[str, Mapping[str, Any]], first: str, second: str) -> PairedTest | None:
    """NLL of one method less that of another over the seeds that both have; None without any."""
    if first not in methods or second not in methods:
        return None
    one, other = (dict(zip(methods[name]["seeds"], methods[name]["nll"], strict=True)) for name in (first, second))
    seeds = sorted(set(one) & set(other))
    return paired_test([one[seed] for seed in seeds], [other[seed] for seed in seeds]) if seeds else None


def holds(claim: Claim, test: PairedTest) -> str:
    """Whether a difference bears out a claim, in a word or two."""
    sure = test.p is not None and test.p < SIGNIFICANT
    if claim.worse:
        return "holds" if sure and test.difference > 0 else "the contrary" if sure else "not seen"
    if not sure:
        return "no difference seen"
    return "does not hold" if test.difference > 0 else "holds, and better"


def claims_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Every conclusion in every setting, in markdown."""
    names = [str(setting["setting"]) for setting in settings]
    lines = [f"| the paper | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for claim in CLAIMS:
        cells = []
        for setting in settings:
            test = compared(setting["methods"], claim.first, claim.second)
            cells.append("–" if test is None else f"{holds(claim, test)}: {difference_text(test, 3)}, p {p_text(test)}")
        lines.append(f"| {claim.told} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


SEARCHES = ("Grid search", "Bayesian optimization")
ONCE = ("Luketina et al.", "Simple gradient (val)", "Simple training", *OURS)
"""Ways with one training that `hetxl tune` has as they are, of which a user will ask which to take."""


def conclusion(setting: Mapping[str, Any]) -> str:
    """What a setting says, in a few sentences."""
    methods = setting["methods"]
    told = [f"**{setting['setting']}.** {setting['told']}"]
    known = {label: mean(methods[label]["nll"]).value for label in (*SEARCHES, *ONCE) if label in methods}
    search = min((label for label in SEARCHES if label in known), key=known.__getitem__, default=None)
    test = None if search is None else compared(methods, "Simple training", search)
    if search is not None and test is not None:
        verdict = {
            "does not hold": "the paper's conclusion, that learning τ with the rest costs nothing, does not hold",
            "holds, and better": "the paper's conclusion, that learning τ with the rest costs nothing, holds: it gains",
            "no difference seen": "as in the paper no difference is seen",
        }[holds(CLAIMS[0], test)]
        ends = [mean_text(methods[label]["temperature"], 2) for label in ("Simple training", search)]
        told.append(
            f"τ learned with the rest ends at {ends[0]}, with an NLL of {known['Simple training']:.3f}; the better "
            f"search, {search.replace('Grid', 'grid')}, chooses {ends[1]}, with {known[search]:.3f} after "
            f"{mean(methods[search]['trainings']).value:.0f} trainings: {verdict} ({difference_text(test, 3)}, "
            f"p {p_text(test)})."
        )
    once = sorted((label for label in ONCE if label in known), key=known.__getitem__)
    if len(once) > 1:
        told.append(
            f"Of the ways with one training, the best first: {'; '.join(_against_one(methods, x) for x in once)}."
        )
    return " ".join(told)


def _against_one(methods: Mapping[str, Mapping[str, Any]], label: str) -> str:
    """A method with its NLL less that of τ = 1."""
    test = compared(methods, label, "τ = 1") if label != "τ = 1" else None
    return label if test is None else f"{label} ({difference_text(test, 3)}, p {p_text(test)})"


def plot(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw the NLL of every method less that of τ = 1, with 95 % intervals.

    Args:
        summary: of the study.
        path: of the picture; its ending says which kind.
    """
    groups = []
    for setting in summary["settings"]:
        methods = setting["methods"]
        tests = ((label, compared(methods, label, "τ = 1")) for label in (*PAPER, *OURS) if label != "τ = 1")
        groups.append((str(setting["setting"]), [(label, test) for label, test in tests if test is not None]))
    return plot_groups(groups, path, "test NLL less that of τ = 1, with 95 % intervals: left is better")


def page(summary: Mapping[str, Any]) -> str:
    """The study in markdown."""
    settings, seeds = summary["settings"], len(summary["seeds"])
    parts = [
        f"# Choosing τ of {str(summary['head']).upper()}",
        "",
        f"Means ± standard errors over {seeds} {'replication' if seeds == 1 else 'replications'}, on the test split. "
        "The paper's columns are of a ResNet50x2 on ImageNet-21k, 7 passes, HET-XL. `training` is the time of all "
        "trainings that a method takes, in seconds of one worker.",
        "",
        *(part for setting in settings for part in (conclusion(setting), "")),
        f"![NLL of every way less that of τ = 1]({PICTURE})",
        "",
    ]
    for setting in settings:
        methods = setting["methods"]
        parts += [
            f"## {setting['setting']}",
            "",
            f"{setting['told']} {setting['num_classes']:,} classes, {setting['training_rows']:,} training rows, "
            f"{setting['steps']:,} steps of {setting['batch_size']:,}.",
            "",
        ]
        if any(label in methods for label in SEARCHES):
            parts += ['The first table of the paper ("tuning_tau"):', "", table(methods, MAIN)]
            parts += ['The second ("app_tuning_tau"), and three rows of our own:', ""]
        parts.append(table(methods, (*PAPER, *OURS)))
    parts += [
        "## Which conclusions of the paper hold here",
        "",
        "Differences of NLL, paired over the replications; a difference counts below p = 0.05. With three replications "
        "only large ones do.",
        "",
        claims_table([setting for setting in settings if SEARCHES[0] in setting["methods"]]),
        "“2 folds” chooses on the test split among the trainings of the same search: for the paper's check only.",
        "",
    ]
    return "\n".join(parts)
