"""Draw the figure of docs/concepts.md from a trained head: the noise of one input, its lift, and the average.

    python scripts/concept_figures.py

The head and its data are those of the README: twenty classes in ten pairs of twins, three labels in ten of the twin.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from markupsafe import Markup
from torch import Tensor

import hetxl
from hetxl_lab.studies.drawings import write_svg
from hetxl_train.report.charts import Dot, Figure, Panel, Style, grouped_bars, marker
from hetxl_train.report.scales import Axis, Frame, draw_axes
from hetxl_train.report.statistics import Mean

PATH = Path(__file__).parents[1] / "docs" / "img" / "concepts.svg"
DRAW, MEAN = Style("var(--series-1)"), Style("var(--series-2)", marker="diamond")
DRAWS = 200


def trained() -> tuple[hetxl.HetXLHead, Tensor]:
    """Return a head trained as in the README, and the features of its first example."""
    torch.manual_seed(0)
    centres, classes = torch.randn(20, 32), torch.randint(20, (2000,))
    features = centres[classes] + 0.5 * torch.randn(2000, 32)
    labels = torch.where(torch.rand(2000) < 0.3, classes ^ 1, classes)
    head = hetxl.HetXLHead(in_features=32, num_classes=20)
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(200):
        batch = torch.randint(2000, (64,))
        loss = head(features[batch], labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval(), features[:1]


def scatter(ident: str, heading: str, draws: Tensor, mean: Tensor, titles: tuple[str, str]) -> Figure:
    """Draw points [n, 2] and their mean [2]."""
    frame = Frame()
    dots = [Dot("one draw", *map(float, point)) for point in draws] + [Dot("no noise", *map(float, mean))]
    x, y = (Axis(title) for title in titles)
    across, up = x.scale((dot.x for dot in dots), frame.across), y.scale((dot.y for dot in dots), frame.up)
    looks = {"one draw": DRAW, "no noise": MEAN}
    drawn: Iterable[Markup] = [
        marker(looks[dot.label], across.position(dot.x), up.position(dot.y), 2.5 if dot.label == "one draw" else 6)
        for dot in dots
    ]
    panel = Panel(
        ident,
        heading,
        f"{len(draws)} draws around the mean.",
        frame,
        draw_axes(frame, (across, x), (up, y), titles) + Markup().join(drawn),
        heading=heading,
    )
    return Figure(heading, [panel], None, list(looks.items()), lines=False)


def main() -> None:
    """Train the head and draw its three steps."""
    head, features = trained()
    head.requires_grad_(False)
    mean = features[0]
    assert head.covariance is not None
    noise = head.covariance(features)
    noisy = mean + noise.draw(head.covariance.draw("iid", DRAWS, (1,), dtype=features.dtype))[0]  # [S, D]
    axes = torch.linalg.svd(noisy - mean, full_matrices=False).Vh[:2]  # where the noise is largest

    logits = head.classifier(noisy)  # [S, K]: HET-XL lifts its noise by the classifier itself
    plain = head.classifier(mean)
    top = head.predict(features, top_k=3).classes[0]
    first, second = (int(k) for k in top[:2])

    averaged = head.predict(features).probs[0, top]
    alone = plain.softmax(-1)[top]
    bars = grouped_bars(
        "average",
        "3. average",
        [f"class {int(k)}" for k in top],
        {
            "mean of the draws": [Mean(float(p), None, 1) for p in averaged],
            "no noise": [Mean(float(p), None, 1) for p in alone],
        },
        {"mean of the draws": replace(DRAW, marker="square"), "no noise": MEAN},
        "probability",
        "",
    )
    figures = [
        scatter(
            "noise",
            "1. noise: features + draws",
            (noisy - mean) @ axes.T,
            torch.zeros(2),
            ("largest direction of the noise", "second"),
        ),
        scatter(
            "lift",
            "2. lift: logits of the draws",
            logits[:, [first, second]],
            plain[[first, second]],
            (f"logit of class {first}", f"class {second}"),
        ),
        replace(bars, panels=[replace(bars.panels[0], heading="3. average: probabilities")]),
    ]
    write_svg(figures, PATH)


if __name__ == "__main__":
    main()
