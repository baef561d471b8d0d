"""`hetxl study noise-only`: adding noise to a trained classifier, compared with other ways to recalibrate it.

A DET is trained on labels of which some are flipped. Held-out rows with such labels fit a temperature, a vector or a
matrix of scales, or noise with unchanged mean logits; test rows with such labels give the losses. Prediction sets are
calibrated on half of the test rows and measured on the other half.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl import HetXLHead
from hetxl.metrics import (
    ScoreOptions,
    calibrate,
    fit_noise,
    fit_temperature,
    label_scores,
)
from hetxl.metrics.noise_fit import CHOICES, NOISE_RANK
from hetxl.optim import DEFAULTS
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.label_audit import classifier, measure_settings, title
from hetxl_lab.studies.small_data import Arrays
from hetxl_lab.studies.study import Lab, Study
from hetxl_lab.studies.verdicts import Summary, markdown
from hetxl_train.formatting import decimal
from hetxl_train.report.statistics import PairedTest, mean, paired_test

TRAIN, HELD_OUT = 0.5, 0.2  # shares of the rows; the rest are test rows
COVERAGE = 0.9
STEPS = {"full": DEFAULTS["head"].steps, "quick": 100, "miniature": 40}
"""Of a run by profile: as many as by default, since the time of the noise is compared with that of a trained DET."""
EQUAL = 5e-5
"""Difference of two NLLs that are the same in the table's four digits."""
SCALED, NOISE, START = "temperature", "noise-only", "HET-XL from the start"
METHODS = ("DET", SCALED, "vector", "matrix", NOISE, START)


