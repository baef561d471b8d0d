"""Train a head, export it to ONNX, and serve it with onnxruntime and numpy alone.

Twelve kinds of leaves in six pairs of twins: a third of the labels are those of the twin.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import hetxl
from hetxl.integrations.export import exportable, to_onnx

D, K = 16, 12
NAMES = [f"{tree} ({side})" for tree in ("oak", "elm", "ash", "lime", "fir", "yew") for side in ("left", "right")]


class Model(nn.Module):
    """A small network with a head where its last nn.Linear was."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = hetxl.HetXLHead(32, K, rank=8)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probabilities [B, K], or with labels the loss."""
        return self.head(self.body(inputs), labels)


def train(model: Model, centres: torch.Tensor, steps: int = 150) -> None:
    """A few steps on leaves made up around the centre [K, D] of each kind."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        kinds = torch.randint(K, (64,))
        labels = torch.where(torch.rand(64) < 1 / 3, kinds ^ 1, kinds)
        loss = model(centres[kinds] + 0.5 * torch.randn(64, D), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def serve(path: Path, inputs: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Probabilities [B, K] and what the classes are called: everything comes out of the file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    return np.asarray(session.run(["probs"], {"leaves": inputs})[0]), names


def main() -> None:
    """Train, export, serve, and compare with torch."""
    torch.manual_seed(0)
    model, centres = Model(), torch.randn(K, D)
    train(model, centres)
    module = exportable(model, method="mc", num_samples=256)  # a copy with its noise fixed
    inputs = centres[[0, 3, 10]] + 0.5 * torch.randn(3, D)  # oak, elm, yew
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leaves.onnx"
        to_onnx(module, path, inputs, input_names=["leaves"], class_names=NAMES)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {len(NAMES)} classes, 256 samples")
        probs, names = serve(path, inputs.numpy())

    for row in probs:
        top = row.argsort()[::-1][:3]
        print("  " + ", ".join(f"{names[index]} {row[index]:.0%}" for index in top))
    expected = model.head.predict(model.body(inputs), noise=module.noise).probs
    largest = np.abs(probs - expected.numpy()).max()
    print(f"onnxruntime and head.predict agree {'to 1e-5' if largest <= 1e-5 else f'only to {largest:.0e}'}")


if __name__ == "__main__":
    main()
