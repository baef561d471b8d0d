"""`hetxl study recovery`: on data drawn from a known HET-XL model, how near does every head come to it?

Two answers. How much of the distance between DET's test loss and that of the true model a head closes, on the same test
rows; and whether the noise that it learned ties the same classes together as the noise that made the labels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetxl.data.dataset import Dataset
from hetxl.data.spec import split_spec
from hetxl.data.synthetic import EVALUATED_SAMPLES, FeatureSplit, true_head, true_nll
from hetxl.evaluation.records import Records
from hetxl.functional import correlation
from hetxl.nn import Head, HetXLHead
from hetxl.report.statistics import mean
from hetxl.studies.plot import new_figure
from hetxl.studies.recovery_plot import plot_recovery
from hetxl.studies.runs import by_label, results_in
from hetxl.studies.summary import Summary, mean_text
from hetxl.training.compare import VARIANTS, compare
from hetxl.training.config import TrainConfig
from hetxl.training.files import write_bytes, write_json
from hetxl.training.parallel import check_jobs, default_jobs
from hetxl.training.presets import preset_for
from hetxl.training.progress import Narrator
from hetxl.training.rescale import SCALED, SCALED_XL
from hetxl.training.run import load_run
from hetxl.training.train import open_data

HEADS = ("det", "het", "het-h", "het-xl")
NOISY = ("het", "het-h", "het-xl")

EXAMPLES = 300
"""Test examples whose noise is looked at."""
CLASSES = 10
"""Of each of them, the classes that are likeliest under the true model: its loss is about that of 9 equal ones."""

QUICK: dict[str, Any] = {
    "data": "synthetic:rows=15000,classes=30,features=8",
    "batch_size": 256,
    "train_samples": 32,
    "eval_samples": 256,
    "evaluation_examples": 500,
}
"""Smaller data that needs less than a minute."""


class Noise(NamedTuple):
    """The noise of some examples, as far as it matters to their probabilities.

    Attributes:
        correlations: [n, k (k − 1) / 2] of the logits of every pair of k classes.
        scale: [n] standard deviation of the logits, their root mean square over the classes.
    """

    correlations: np.ndarray
    scale: np.ndarray


def study(
    data: str = "synthetic",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("runs/study-recovery"),
    quick: bool = False,
    options: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Train the heads, measure them against the true model, and write tables and a picture; what is finished is kept.

    Args:
        data: "synthetic", with options behind it or not.
        seeds: of the runs.
        out: directory.
        quick: the smaller data of `QUICK` instead.
        options: of all trainings, beyond the preset of the data.
        jobs: trainings at a time, one thread each; one a core without.
        narrator: tells how far it is.

    Returns:
        summary.json; study.md and recovery.png are beside it.
    """
    new_figure(1, 1)  # whether there is matplotlib is better known now
    check_jobs(jobs)
    given = {"data": data, **(QUICK if quick else {}), **(options or {})}
    name, arguments = split_spec(given["data"])
    if name != "synthetic" or arguments.get("multi_label"):
        raise ValueError(f"data must be synthetic with one label for each row, found {given['data']!r}")
    narrator = narrator or Narrator()
    # All test rows: the more there are, the less the shares depend on which.
    config = TrainConfig(**{**preset_for("synthetic"), "test_examples": 0, **given, "out": str(out / "compare")})
    compared = compare(config, heads=HEADS, seeds=tuple(seeds), jobs=jobs or default_jobs(), narrator=narrator)
    dataset = open_data(config)
    summary, points = _measure(config, compared, seeds, dataset)
    write_json(out / "summary.json", summary)
    write_bytes(out / "study.md", page(summary).encode())
    plot_recovery(summary, points, out / "recovery.png")
    return out / "summary.json"


