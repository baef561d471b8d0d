"""Measure how far predictions without samples, and with few, are from 65,536 samples on trained heads.

python benchmarks/methods.py [--write docs/methods.md]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from _measures import Problem
from _meter import machine
from _report import markdown_table, replace_between
from rich.progress import track
from torch import Tensor

import hetxl

CLASSES, FEATURES, EXAMPLES, STEPS = 512, 64, 64, 600
REFERENCE_SAMPLES, CHUNK = 65_536, 4
METHODS = ("deterministic", "probit", "mean_field", "taylor")
SAMPLES = (16, 64, 256)


def train(problem: Problem, link: str, scale: float) -> hetxl.HetXLHead:
    """Train a head for some hundred steps; `scale` multiplies its initial noise."""
    torch.manual_seed(1)
    head = hetxl.HetXLHead(FEATURES, CLASSES, link=link, bias_init=-5.0 if link == "sigmoid" else None)
    with torch.no_grad():
        head.get_parameter("covariance.factor").mul_(scale)
    optimiser = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in track(range(STEPS), f"training, {link}"):
        features, labels, _ = problem.draw(128)
        loss = head.loss(features, labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return head.eval()


def reference(head: hetxl.HetXLHead, features: Tensor) -> Tensor:
    """Return probabilities [B, K] by 65,536 samples, a few examples at a time."""
    generator = torch.Generator().manual_seed(2)
    parts = [
        head.predict(part, num_samples=REFERENCE_SAMPLES, generator=generator).probs
        for part in track(features.split(CHUNK), "65,536 samples")
    ]
    return torch.cat(parts)


def error(probs: Tensor, exact: Tensor, link: str) -> tuple[float, float]:
    """Return mean and largest over examples of the total variation (softmax) or the largest label error (sigmoid)."""
    each = (probs - exact).abs()
    each = each.sum(-1) / 2 if link == "softmax" else each.amax(-1)
    return float(each.mean()), float(each.max())


def rows_of(link: str, scale: float) -> list[list[str]]:
    """Return the table of one trained head."""
    torch.manual_seed(0)
    problem = Problem(CLASSES, FEATURES)
    head = train(problem, link, scale)
    features, _, _ = problem.draw(EXAMPLES)
    exact = reference(head, features)
    with torch.no_grad():
        noise = float(head.logit_distribution(features).variance.mean().sqrt() / head.temperature())
    rows = []
    cases: list[tuple[str, dict[str, Any]]] = [(method, {"method": method}) for method in METHODS]
    cases += [(f"mc, S = {count}", {"num_samples": count}) for count in SAMPLES]
    for name, options in cases:
        generator = torch.Generator().manual_seed(3)
        probs = head.predict(features, generator=generator, **options).probs
        mean, largest = error(probs, exact, link)
        rows.append([link, f"{noise:.2f}", name, f"{mean:.4f}", f"{largest:.4f}"])
    return rows


def main() -> None:
    """Measure, print, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page whose measured part is replaced")
    page = parser.parse_args().write
    torch.set_num_threads(2)
    rows = [row for link in ("softmax", "sigmoid") for scale in (0.3, 1.0) for row in rows_of(link, scale)]
    header = ["link", "noise of the logits / τ", "method", "mean error", "largest"]
    table = markdown_table(header, rows, left=3)
    print(table)
    if page is not None:
        text = f"{table}\n\n{machine(2)}"
        page.write_text(replace_between(page.read_text(), text, "methods.py"))


if __name__ == "__main__":
    main()
