"""Fine-tune a timm model whose last layer is a HET-XL head, with timm's Mixup and an average of the weights (EMA).

The data is synthetic: stripes of eight directions, a fifth of them labelled as the next direction. With
pretrained=True, timm downloads published weights.
"""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3

import hetxl

MODEL, STEPS = "convnext_atto", 60


def stripes(count: int, wrong: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy stripes of eight directions [n, 3, 32, 32], and their labels [n], a share of them wrong."""
    labels = torch.randint(8, (count,))
    angle = labels[:, None, None] * torch.pi / 8
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    waves = torch.sin((rows * torch.cos(angle) + columns * torch.sin(angle)) * 0.8)
    noisy = waves[:, None] + 0.5 * torch.randn(count, 3, 32, 32)
    return noisy, torch.where(torch.rand(count) < wrong, (labels + 1) % 8, labels)


def main() -> None:
    """Train, evaluate the averaged weights, and start another task."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL, pretrained=False, num_classes=8)
    model = hetxl.convert(model, train_samples=4)  # the only new line
    averaged = ModelEmaV3(model, decay=0.95, use_warmup=True)
    mixup, criterion = Mixup(mixup_alpha=0.1, num_classes=8, prob=0.5), SoftTargetCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for step in range(1, STEPS + 1):
        images, targets = mixup(*stripes(32, wrong=0.2))
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update(model, step)

    images, labels = stripes(200, wrong=0.0)
    prediction = hetxl.predict(averaged.module.eval(), images)
    right = (prediction.top_class == labels).float().mean()
    print(f"averaged weights: {right:.1%} of 200 clean images right; {prediction}")
    model.reset_classifier(5)  # timm's own method; the new classifier is a head again
    print(type(model.get_classifier()).__name__, "over", model.get_classifier().num_classes, "classes")


if __name__ == "__main__":
    main()