def scaled_logits(logits: Tensor, labels: Tensor, matrix: bool) -> Callable[[Tensor], Tensor]:
    """Return vector or matrix scaling (Guo et al.), fitted to logits [n, K] and labels [n] by L-BFGS."""
    size = logits.shape[1]
    factor = (torch.eye(size) if matrix else torch.ones(size)).requires_grad_()
    shift = torch.zeros(size, requires_grad=True)
    optimizer = torch.optim.LBFGS([factor, shift], max_iter=100, line_search_fn="strong_wolfe")

    def apply(values: Tensor) -> Tensor:
        return (values @ factor if matrix else values * factor) + shift

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(apply(logits), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return lambda values: apply(values).detach()


def measure_setting(data: Arrays, kind: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return test losses by method, times, and coverage and size of prediction sets."""
    rows = np.random.default_rng(seed).permutation(len(data.labels))
    data = data.take(rows)
    observed = data.flipped(kind, rate, seed)
    first, second = int(TRAIN * len(rows)), int((TRAIN + HELD_OUT) * len(rows))
    held_out, test = slice(first, second), slice(second, None)
    begin = time.process_time()
    # Use the plain loss: a loss with ε gives logits for right labels, which do not predict noisy ones.
    det = classifier("det", first, steps, seed).set_params(flip_rate=0.0).fit(data.features[:first], observed[:first])
    seconds = {"DET": time.process_time() - begin}
    begin = time.process_time()
    noisy = classifier("het-xl", first, steps, seed).fit(data.features[:first], observed[:first])
    seconds[START] = time.process_time() - begin
    network = det.network_
    known = np.isin(observed, det.classes_)  # a rare class may have no training row
    labels = torch.from_numpy(np.where(known, np.searchsorted(det.classes_, observed), -100))
    with torch.no_grad():
        features = network(torch.from_numpy(data.features))
        logits = network.head.logit_distribution(features).mean
    fitted, fitted_labels = logits[held_out], labels[held_out]
    temperature = fit_temperature(network.head, [features[held_out]], fitted_labels)
    begin = time.process_time()
    fit = fit_noise(network.head, features[held_out], fitted_labels, seed=seed)
    seconds[NOISE] = time.process_time() - begin
    log_probs = {
        "DET": logits.log_softmax(-1),
        SCALED: (logits / temperature).log_softmax(-1),
        "vector": scaled_logits(fitted, fitted_labels, matrix=False)(logits).log_softmax(-1),
        "matrix": scaled_logits(fitted, fitted_labels, matrix=True)(logits).log_softmax(-1),
        NOISE: _with_noise(network.head, fit, features, seed),
        START: torch.from_numpy(noisy.predict_log_proba(data.features)).float(),
    }
    losses = {
        name: float(F.nll_loss(values[test], labels[test], ignore_index=-100)) for name, values in log_probs.items()
    }
    right = torch.from_numpy(np.searchsorted(det.classes_, data.labels).clip(max=len(det.classes_) - 1))
    sets = {
        f"{name}, {score}": _sets(log_probs[name][test].exp(), labels[test], right[test], score, seed)
        for name in ("DET", NOISE, START)
        for score in ("aps", "raps")
    }
    return {"nll": losses, "seconds": seconds, "choice": fit.choice, "sets": sets}


def _with_noise(head: Any, fit: Any, features: Tensor, seed: int) -> Tensor:
    """Return log-probabilities [n, K] of the classifier with what was fitted."""
    noisy = HetXLHead(head.in_features, head.num_classes, rank=NOISE_RANK, classifier=head.classifier).eval()
    fit.apply(noisy)
    noisy.noise_scale = float(fit.has_noise)
    return noisy.predict(features, generator=torch.Generator().manual_seed(seed)).log_probs


def _sets(probs: Tensor, labels: Tensor, right: Tensor, score: str, seed: int) -> dict[str, float]:
    """Return coverage and mean size of sets calibrated on every other row, of given and of right labels."""
    options = ScoreOptions(score)
    u = torch.rand(len(probs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = torch.arange(len(probs))
    own = (rows % 2 == 0) & (labels >= 0)
    scores = label_scores(probs[own], labels[own], u[own], options).numpy()
    conformal = calibrate(scores, labels[own].numpy(), probs.shape[1], COVERAGE, options)
    other = (rows % 2 == 1) & (labels >= 0)
    sets = conformal.sets(probs[other], u[other])
    triples = list(zip(sets, labels[other].tolist(), right[other].tolist(), strict=True))
    return {
        "coverage": float(np.mean([label in chosen for chosen, label, _ in triples])),
        "coverage_right": float(np.mean([label in chosen for chosen, _, label in triples])),
        "size": float(np.mean([len(chosen) for chosen in sets])),
    }


class NoiseOnly(Study):
    """Test NLL of a trained DET with added noise, compared with other ways to recalibrate it."""

    name = "noise-only"
    question = "Does noise that is added to a trained classifier help more than temperature scaling?"
    seed_count = 3

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return what every setting gave, by seed."""
        return {"steps": STEPS[lab.profile.name]} | measure_settings(lab, measure_setting, STEPS[lab.profile.name])

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the test NLL of noise-only less that of temperature scaling."""
        groups = [(title(setting), [("HET-XL", comparison(setting))]) for setting in summary["settings"]]
        return plot_groups(groups, path, "test NLL, noise-only − temperature scaling: left is better")

    def text(self, summary: Summary) -> str:
        """Return the tables of losses and of prediction sets."""
        settings = summary["settings"]
        differences = [comparison(setting).difference for setting in settings]
        shares = [time_share(setting) for setting in settings]
        return "\n\n".join(
            (
                f"# {self.entry.title}",
                f"{self.question} {summary['rate']:.0%} of all labels are flipped, also those of held-out and test "
                "rows: it is the given label that is predicted.",
                f"Noise-only has a lower mean NLL than temperature scaling in {sum(d < -EQUAL for d in differences)} "
                f"of {len(settings)} settings, and a higher one in {sum(d > EQUAL for d in differences)}; in the "
                "others the held-out rows chose temperature scaling itself. The DETs are linear, on features, and "
                f"trained for {summary['steps']:,} steps. The noise, with its folds, takes {mean(shares).value:.0%} of "
                f"that time, and {max(shares):.0%} at most; a backbone before the classifier adds nothing to it.",
                self.image_link,
                "## Test NLL",
                losses_table(settings),
                "Chosen: how often, of the seeds, noise or ε (a share of labels that are any class) was chosen over τ "
                "alone or the model as it was. Time: of the fit, as a share of the DET's training.",
                f"## Prediction sets of {COVERAGE:.0%} coverage",
                sets_table(settings),
                "Calibrated on given labels, some of them wrong; the last column is the share of right labels in the "
                "sets of HET-XL: sets that cover noisy labels cover right ones more often than was asked for.",
            )
        )


def over(setting: Mapping[str, Any], name: str) -> list[float]:
    """Return the test NLL of a method, by seed."""
    return [seed["nll"][name] for seed in setting["seeds"]]


def comparison(setting: Mapping[str, Any]) -> PairedTest:
    """Return the NLL of noise-only less that of temperature scaling."""
    return paired_test(over(setting, NOISE), over(setting, SCALED))


def time_share(setting: Mapping[str, Any]) -> float:
    """Return the time of noise-only as a share of the DET's training, mean over the seeds."""
    return mean([seed["seconds"][NOISE] / seed["seconds"]["DET"] for seed in setting["seeds"]]).value


def losses_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of test losses."""
    rows = []
    for setting in settings:
        chosen = sum(seed["choice"] not in CHOICES[:2] for seed in setting["seeds"])
        cells = [decimal(mean(over(setting, name)).value, 3) for name in METHODS]
        rows.append(
            [
                title(setting),
                *cells,
                f"{comparison(setting).difference:+.4f}",
                f"{chosen}/{len(setting['seeds'])}",
                f"{time_share(setting):.0%}",
            ]
        )
    return markdown(["setting", *METHODS, "noise-only − temperature", "chosen", "time"], rows).rstrip()


def sets_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of coverage and set size."""
    names = ("DET, aps", "DET, raps", f"{NOISE}, raps", f"{START}, raps")
    rows = []
    for setting in settings:
        cells = []
        for name in names:
            coverage, size = (
                mean([seed["sets"][name][key] for seed in setting["seeds"]]).value for key in ("coverage", "size")
            )
            cells.append(f"{100 * coverage:.1f} %, {size:.2f}")
        right = mean([seed["sets"][names[-1]]["coverage_right"] for seed in setting["seeds"]]).value
        rows.append([title(setting), *cells, f"{100 * right:.1f} %"])
    return markdown(["setting", *names, "right labels"], rows).rstrip()


STUDIES = (NoiseOnly(),)
