"""`hetxl study sharing` (Tables "Effect of sharing W", "Sensitivity to M"), `residual` (Table "Diagonal component
parameterization") and `alignment` (Table "Smallest principal angle")."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl_lab.studies import study
from hetxl_lab.studies.charts import line_styles, plot_lines
from hetxl_lab.studies.drawings import write_svg
from hetxl_lab.studies.own_data import features_of
from hetxl_lab.studies.profiles import FIXED, LEARNED, Profile
from hetxl_lab.studies.runs import StudyRun
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Summary, TableStudy
from hetxl_lab.studies.verdicts import agree, change, holds, insensitive, sign, within
from hetxl_train.model import feature_batches
from hetxl_train.report import charts
from hetxl_train.report.tables import Column, Row, Table
from hetxl_train.runs import load_run

SHARED = "HET-XL, W shared"
FACTORS = (32, 16, 8, 4, 2, 1)  # D over M


def sizes_of(profile: Profile) -> list[int]:
    """Return M = D / 32 … D, without duplicates."""
    config = profile.base.config("het-xl")
    features = config.features or features_of(config)
    return list(dict.fromkeys(max(1, features // factor) for factor in FACTORS))


class Sharing(TableStudy):
    """Shared W against W′ of several sizes."""

    name = "sharing"
    question = "Noise reaches the logits through W itself. What if it had a projection W′ of its own, and how large?"
    paper = ("tab:w_sharing", "tab:sensitivity_to_M")
    claim = "sharing W has little effect on performance, and without it a larger M is better"
    title = "Sharing W"
    columns = (study.NLL, study.PRECISION, study.PARAMETERS)

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return the line of shared W, then one for every M."""
        own = [
            Line(str(size), "het-xl", profile.base, {**LEARNED, "noise_features": size}, "own W′")
            for size in sizes_of(profile)
        ]
        return [Line(SHARED, "het-xl", profile.base, LEARNED, "shared"), *own]

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return two tables with the paper's layout."""
        sizes = _sizes(summary)
        rows = [Row(size, study.cells_of(study.values_of(summary, size, "own W′"), self.columns)) for size in sizes]
        shared = study.cells_of(study.values_of(summary, SHARED, "shared"), self.columns)
        both = [Row(SHARED, shared), Row("HET-XL, own W′", rows[-1].cells)]
        data = summary["lines"][0]["data"]
        return [
            Table("Effect of sharing W", self.columns, both, f"{data}, M = D = {sizes[-1]}"),
            Table("Sensitivity to M when W is not shared", self.columns, rows, data, head="M"),
        ]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw NLL and precision@1 over M, with those of shared W."""
        sizes, shared = _sizes(summary), study.values_of(summary, SHARED, "shared")
        panels, levels = {}, {}
        for axis, metric in study.PANELS.items():
            panels[axis] = {
                "own W′": study.points_of(summary, {float(size): (size, "own W′") for size in sizes}, metric)
            }
            levels[axis] = {"W shared": sum(shared[metric]) / len(shared[metric])} if shared else {}
        return plot_lines(panels, path, "M", log_x=True, levels=levels)

    def conclusion(self, summary: Summary) -> str:
        """Compare W′ with M = D to shared W, and the largest M to the smallest."""
        sizes = _sizes(summary)
        largest = (sizes[-1], "own W′")
        test = study.less(summary, largest, (SHARED, "shared"))
        growth = study.less(summary, largest, (sizes[0], "own W′"))
        shared = insensitive([test], study.values_of(summary, SHARED, "shared"))
        larger = agree([sign(growth)], -1)
        verdict = None if None in (shared, larger) else bool(shared and larger)
        return (
            f"With a W′ of its own and M = D the NLL, compared with that of W shared, is {change(test)}; with M = D "
            f"compared with M = {sizes[0]} it is {change(growth)}. "
            f"{holds(verdict, self.claim, within())}"
        )


def _sizes(summary: Summary) -> list[str]:
    return [line["label"] for line in summary["lines"] if line["group"] == "own W′"]


KINDS = {"rank-1": "rank1", "diagonal": "diagonal"}
TAUS = {"learned τ": LEARNED, "τ not learned": FIXED}


class Residual(TableStudy):
    """Both residuals, with τ learned and fixed."""

    name = "residual"
    question = "Beside its factors a covariance has d(x) d(x)ᵀ, or diag(d(x)²): does it matter which?"
    paper = ("tab:diag_parameterization",)
    claim = "the choice has little effect on predictions, so the cheaper rank-1 component is taken"
    title = "The residual of the covariance"
    columns = (study.NLL, study.PRECISION)

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Return the four combinations."""
        return [
            Line(f"{kind}, {tau}", "het-xl", profile.base, {**options, "residual": residual})
            for tau, options in TAUS.items()
            for kind, residual in KINDS.items()
        ]

    def conclusion(self, summary: Summary) -> str:
        """Compare the diagonal residual with rank-1."""
        tests = {tau: study.less(summary, (f"diagonal, {tau}", None), (f"rank-1, {tau}", None)) for tau in TAUS}
        texts = [f"{change(test)} with {tau}" for tau, test in tests.items()]
        verdict = insensitive(list(tests.values()), study.values_of(summary, "rank-1, learned τ"))
        return (
            f"The NLL with a diagonal component, compared with the rank-1 one, is {' and '.join(texts)}. "
            f"{holds(verdict, self.claim, within())}"
        )


