"""A plain training loop: nn.Linear swapped for a head, the fused loss, predictions, and a file of the weights.

The data is drawn from a known model, so the lowest possible loss is known too.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import hetxl
from hetxl_train.data.synthetic import FeatureSplit, load_synthetic

B, D, STEPS = 256, 16, 300


class Classifier(nn.Module):
    """A small backbone with a head."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.backbone = nn.Linear(D, D)
        nn.init.eye_(self.backbone.weight)
        # Was: self.head = nn.Linear(D, num_classes)
        self.head = hetxl.HetXLHead(in_features=D, num_classes=num_classes, rank=8)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return log-probabilities [B, K], or with targets the loss."""
        # Was: cross_entropy(self.head(self.backbone(inputs)), targets)
        return self.head(self.backbone(inputs), targets)


def tensors_of(split: object) -> tuple[Tensor, Tensor]:
    """Return inputs [n, D] and class ids [n]."""
    assert isinstance(split, FeatureSplit)
    return split.features, torch.from_numpy(split.labels.ids)


def main() -> None:
    """Train, evaluate, predict one example, save and load."""
    torch.manual_seed(0)
    data = load_synthetic(features=D, classes=30, rows=20_000)
    inputs, labels = tensors_of(data.splits["train"])
    test_inputs, test_labels = tensors_of(data.splits["test"])

    model = Classifier(data.num_classes)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(inputs), (B,))
        loss = model(inputs[batch], labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 0:
            model.eval()
            with torch.no_grad():
                print(f"step {step}: test NLL {model(test_inputs, test_labels).item():.3f}")
            model.train()
    print(f"at best it could be {data.best_nll:.3f}")

    model.eval()
    first = test_inputs[:1]
    print(model.head.predict(model.backbone(first), top_k=3).describe())

    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        again = Classifier(data.num_classes).eval()
        again.load_state_dict(torch.load(Path(folder) / "model.pt"))
    same = again.head.predict(again.backbone(first), method="deterministic").top_class
    print(f"loaded again, it says class {same.item()}")


if __name__ == "__main__":
    main()
