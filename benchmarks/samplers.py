"""Measure the error of log p[y] for each sampler of `hetxl.functional.samplers` against many more samples.

python benchmarks/samplers.py                            # tables, about three minutes on one core
python benchmarks/samplers.py --write docs/methods.md   # also into that page, with img/samplers.svg beside it
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _meter import interleaved_medians, machine
from _report import markdown_table, plot_panels, replace_between
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import hetxl
from hetxl.functional import SAMPLERS, LogitDistribution, Targets, mc_log_probs, mc_nll, orthogonal

B, D, K, R = 64, 64, 1000, 50
MEAN_SCALE = 3.0
NOISE_SCALES = {"small": 0.5, "medium": 1.5, "large": 4.0}
SAMPLES = (4, 16, 64, 256, 1000)
REFERENCE_SAMPLES = 65_536
CHUNK = 1024
BLOCK = 32
"""Samples at a time: [B, BLOCK, K] stays small enough for the allocator to reuse."""

Errors = dict[str, list[float]]
"""Root-mean-square errors by sampler, one for each of SAMPLES."""


@dataclass(frozen=True)
class Problem:
    """Logits at one noise scale, with reference values from many samples.

    Attributes:
        logits: the Gaussian over the logits, [B, K].
        labels: [B], drawn from the model's own averaged probabilities.
        log_p: [B], log p[y] by REFERENCE_SAMPLES samples.
        log_p_error: root-mean-square error of `log_p`.
    """

    logits: LogitDistribution
    labels: Targets
    log_p: Tensor
    log_p_error: float


def make_logits(noise_scale: float) -> LogitDistribution:
    """Return logits of a random HET-XL head: mean of standard deviation 3, noise of `noise_scale`."""
    torch.manual_seed(0)
    head = hetxl.HetXLHead(D, K, rank=R, bias=False)
    torch.nn.init.normal_(head.get_parameter("classifier.weight"), std=MEAN_SCALE / math.sqrt(D))
    logits = head.logit_distribution(torch.randn(B, D))
    noise = logits.noise
    assert noise is not None
    assert noise.factors is not None
    assert noise.residual is not None
    # One factor for all noise sets its root mean square over examples and classes.
    factor = noise_scale / logits.variance.mean().sqrt()
    scaled = replace(noise, factors=noise.factors * factor, residual=noise.residual * factor)
    return LogitDistribution(logits.features, logits.classifier, scaled, logits.lift)


def make_problem(noise_scale: float, generator: torch.Generator) -> Problem:
    """Return the logits at one noise scale with labels, and log p[y] as the mean of two independent halves."""
    logits = make_logits(noise_scale)
    generator.manual_seed(0)  # so that the labels do not depend on earlier measurements
    z = orthogonal(B, CHUNK, logits.size, generator=generator)
    probs = mc_log_probs(logits, z, temperature=1.0, link="softmax", order="factors").exp()
    labels = Targets(ids=torch.multinomial(probs, 1, generator=generator).squeeze(-1))
    halves = []
    for _ in range(2):
        chunks = [
            log_p(logits, labels, orthogonal(B, CHUNK, logits.size, generator=generator))
            for _ in range(REFERENCE_SAMPLES // 2 // CHUNK)
        ]
        halves.append(log_mean(chunks))
    # The mean of two independent halves has half the standard deviation of their difference.
    return Problem(logits, labels, log_mean(halves), rms(halves[0] - halves[1]) / 2)


def log_p(logits: LogitDistribution, labels: Targets, z: Tensor) -> Tensor:
    """Return log p[y] at τ = 1, [B], averaged over the normals z [B, S, Q]."""
    blocks = []
    for block in z.split(BLOCK, dim=1):
        nll = mc_nll(logits, block, labels, temperature=1.0, link="softmax", order="factors", reduction="none")
        blocks.append(math.log(block.shape[1] / z.shape[1]) - nll)
    return torch.stack(blocks).logsumexp(0)


def log_mean(values: Sequence[Tensor]) -> Tensor:
    """Return the log-mean-exp over a list of [B], in double precision."""
    return torch.stack(list(values)).double().logsumexp(0) - math.log(len(values))


def rms(values: Tensor) -> float:
    """Return the root of the mean square."""
    return float(values.square().mean().sqrt())


def repetitions(samples: int) -> int:
    """Return the number of repetitions: more where they cost little."""
    return max(10, 1600 // samples)


def measure(problem: Problem, name: str, samples: int, generator: torch.Generator) -> tuple[float, float]:
    """Return the RMS error of log p[y] over examples and repetitions, and its own relative standard error."""
    errors = []
    for _ in range(repetitions(samples)):
        z = SAMPLERS[name](B, samples, problem.logits.size, generator=generator)
        errors.append(log_p(problem.logits, problem.labels, z) - problem.log_p)
    squares = torch.stack(errors).square().mean(-1)  # one for each repetition
    mean = squares.mean()
    return float(mean.sqrt()), float(squares.std() / math.sqrt(len(squares)) / mean / 2)


def equivalent_iid(rmse: float, iid: Sequence[float], samples: Sequence[int] = SAMPLES) -> float:
    """Return the iid samples with the same error, by interpolating the iid errors (log-log, slope −1/2 outside).

    Args:
        rmse: the error to match.
        iid: errors of iid sampling, falling, one for each of `samples`.
        samples: S
    """
    if rmse >= iid[0]:
        return samples[0] * (iid[0] / rmse) ** 2
    for left, right in zip(range(len(iid)), range(1, len(iid)), strict=False):
        if rmse >= iid[right]:
            share = math.log(iid[left] / rmse) / math.log(iid[left] / iid[right])
            return samples[left] * (samples[right] / samples[left]) ** share
    return samples[-1] * (iid[-1] / rmse) ** 2


def draw_times() -> dict[str, list[float]]:
    """Return the median milliseconds to draw the normals of B examples, by sampler, one for each of SAMPLES."""
    times: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for samples in SAMPLES:
        tasks = {name: lambda draw=draw, S=samples: draw(B, S, R + 1) for name, draw in SAMPLERS.items()}
        for name, seconds in interleaved_medians(tasks, repeats=7).items():
            times[name].append(1000 * seconds)
    return times


def digits(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def row_of_errors(name: str, errors: Errors) -> list[str]:
    """Return the errors of one sampler as text."""
    return [name, *(digits(value) for value in errors[name])]


def row_of_equivalents(name: str, errors: Errors) -> list[str]:
    """Return the equivalent iid samples of one sampler as text."""
    return [name, *(f"{equivalent_iid(value, errors['iid']):,.0f}" for value in errors[name])]


def samplers_table(corner: str, rows: Sequence[Sequence[str]]) -> str:
    """Return rows that start with a sampler's name, under the numbers of samples, as markdown."""
    header = [corner, *(f"S = {samples}" for samples in SAMPLES)]
    return markdown_table(header, [[f"`{row[0]}`", *row[1:]] for row in rows])


