"""Compare DET, an ensemble, MC dropout, last-layer Laplace and HET-XL on noisy labels: loss, accuracy, novelty.

Sixteen classes in pairs of twins; three labels in ten are the twin's. The novel rows are of classes never seen."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hetxl import DetHead, HetXLHead
from hetxl.metrics import Ensemble, fit_laplace
from hetxl.metrics.summary import score_auroc
from hetxl.nn import DropoutHead, Head

D = K = 16


def rows(count: int, centres: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return features [n, D] around one of the centres [K, D], and labels [n]."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(centres), (count,), generator=generator)
    labels = torch.where(torch.rand(count, generator=generator) < 0.3, kinds ^ 1, kinds)
    return centres[kinds] + torch.randn(count, D, generator=generator), labels


def train(seed: int, build: Callable[..., Head], features: Tensor, labels: Tensor) -> tuple[nn.Module, Head]:
    """Return a layer and a head, trained together."""
    torch.manual_seed(seed)
    backbone, head = nn.Sequential(nn.Linear(D, 64), nn.ReLU()), build(64, K)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(300):
        batch = torch.randint(len(features), (128,))
        head(backbone(features[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return backbone.eval(), head.eval()


def main() -> None:
    """Train, and print a row for each method."""
    torch.manual_seed(0)
    known_kinds, novel_kinds = (1.2 * torch.randn(2 * K, D)).chunk(2)
    data, held_out, test = (rows(count, known_kinds, seed) for seed, count in enumerate((3000, 500, 2000)))
    novel, _ = rows(2000, novel_kinds, seed=3)
    members = [train(seed, DetHead, *data) for seed in range(4)]
    backbone, det = members[0]
    laplace = fit_laplace(det, [backbone(data[0])], [backbone(held_out[0])], held_out[1])
    methods = {"DET": members[:1], "ensemble of 4": members, "Laplace": [(backbone, laplace)]}
    methods |= {name: [train(0, head, *data)] for name, head in (("MC dropout", DropoutHead), ("HET-XL", HetXLHead))}
    print(f"{'':<14}{'NLL':>7}{'accuracy':>10}{'novelty AUROC':>15}")
    for name, models in methods.items():
        known, unknown = (Ensemble(models).predict(features) for features in (test[0], novel))
        nll, accuracy = nn.functional.nll_loss(known.log_probs, test[1]), (known.top_class == test[1]).float().mean()
        novelty = score_auroc(torch.cat([known.entropy, unknown.entropy]).numpy(), torch.arange(4000).numpy() >= 2000)
        print(f"{name:<14}{nll:7.3f}{accuracy:10.1%}{novelty:15.3f}")


if __name__ == "__main__":
    main()
