"""The app: train, resume, evaluate, compare and use runs, from a configuration and data."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetxl_train.comparison import compare as compare
    from hetxl_train.config import TrainConfig as TrainConfig
    from hetxl_train.evaluate_runs import evaluate_run as evaluate_run
    from hetxl_train.prediction import predict as predict
    from hetxl_train.runs import Run as Run
    from hetxl_train.runs import Trained as Trained
    from hetxl_train.runs import load_run as load_run
    from hetxl_train.runs import open_run as open_run
    from hetxl_train.training import train as train

_MODULES = {
    "Run": "runs",
    "TrainConfig": "config",
    "Trained": "runs",
    "compare": "comparison",
    "evaluate_run": "evaluate_runs",
    "load_run": "runs",
    "open_run": "runs",
    "predict": "prediction",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    # Modules are imported when a name is first used, so that `import hetxl_train.config` does not load models.
    if name in _MODULES:
        return getattr(importlib.import_module(f"hetxl_train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
