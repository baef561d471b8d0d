"""`hetxl study equal-params`: is it the parameters? DET's last layer is widened until it has as many as HET-XL (Section
"Equalize DET params with HET-XL")."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetxl.data.dataset import InputSpec
from hetxl.studies.cache import Training
from hetxl.studies.charts import plot_dots
from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import NLL, PARAMETERS, PRECISION, Line, cells_of, dots_of, measured, trainings_of, values_of
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, agree, change, holds, sign
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json
from hetxl.training.model import build_model
from hetxl.training.results import count

DET, WIDE, XL = "DET", "DET, widened", "HET-XL"
WIDTH = Column("width of the last layer", 0)


def parameters_of(config: TrainConfig, spec: InputSpec, num_classes: int) -> int:
    """The parameters of a model, counted without making them."""
    with torch.device("meta"):
        return count(build_model(config, spec, num_classes, "softmax"))


def matching_width(config: TrainConfig, target: int, spec: InputSpec, num_classes: int) -> int:
    """The number of features with which a model comes nearest to a number of parameters.

    Args:
        config: of the model, whose features are replaced.
        target: parameters.
        spec: of its inputs.
        num_classes: K
    """

    def size(features: int) -> int:
        return parameters_of(dataclasses.replace(config, features=features), spec, num_classes)

    low, high = 1, 2
    while size(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < target else (low, middle)
    return min((low, high), key=lambda features: abs(size(features) - target))


class EqualParams(Study):
    """DET, DET with a wider last layer, and HET-XL."""

    name = "equal-params"
    question = "HET-XL has more parameters than DET. Does DET gain as much from as many?"
    paper = ("section Equalize DET params with HET-XL",)
    claim = "HET-XL's gains cannot be attributed to its larger capacity"

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[Training]:
        """DET and HET-XL; what they have in parameters is known afterwards."""
        return trainings_of(_lines(form), seeds)

    def follow_ups(self, lab: Lab) -> Sequence[Training]:
        """DET with as many parameters as HET-XL."""
        return trainings_of([widened_line(lab)], lab.seeds)

    def measure(self, lab: Lab) -> dict[str, Any]:
        """All three."""
        wide = widened_line(lab)
        det, xl = _lines(lab.form)
        widths = [features_of(line, lab) for line in (det, wide, xl)]
        return {"lines": measured([det, wide, xl], lab), "widths": widths}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's sentence."""
        columns = (NLL, PRECISION, PARAMETERS)
        rows = [
            Row(line["label"], [*cells_of(line["values"], columns), width])
            for line, width in zip(summary["lines"], summary["widths"], strict=True)
        ]
        plain = Column(PARAMETERS.name, PARAMETERS.digits)
        return [Table("As many parameters", (NLL, PRECISION, plain, WIDTH), rows, summary["lines"][0]["data"])]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and precision@1 of the three."""
        return plot_dots(dots_of(summary["lines"]), path)

    def conclusion(self, summary: Summary) -> str:
        """The wide DET against the usual one, and HET-XL against the wide DET."""
        gain = against(values_of(summary, WIDE), values_of(summary, DET))
        test = against(values_of(summary, XL), values_of(summary, WIDE))
        return (
            f"With {summary['widths'][1]} features instead of {summary['widths'][0]} DET has about as many "
            "parameters as "
            f"HET-XL, and its NLL is {change(gain)}. HET-XL's NLL compared with that of the wider DET is "
            f"{change(test)}. {holds(agree([sign(test)], -1), self.claim)}"
        )


def _lines(form: Form) -> tuple[Line, Line]:
    return Line(DET, "det", form.base), Line(XL, "het-xl", form.base, LEARNED)


def _described(line: Line, lab: Lab) -> tuple[InputSpec, int]:
    """What the model of a finished training gets, and its classes."""
    about = read_json(lab.cache.place(line.training(lab.seeds[0])) / "model.json")
    inputs = about["input"]
    return InputSpec(inputs["kind"], tuple(inputs["shape"]), inputs["vocabulary"]), len(about["class_names"])


def widened_line(lab: Lab) -> Line:
    """DET with as many parameters as HET-XL has."""
    det, xl = _lines(lab.form)
    spec, classes = _described(xl, lab)
    target = parameters_of(xl.training(lab.seeds[0]).config, spec, classes)
    width = matching_width(det.training(lab.seeds[0]).config, target, spec, classes)
    return Line(WIDE, "det", lab.form.base, {"features": width})


def features_of(line: Line, lab: Lab) -> int:
    """The width of the last layer of a line's models."""
    spec, classes = _described(line, lab)
    with torch.device("meta"):
        return build_model(line.training(lab.seeds[0]).config, spec, classes, "softmax").backbone.out_features


STUDY = EqualParams()