def rich_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """Return the same for the terminal."""
    table = Table(title=title, title_justify="left")
    table.add_column("sampler")
    for samples in SAMPLES:
        table.add_column(f"S = {samples}", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def plot(results: dict[str, Errors], path: Path) -> None:
    """Draw the error against S, one panel for each noise scale."""
    titles = {scale: f"{scale} noise: logit std {NOISE_SCALES[scale]:g}" for scale in results}
    plot_panels(path, {titles[scale]: errors for scale, errors in results.items()}, SAMPLES, "error of log p[y], RMS")


def main() -> None:
    """Measure, print, and with --write put it all into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="markdown page that holds the two markers")
    page: Path | None = parser.parse_args().write
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    console = Console()
    generator = torch.Generator().manual_seed(0)
    results: dict[str, Errors] = {}
    parts: list[str] = []
    spread = 0.0
    work = len(NOISE_SCALES) * (REFERENCE_SAMPLES + len(SAMPLERS) * sum(s * repetitions(s) for s in SAMPLES))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=work)
        for scale, noise_scale in NOISE_SCALES.items():
            progress.update(task, description=f"{scale} noise: reference")
            problem = make_problem(noise_scale, generator)
            progress.advance(task, REFERENCE_SAMPLES)
            errors: Errors = {name: [] for name in SAMPLERS}
            for samples in SAMPLES:
                for name in SAMPLERS:
                    progress.update(task, description=f"{scale} noise: {name}, S = {samples}")
                    rmse, relative = measure(problem, name, samples, generator)
                    errors[name].append(rmse)
                    spread = max(spread, relative)
                    progress.advance(task, samples * repetitions(samples))
            results[scale] = errors
            title = f"{scale.capitalize()} noise, logit standard deviation {noise_scale:g}"
            about = (
                f"Median p[y] {float(problem.log_p.exp().median()):.3f}; "
                f"the reference itself is exact to {digits(problem.log_p_error)}."
            )
            rmse_rows = [row_of_errors(name, errors) for name in SAMPLERS]
            iid_rows = [row_of_equivalents(name, errors) for name in SAMPLERS]
            console.print(rich_table(f"{title}: error", rmse_rows))
            console.print(about, markup=False)
            console.print(rich_table(f"{title}: iid samples with the same error", iid_rows))
            parts += [f"#### {title}", about, samplers_table("error of log p[y]", rmse_rows)]
            parts += [samplers_table("iid samples with the same error", iid_rows)]
    times = [[name, *(digits(value) for value in values)] for name, values in draw_times().items()]
    console.print(rich_table(f"Milliseconds to draw the normals of {B} examples", times))
    parts += ["#### Time to draw", f"Milliseconds for the normals of {B} examples with Q = {R + 1}, medians of 7."]
    parts += [samplers_table("ms", times)]
    closing = (
        f"Measured on {machine()}. For these examples and labels the errors are known to ±{spread:.0%} or better (one "
        "standard error); other labels move the equivalent samples by some tens of percent."
    )
    console.print(closing)
    if page is not None:
        page.write_text(replace_between(page.read_text(), "\n\n".join([*parts, closing]), "samplers.py"))
        plot(results, page.parent / "img" / "samplers.svg")


if __name__ == "__main__":
    main()
