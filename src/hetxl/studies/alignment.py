"""`hetxl study alignment`: does the noise that HET learns lie where W can reach (Table "Smallest principal angle")?"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl.studies.cache import Training
from hetxl.studies.forms import Form
from hetxl.studies.plot import new_figure, save_figure
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import holds
from hetxl.training.features import feature_batches
from hetxl.training.run import load_run

LEARNED, RANDOM, FACTORS = SETTINGS = ("W learned by HET", "random W", "W learned by HET, factors alone")
"""The last leaves the residual d(x) out of Q(x), which has the same sign for all classes."""
CHUNK = 32
"""Examples whose noise bases exist at a time."""


def cosines(basis: Tensor, noise: Tensor) -> Tensor:
    """The cosine of the smallest principal angle between a subspace and the row space of each matrix, [n].

        U, V = orthonormal bases of the two;  the largest singular value of Uᵀ V

    Args:
        basis: [K, D] orthonormal columns.
        noise: [n, Q, K], rows that span the other subspace.
    """
    other = torch.linalg.qr(noise.mT).Q  # [n, K, Q]
    return torch.linalg.matrix_norm(basis.mT @ other, ord=2)


def expected_random(features: int, size: int, classes: int) -> float:
    """About the cosine for a random subspace: (√D + √Q) / √K, the edge of the spectrum of Gaussian matrices.

    Args:
        features: D
        size: Q
        classes: K
    """
    return min(1.0, (math.sqrt(features) + math.sqrt(size)) / math.sqrt(classes))


@torch.no_grad()
def angles(training: Training, place: Path, count: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Cosines of validation examples for the learned and a random W, and the sizes D, Q and K.

    Args:
        training: of HET.
        place: of its run.
        count: how many examples, at most.
    """
    model = load_run(place).model
    split = training.open().splits["validation"]
    rows = np.arange(min(count, len(split)))
    batches = feature_batches(model.backbone, split, rows, 0, torch.device("cpu"))
    features = torch.cat([batch for batch, _ in batches])
    weight = model.head.classifier.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(training.config.seed)
    learned = torch.linalg.qr(weight.detach()).Q
    random = torch.linalg.qr(torch.randn(weight.shape, generator=generator)).Q
    rank = model.head.covariance.rank if model.head.covariance is not None else 0
    pairs = {LEARNED: (learned, None), RANDOM: (random, None), FACTORS: (learned, rank)}
    found: dict[str, list[float]] = {label: [] for label in SETTINGS}
    size = 0
    for part in features.split(CHUNK):
        noise = model.head.logit_distribution(part).factors  # [n, Q, K]
        size = noise.shape[1]
        for label, (basis, rows_used) in pairs.items():
            found[label] += cosines(basis, noise[:, :rows_used]).tolist()
    return found, {"D": weight.shape[1], "Q": size, "K": weight.shape[0]}


class Alignment(Study):
    """The angle between the row spaces of W and of HET's noise."""

    name = "alignment"
    question = (
        "HET-XL's noise goes through W. Could it express the noise that HET learns freely: is the row space of Q(x), "
        "the "
        "basis of HET's noise, near to that of the W that HET learns?"
    )
    paper = ("tab:spa",)
    claim = "the row space of HET's noise aligns with that of its W far better than with that of a random W"

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[Training]:
        """HET with τ = 1."""
        return [form.base.training("het", seed) for seed in seeds]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Cosines of every seed's model."""
        cosines_of: dict[str, list[list[float]]] = {label: [] for label in SETTINGS}
        sizes: dict[str, int] = {}
        trainings = [one for one in self.trainings(lab.form, lab.seeds) if lab.cache.result(one) is not None]
        if not trainings:
            raise ValueError(f"no training of HET on {lab.form.base.name} stayed finite: there is nothing to measure")
        with lab.narrator.bar("angles", len(trainings)) as bar:
            for number, training in enumerate(trainings, 1):
                found, sizes = angles(training, lab.cache.place(training), lab.form.angles)
                for label in SETTINGS:
                    cosines_of[label].append([round(value, 6) for value in found[label]])
                bar.to(number)
        return {"cosines": cosines_of, "sizes": sizes, "data": lab.form.base.name}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's: mean ± standard deviation over examples, of all seeds together."""
        rows = []
        for label in SETTINGS:
            values = np.concatenate([np.asarray(one) for one in summary["cosines"][label]])
            rows.append(Row(label, [(float(values.mean()), float(values.std()))]))
        sizes = summary["sizes"]
        expected = expected_random(sizes["D"], sizes["Q"], sizes["K"])
        note = (
            f"{summary['data']}, K = {sizes['K']:,}, D = {sizes['D']}, Q = {sizes['Q']}; mean ± standard deviation "
            "over "
            f"validation examples. A random W should give about (√D + √Q) / √K = {expected:.3f}"
        )
        return [Table("Alignment", [Column("cosine of the smallest principal angle", 3, "higher")], rows, note)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """How the cosines are distributed."""
        figure = new_figure(6.0, 3.0)
        axes = figure.add_subplot()
        for label in SETTINGS:
            axes.hist(np.concatenate(summary["cosines"][label]), bins=40, range=(0, 1), alpha=0.7, label=label)
        axes.set(xlabel="cosine of the smallest principal angle", ylabel="validation examples", xlim=(0, 1))
        axes.legend(frameon=False, fontsize="small")
        return save_figure(figure, path)

    def conclusion(self, summary: Summary) -> str:
        """Means, angles, and whether the two distributions part."""
        learned, random, factors = (
            np.concatenate([np.asarray(one) for one in summary["cosines"][label]]) for label in SETTINGS
        )
        gap = float(learned.mean() - random.mean())
        spread = float(learned.std() + random.std())
        found = gap > spread if abs(gap) > spread else None
        why = f"the means differ by {gap:.3f}, and the standard deviations add up to {spread:.3f}"
        return (
            f"The cosine is {learned.mean():.3f} with the learned W, an angle of "
            f"{math.acos(min(1, learned.mean())):.3f}, "
            f"and {random.mean():.3f} with a random one, an angle of {math.acos(min(1, random.mean())):.3f}. "
            f"Without the residual it is {factors.mean():.3f}. {holds(found, self.claim, why)}"
        )


STUDY = Alignment()
