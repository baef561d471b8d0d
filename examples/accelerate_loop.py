"""The same loop with accelerate: a head is a module like any other and needs no special handling.

`accelerate launch examples/accelerate_loop.py` runs it on several devices or processes, with mixed precision if asked.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetxl
from hetxl_train.data.synthetic import FeatureSplit, load_synthetic

B, D, EPOCHS = 256, 16, 4


class Classifier(nn.Module):
    """A small backbone with a head; the loss goes through `forward`, where accelerate and DDP have their hooks."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.backbone = nn.Linear(D, D)
        nn.init.eye_(self.backbone.weight)
        self.head = hetxl.HetXLHead(in_features=D, num_classes=num_classes, rank=8)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return log-probabilities [B, K], or with targets the loss."""
        return self.head(self.backbone(inputs), targets, reduction=reduction)


def loader_of(split: object, shuffle: bool = False) -> DataLoader:
    """Return batches of inputs [B, D] and class ids [B]."""
    assert isinstance(split, FeatureSplit)
    return DataLoader(TensorDataset(split.features, torch.from_numpy(split.labels.ids)), batch_size=B, shuffle=shuffle)


def main() -> None:
    """Train and evaluate in the processes that accelerate has started."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    data = load_synthetic(features=D, classes=30, rows=20_000)
    model = Classifier(data.num_classes)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    batches, tests = loader_of(data.splits["train"], shuffle=True), loader_of(data.splits["test"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * len(batches))
    model, optimiser, batches, tests, schedule = accelerator.prepare(model, optimiser, batches, tests, schedule)

    for epoch in range(1, EPOCHS + 1):
        model.train()
        for inputs, labels in batches:
            loss = model(inputs, labels)  # was: cross_entropy(model(inputs), labels)
            optimiser.zero_grad()
            accelerator.backward(loss)
            optimiser.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            losses: Any = [accelerator.gather_for_metrics(model(*batch, reduction="none")) for batch in tests]
        accelerator.print(f"epoch {epoch}: test NLL {torch.cat(losses).mean().item():.3f}")
    accelerator.print(f"at best it could be {data.best_nll:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