LEARNED_W, RANDOM_W, FACTORS_ALONE = ALIGNED = ("W learned by HET", "random W", "W learned by HET, factors alone")
"""The last leaves the residual d(x) out of Q(x), which has the same sign for all classes."""
CHUNK = 32  # examples whose noise bases are in memory at once


def cosines(basis: Tensor, noise: Tensor) -> Tensor:
    """Return the cosine of the smallest principal angle between a subspace and the row space of each matrix, [n].

        U, V = orthonormal bases of the two;  the largest singular value of Uᵀ V

    Args:
        basis: [K, D] orthonormal columns.
        noise: [n, Q, K], rows that span the other subspace.
    """
    other = torch.linalg.qr(noise.mT).Q  # [n, K, Q]
    return torch.linalg.matrix_norm(basis.mT @ other, ord=2)


def expected_random(features: int, size: int, classes: int) -> float:
    """Approximate the cosine for a random subspace: (√D + √Q) / √K, the edge of the spectrum of Gaussian matrices."""
    return min(1.0, (math.sqrt(features) + math.sqrt(size)) / math.sqrt(classes))


@torch.no_grad()
def angles(run: StudyRun, directory: Path, count: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return cosines of at most `count` validation examples for the learned and a random W, and D, Q and K."""
    model = load_run(directory).model
    split = run.open().splits["validation"]
    rows = np.arange(min(count, len(split)))
    batches = feature_batches(model.backbone, split, rows, 0, torch.device("cpu"))
    features = torch.cat([batch for batch, _ in batches])
    weight = model.head.classifier.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(run.config.seed)
    learned = torch.linalg.qr(weight.detach()).Q
    random = torch.linalg.qr(torch.randn(weight.shape, generator=generator)).Q
    rank = model.head.covariance.rank if model.head.covariance is not None else 0
    pairs = {LEARNED_W: (learned, None), RANDOM_W: (random, None), FACTORS_ALONE: (learned, rank)}
    cosines_of: dict[str, list[float]] = {label: [] for label in ALIGNED}
    size = 0
    for part in features.split(CHUNK):
        noise = model.head.logit_distribution(part).factors  # [n, Q, K]
        size = noise.shape[1]
        for label, (basis, rows_used) in pairs.items():
            cosines_of[label] += cosines(basis, noise[:, :rows_used]).tolist()
    return cosines_of, {"D": weight.shape[1], "Q": size, "K": weight.shape[0]}


class Alignment(PaperStudy):
    """The angle between the row spaces of W and of HET's noise."""

    name = "alignment"
    question = (
        "HET-XL's noise goes through W. Could it express the noise that HET learns freely: is the row space of Q(x), "
        "the basis of HET's noise, near to that of the W that HET learns?"
    )
    paper = ("tab:spa",)
    claim = "the row space of HET's noise aligns with that of its W far better than with that of a random W"

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the runs of HET with τ = 1."""
        return [profile.base.run("het", seed) for seed in seeds]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the cosines of every seed's model."""
        cosines_of: dict[str, list[list[float]]] = {label: [] for label in ALIGNED}
        sizes: dict[str, int] = {}
        runs = [run for run in self.runs(lab.profile, lab.seeds) if lab.cache.result(run) is not None]
        if not runs:
            raise ValueError(f"no run of HET on {lab.profile.base.name} stayed finite: there is nothing to measure")
        with lab.console.bar("angles", len(runs)) as bar:
            for number, run in enumerate(runs, 1):
                values, sizes = angles(run, lab.cache.directory(run), lab.profile.angles)
                for label in ALIGNED:
                    cosines_of[label].append([round(value, 6) for value in values[label]])
                bar.to(number)
        return {"cosines": cosines_of, "sizes": sizes, "data": lab.profile.base.name}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout: mean ± standard deviation over examples, all seeds together."""
        rows = []
        for label in ALIGNED:
            values = np.concatenate([np.asarray(values) for values in summary["cosines"][label]])
            rows.append(Row(label, [(float(values.mean()), float(values.std()))]))
        sizes = summary["sizes"]
        expected = expected_random(sizes["D"], sizes["Q"], sizes["K"])
        note = (
            f"{summary['data']}, K = {sizes['K']:,}, D = {sizes['D']}, Q = {sizes['Q']}; mean ± standard deviation "
            f"over validation examples. A random W should give about (√D + √Q) / √K = {expected:.3f}"
        )
        return [Table("Alignment", [Column("cosine of the smallest principal angle", 3, "higher")], rows, note)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the distribution of the cosines."""
        lines = []
        for label in ALIGNED:
            counts, edges = np.histogram(np.concatenate(summary["cosines"][label]), bins=40, range=(0, 1))
            points = zip(((edges[:-1] + edges[1:]) / 2).tolist(), counts.tolist(), strict=True)
            filled = tuple(charts.Point(x, y, 0, y) for x, y in points)  # a band down to 0
            lines.append(charts.Line(label, filled, seeds=2))
        x = charts.Axis("cosine of the smallest principal angle", low=0.0, high=1.0)
        y, looks = charts.Axis("validation examples", low=0.0), line_styles(ALIGNED)
        options = {"markers": False, "frame": charts.Frame(width=560)}
        return write_svg(charts.line_chart("cosines", x.title, lines, looks, x, y, **options), path)

    def conclusion(self, summary: Summary) -> str:
        """State means, angles, and whether the two distributions are separate."""
        learned, random, factors = (
            np.concatenate([np.asarray(values) for values in summary["cosines"][label]]) for label in ALIGNED
        )
        gap = float(learned.mean() - random.mean())
        spread = float(learned.std() + random.std())
        verdict = gap > spread if abs(gap) > spread else None
        why = f"the means differ by {gap:.3f}, and the standard deviations add up to {spread:.3f}"
        return (
            f"The cosine is {learned.mean():.3f} with the learned W, an angle of "
            f"{math.acos(min(1, learned.mean())):.3f}, "
            f"and {random.mean():.3f} with a random one, an angle of {math.acos(min(1, random.mean())):.3f}. "
            f"Without the residual it is {factors.mean():.3f}. {holds(verdict, self.claim, why)}"
        )


STUDIES = (Sharing(), Residual(), Alignment())
