"""Fine-tune a timm model whose last layer became a HET-XL head: one line more than before.

    python examples/timm_finetune.py [--model resnet18 --pretrained --steps 40]

The data is drawn: images of eight patterns, a fifth of them with the label of another pattern.
"""

import argparse

import timm
import torch
import torch.nn.functional as F

import hetxl


def stripes(count: int, size: int, wrong: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of eight directions under noise [n, 3, size, size], and their labels [n], a share of them wrong."""
    labels = torch.randint(8, (count,), generator=generator)
    angle = labels[:, None, None] * torch.pi / 8
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    waves = torch.sin((rows * torch.cos(angle) + columns * torch.sin(angle)) * 0.8)
    noisy = waves[:, None] + 0.5 * torch.randn(count, 3, size, size, generator=generator)
    flipped = torch.rand(count, generator=generator) < wrong
    return noisy, torch.where(flipped, (labels + 1) % 8, labels)


def main() -> None:
    """Train, then look at a few predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="convnext_atto")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=32)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = timm.create_model(arguments.model, pretrained=arguments.pretrained, num_classes=8)
    model = hetxl.convert(model, train_samples=4)  # the line more
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for step in range(arguments.steps):
        images, labels = stripes(32, arguments.size, 0.2, generator)
        loss = F.cross_entropy(model(images), labels)  # or: hetxl.fused_loss(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    model.eval()
    images, labels = stripes(200, arguments.size, 0.0, generator)
    prediction = hetxl.predict(model, images)
    right = (prediction.top_class == labels).float().mean()
    print(f"{right:.1%} of 200 clean images right; mean entropy {prediction.entropy.mean():.2f} nats")
    print(prediction.describe(0))

    model.reset_classifier(5)  # another task: timm's own call, and the new classifier has a head again
    print(type(model.get_classifier()).__name__, "over", model.get_classifier().num_classes, "classes")


if __name__ == "__main__":
    main()
