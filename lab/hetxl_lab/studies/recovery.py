"""`hetxl study recovery`: on data drawn from a known HET-XL model, how near does every head come to it?

It measures how much of the gap between DET's test loss and the true model's a head closes, on the same test rows; and
whether its learned noise correlates the same classes as the noise that generated the labels.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetxl._files import read_arrays, write_arrays
from hetxl.functional import correlation
from hetxl.metrics.records import Records
from hetxl.nn import Head, HetXLHead
from hetxl.registry import HEAD_ENTRIES, HEAD_NAMES
from hetxl_lab.presets import PUBLISHED
from hetxl_lab.studies.charts import plot_recovery
from hetxl_lab.studies.study import Lab, Study, Summary, head_run
from hetxl_lab.studies.verdicts import markdown, mean_text
from hetxl_train.comparison import VARIANTS
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data, split_spec
from hetxl_train.data.synthetic import EVALUATED_SAMPLES, FeatureSplit, true_head, true_nll
from hetxl_train.presets import preset_for
from hetxl_train.report.statistics import mean
from hetxl_train.rescale import SCALED, SCALED_XL
from hetxl_train.runs import load_run

NOISY = tuple(entry.name for entry in HEAD_ENTRIES if entry.noise)

EXAMPLES = 300  # number of test examples whose noise is compared
AGREEMENT = {"pearson": 3, "difference": 3, "scale": 2}
"""Measures of agreement between learned and true noise, with the digits that tables show."""
CLASSES = 10
"""Of each of them, the classes that are likeliest under the true model: its loss is about that of 9 equal ones."""

POINTS = "recovery.npz"  # file beside the image, of the correlations that it shows

OPTIONS: dict[str, dict[str, Any]] = {
    "quick": {
        "data": "synthetic:rows=15000,classes=30,features=8",
        "batch_size": 256,
        "train_samples": 32,
        "eval_samples": 256,
        "evaluation_examples": 500,
    },
    "miniature": {
        "data": "synthetic:rows=1200,classes=8,features=5,noise=0.7",
        "epochs": 1.0,
        "batch_size": 64,
        "rank": 2,
        "train_samples": 2,
        "eval_samples": 8,
        "evaluate_every": 10,
    },
}
"""By profile: options of all runs beyond the preset of the data, smaller data among them."""


class Noise(NamedTuple):
    """The noise of some examples, without parts that do not affect their probabilities."""

    correlations: np.ndarray  # [n, k (k − 1) / 2] of the logits of every pair of k classes
    scale: np.ndarray  # [n] standard deviation of the logits, root mean square over the classes


class Recovery(Study):
    """Four heads on data that was drawn from a known HET-XL model."""

    name = "recovery"
    question = "How near do the heads come to the model that their data was drawn from?"
    seed_count = 3

    def check(self, lab: Lab) -> None:
        """Raise if the data has no true model with one label per row."""
        data = {"data": lab.options["data"], **OPTIONS.get(lab.profile.name, {})}["data"]
        name, arguments = split_spec(data)
        if name != "synthetic" or arguments.get("multi_label"):
            raise ValueError(f"data must be synthetic with one label for each row, found {data!r}")

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train the heads, and measure them against the true model; keep the correlations for the image."""
        # Use all test rows, because more rows make the shares less noisy.
        options = {
            **PUBLISHED,
            **preset_for("synthetic"),
            "temperature": "auto",
            "test_examples": 0,
            "data": lab.options["data"],
        }
        options |= {**OPTIONS.get(lab.profile.name, {}), "data_seed": lab.options["data_seed"]}
        config = TrainConfig(**options)
        heads = lab.compare(config, HEAD_NAMES)
        heads = {label: heads[label] for label in labels()}
        summary, points = _measure(lab, config, heads, open_data(config))
        write_arrays(lab.directory / POINTS, points)
        return summary

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw learned against true correlations, and the share of the gap that is closed."""
        points = {}
        if (path.parent / POINTS).exists():  # pages are published without this file
            points = {label: tuple(pair) for label, pair in read_arrays(path.parent / POINTS).items()}
        return plot_recovery(summary, points, path)

    def text(self, summary: Summary) -> str:
        """Return the heads beside the true model, and the image."""
        heads = summary["heads"]
        closed = {label: mean_text(values["gap_closed"], 1, 100) for label, values in heads.items()}
        rows = []
        for label, values in heads.items():
            noise = ["–"] * len(AGREEMENT)
            if "agreement" in values:
                noise = [mean_text(values["agreement"][key], digits) for key, digits in AGREEMENT.items()]
            seconds = f"{mean(values['train_seconds']).value:.0f} s"
            rows.append([label, mean_text(values["nll"]), f"{closed[label]} %", *noise, seconds])
        rows.append(["true model", f"{summary['true_nll']:.3f}", "100 %", "1", "0", "1", "–"])
        header = ["head", "test NLL", "gap closed", "correlation", "difference", "noise", "training"]
        seeds = len(summary["seeds"])
        parts = [
            f"# Recovery of the true model on {summary['data']}",
            f"{summary['num_classes']:,} classes, {summary['training_rows']:,} training rows, {summary['steps']:,} "
            f"steps, {seeds} seed{'' if seeds == 1 else 's'}. HET-XL closes {closed['HET-XL']} % of the gap between "
            f"the test NLL of DET, {mean(heads['DET']['nll']).value:.3f}, and that of the true model, "
            f"{summary['true_nll']:.3f}.",
            markdown(header, rows).rstrip(),
            "Gap closed: the share of the distance from DET to the true model, both on the same "
            f"{summary['test_rows']:,} test rows. The noise is compared among the {summary['classes']} likeliest "
            f"classes of {summary['examples']} of them, without what it adds to all of these alike: Pearson's "
            "correlation between the learned and the true correlations of all pairs, their mean absolute difference, "
            "and the median ratio of the learned to the true standard deviation. ± is the standard error over the "
            "seeds.",
            self.image_link,
        ]
        return "\n\n".join(parts)


def _measure(
    lab: Lab, config: TrainConfig, heads: dict[str, dict[str, Any]], dataset: Dataset
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the summary, and for each head with noise true and learned correlations of the first seed, [2, n]."""
    truth = true_head_of(config)
    directories = {
        (name, seed): lab.cache.directory(head_run(config, name, seed)) for name in HEAD_NAMES for seed in lab.seeds
    }
    rows = Records.load(directories["det", lab.seeds[0]] / "records" / "test.safetensors").rows
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
    points: dict[str, np.ndarray] = {}
    for name in NOISY:
        agreement: dict[str, list[float]] = {measure: [] for measure in AGREEMENT}
        for seed in lab.seeds:
            model = load_run(directories[name, seed]).model
            learned = noise_of(model.head, model.backbone(inputs), classes)
            both = np.stack([true.correlations.ravel(), learned.correlations.ravel()])
            points.setdefault(VARIANTS[name].label, both)
            agreement["pearson"].append(pearson(true.correlations, learned.correlations))
            agreement["difference"].append(float(np.abs(true.correlations - learned.correlations).mean()))
            agreement["scale"].append(float(np.median(learned.scale / true.scale)))
        heads[VARIANTS[name].label]["agreement"] = agreement
    summary = {
        "data": config.data,
        "config": config.to_dict(),
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
    """Return the labels of all heads, in the order of tables."""
    return ["DET", SCALED, *(VARIANTS[name].label for name in NOISY), SCALED_XL]


def true_head_of(config: TrainConfig) -> HetXLHead:
    """Return the model that the data of a configuration was drawn from."""
    options: dict[str, Any] = split_spec(config.data)[1]
    options.pop("rows", None)
    return true_head(**options, seed=config.data_seed)


@torch.no_grad()
def noise_of(head: Head, features: Tensor, classes: Tensor) -> Noise:
    """Return the noise of a head among some classes of each example, without what is common to all of them.

    Adding the same number to all logits changes no probability, so that part of the noise is not learned. With Σ [k, k]
    the covariance of the logits of the k classes and C = I − 1/k the matrix that takes their mean away, it is C Σ C.
    Features are [n, D], ids of classes [n, k].
    """
    count = classes.shape[-1]
    covariance = head.logit_distribution(features).covariance(classes).double()
    centre = torch.eye(count, dtype=torch.float64) - 1 / count
    centred = centre @ covariance @ centre
    first, second = torch.triu_indices(count, count, 1)
    scale = centred.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0).sqrt() / float(head.temperature())
    return Noise(correlation(centred)[:, first, second].numpy(), scale.numpy())


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two arrays of the same shape; 0 where one of them is constant."""
    left, right = first.ravel() - first.mean(), second.ravel() - second.mean()
    length = np.sqrt((left @ left) * (right @ right))
    return float(left @ right / length) if length > 0 else 0.0


STUDIES = (Recovery(),)
