"""Training: from a configuration and data to a run that can be resumed, evaluated, compared and used."""

from hetxl.training.compare import compare
from hetxl.training.config import TrainConfig
from hetxl.training.evaluation import evaluate_run
from hetxl.training.predict import predict
from hetxl.training.run import Run, Trained, load_run, open_run
from hetxl.training.train import train

__all__ = ["Run", "TrainConfig", "Trained", "compare", "evaluate_run", "load_run", "open_run", "predict", "train"]
