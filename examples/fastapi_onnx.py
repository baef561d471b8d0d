"""Serve an exported head with FastAPI and onnxruntime: torch is needed for the export, not for predictions.

`hetxl export RUN --out model.onnx` writes such a file from a run. This program exports a head and sends two requests.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime
from fastapi import Body, FastAPI, HTTPException
from fastapi.testclient import TestClient

D, NAMES = 16, [f"leaf {number}" for number in range(12)]


def export(path: Path) -> None:
    """Write a head over features [n, D]; see plain_pytorch.py for how one is trained."""
    import torch

    from hetxl import HetXLHead
    from hetxl.integrations.export import exportable, to_onnx

    head = HetXLHead(D, len(NAMES), rank=4)
    to_onnx(exportable(head, num_samples=256, top_k=3), path, torch.randn(2, D), class_names=NAMES)


def build_app(path: Path) -> FastAPI:
    """Return a server for a file, which contains names and sizes."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    app, width = FastAPI(), session.get_inputs()[0].shape[1]

    @app.post("/predict")
    def predict(features: Annotated[list[list[float]], Body(embed=True)]) -> list[dict[str, float]]:
        if not features or any(len(row) != width for row in features):
            raise HTTPException(422, f"features must be rows of {width} numbers")
        outputs: Any = session.run(["probs", "classes"], {"inputs": np.asarray(features, np.float32)})
        return [{names[k]: float(p) for p, k in zip(*row, strict=True)} for row in zip(*outputs, strict=True)]

    return app


def main() -> None:
    """Export a head, start the server, and send requests."""
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder) / "model.onnx")
        client = TestClient(build_app(Path(folder) / "model.onnx"))
        answer = client.post("/predict", json={"features": (3 * np.eye(3, D)).tolist()})
        print(answer.status_code, *answer.json(), sep="\n")
        print(client.post("/predict", json={"features": [[1.0]]}).json()["detail"])


if __name__ == "__main__":
    main()
