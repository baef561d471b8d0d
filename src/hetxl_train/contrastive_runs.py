"""Load two trained towers from the directory of their run."""

from pathlib import Path
from typing import NamedTuple

import torch

from hetxl_train.config import ContrastiveConfig
from hetxl_train.runs import Run, input_spec, load_weights, model_json, open_run
from hetxl_train.towers import Specs, TwoTowers, build_towers


class TrainedTowers(NamedTuple):
    """Two loaded towers in evaluation mode, with the specs of their inputs."""

    run: Run[ContrastiveConfig]
    model: TwoTowers
    specs: Specs


def load_contrastive_run(path: str | Path, device: torch.device | str = "cpu") -> TrainedTowers:
    """Return the trained towers of a run, or those of the last checkpoint if the run has not finished."""
    run = open_run(path, ContrastiveConfig)
    with model_json(run) as about:
        specs = Specs(input_spec(about["image"]), None if about["text"] is None else input_spec(about["text"]))
    # Evaluation runs in one process, and the run has all weights.
    model = build_towers(run.config, specs, published=False, gather=False)
    load_weights(run, model)
    return TrainedTowers(run, model.to(device).eval(), specs)