def _measure(
    config: TrainConfig, compared: Path, seeds: Sequence[int], dataset: Dataset
) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The summary, and for each head with noise the true and the learned correlations of the first seed."""
    truth = true_head_of(config)
    results = results_in(compared / "runs")
    heads = by_label({name: results[name] for name in results if results[name]["seed"] in seeds}, labels())
    rows = Records.load(compared / "runs" / f"det-seed{seeds[0]}" / "records" / "test.safetensors").rows
    test: Any = dataset.splits["test"]
    evaluated = FeatureSplit(test.features[torch.from_numpy(rows)], test.labels.subset(rows))
    best = true_nll(truth, evaluated, rows=len(rows), samples=EVALUATED_SAMPLES, seed=config.data_seed)
    for values in heads.values():
        values["gap_closed"] = [
            (det - nll) / (det - best) for det, nll in zip(heads["DET"]["nll"], values["nll"], strict=True)
        ]
    inputs = evaluated.features[:EXAMPLES]
    generator = torch.Generator().manual_seed(config.data_seed)
    classes = truth.predict(inputs, top_k=min(CLASSES, dataset.num_classes), generator=generator).classes
    true = noise_of(truth, inputs, classes)
    points: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in NOISY:
        agreement: dict[str, list[float]] = {"pearson": [], "difference": [], "scale": []}
        for seed in seeds:
            model = load_run(compared / "runs" / f"{name}-seed{seed}").model
            learned = noise_of(model.head, model.backbone(inputs), classes)
            points.setdefault(VARIANTS[name].label, (true.correlations.ravel(), learned.correlations.ravel()))
            agreement["pearson"].append(pearson(true.correlations, learned.correlations))
            agreement["difference"].append(float(np.abs(true.correlations - learned.correlations).mean()))
            agreement["scale"].append(float(np.median(learned.scale / true.scale)))
        heads[VARIANTS[name].label]["agreement"] = agreement
    summary = {
        "data": config.data,
        "config": config.to_dict(),
        "seeds": list(seeds),
        "num_classes": dataset.num_classes,
        "training_rows": len(dataset.splits["train"]),
        "test_rows": len(rows),
        "steps": heads["DET"]["steps"],
        "true_nll": best,
        "examples": len(inputs),
        "classes": classes.shape[-1],
        "heads": heads,
    }
    return summary, points


def labels() -> list[str]:
    """How tables call what takes part, in their order."""
    return ["DET", SCALED, *(VARIANTS[name].label for name in NOISY), SCALED_XL]


def true_head_of(config: TrainConfig) -> HetXLHead:
    """The model that the data of a configuration was drawn from."""
    options: dict[str, Any] = split_spec(config.data)[1]
    options.pop("rows", None)
    return true_head(**options, seed=config.data_seed)


@torch.no_grad()
def noise_of(head: Head, features: Tensor, classes: Tensor) -> Noise:
    """The noise of a head among some classes of each example, without what is common to all of them.

    Adding the same number to all logits changes no probability, so that part of the noise is not learned. With Σ [k, k]
    the covariance of the logits of the k classes and C = I − 1/k the matrix that takes their mean away, it is C Σ C.

    Args:
        head: with noise.
        features: [n, D]
        classes: [n, k] ids.
    """
    count = classes.shape[-1]
    covariance = head.logit_distribution(features).covariance(classes).double()
    centre = torch.eye(count, dtype=torch.float64) - 1 / count
    centred = centre @ covariance @ centre
    first, second = torch.triu_indices(count, count, 1)
    scale = centred.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0).sqrt() / float(head.temperature())
    return Noise(correlation(centred)[:, first, second].numpy(), scale.numpy())


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two arrays of the same shape; 0 where one of them is constant."""
    one, other = first.ravel() - first.mean(), second.ravel() - second.mean()
    length = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / length) if length > 0 else 0.0


def page(summary: Summary) -> str:
    """The summary in markdown."""
    heads = summary["heads"]
    closed = {label: mean_text(values["gap_closed"], 1, 100) for label, values in heads.items()}
    lines = [
        f"# Recovery of the true model on {summary['data']}",
        "",
        f"{summary['num_classes']:,} classes, {summary['training_rows']:,} training rows, {summary['steps']:,} steps, "
        f"{_count(len(summary['seeds']), 'seed')}. HET-XL closes {closed['HET-XL']} % of the gap between the test NLL "
        f"of DET, {mean(heads['DET']['nll']).value:.3f}, and that of the true model, {summary['true_nll']:.3f}.",
        "",
        "| head | test NLL | gap closed | correlation | difference | noise | training |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label, values in heads.items():
        found = values.get("agreement")
        noise = "– | – | –"
        if found is not None:
            noise = f"{mean_text(found['pearson'])} | {mean_text(found['difference'])} | {mean_text(found['scale'], 2)}"
        seconds = mean(values["train_seconds"]).value
        lines.append(f"| {label} | {mean_text(values['nll'])} | {closed[label]} % | {noise} | {seconds:.0f} s |")
    lines += [
        f"| true model | {summary['true_nll']:.3f} | 100 % | 1 | 0 | 1 | – |",
        "",
        f"Gap closed: the share of the distance from DET to the true model, both on the same {summary['test_rows']:,} "
        f"test rows. The noise is compared among the {summary['classes']} likeliest classes of {summary['examples']} "
        "of them, without what it adds to all of these alike: Pearson's correlation between the learned and the true "
        "correlations of all pairs, their mean absolute difference, and the median ratio of the learned to the true "
        "standard deviation. ± is the standard error over the seeds.",
        "",
    ]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
