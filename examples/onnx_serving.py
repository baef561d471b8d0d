"""Train a head, export it to ONNX, and serve it, with its uncertainty, using only onnxruntime and numpy.

Twelve kinds of leaves in six pairs of twins: a third of the labels are those of the twin.
"""

import json
import tempfile

import numpy as np
import onnxruntime
import torch

import hetxl
from hetxl.integrations.export import exportable, to_onnx
from hetxl.metrics.conformal import ScoreOptions, calibrate, label_scores

D, K = 16, 12
NAMES = [f"{tree} ({side})" for tree in ("oak", "elm", "ash", "lime", "fir", "yew") for side in ("left", "right")]


def leaves(centres: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return leaves [count, D] around the centre [K, D] of each kind, and their noisy labels [count]."""
    kinds = torch.randint(K, (count,))
    labels = torch.where(torch.rand(count) < 1 / 3, kinds ^ 1, kinds)
    return centres[kinds] + 0.5 * torch.randn(count, D), labels


def serve(path: str, inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Print predictions for inputs [B, D] with the names in the file, and return its outputs by name."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    names = json.loads(about["class_names"])
    values = map(np.asarray, session.run(None, {"leaves": inputs}))
    outputs = dict(zip(json.loads(about["outputs"]), values, strict=True))
    for row, top in enumerate(outputs["top_classes"][:, :2]):
        best = ", ".join(f"{names[k]} {outputs['probs'][row, k]:.0%}" for k in top)
        print(f"{best} | entropy {outputs['entropy'][row]:.2f}, from noise {outputs['mutual_information'][row]:.2f}")
        members = ", ".join(names[k] for k in np.flatnonzero(outputs["prediction_set"][row]))
        print(f"    prediction set ({float(about['coverage']):.0%} hold the label): {members}")
    return outputs


torch.manual_seed(0)
head, centres = hetxl.HetXLHead(D, K, rank=8), torch.randn(K, D)
optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
for _ in range(150):
    optimiser.zero_grad()
    head.loss(*leaves(centres, 64)).backward()
    optimiser.step()
inputs, labels = leaves(centres, 500)  # rows not used in training, for the prediction sets
scores = label_scores(head.eval().predict(inputs).probs, labels, torch.rand(500), ScoreOptions())
sets = calibrate(scores.numpy(), labels.numpy(), K, coverage=0.9, options=ScoreOptions())
with tempfile.TemporaryDirectory() as folder:
    module, path = exportable(head, uncertainty=True, sets=sets), f"{folder}/leaves.onnx"
    to_onnx(module, path, inputs[:8], input_names=["leaves"], class_names=NAMES)
    outputs = serve(path, centres[[0, 3, 10]].numpy())  # oak, elm, yew
expected = head.predict(centres[[0, 3, 10]], noise=module.noise).probs.numpy()
print(f"leaves.onnx and head.predict agree to {'1e-5' if np.allclose(outputs['probs'], expected, 0, 1e-5) else 'less'}")
