"""Labelled data named by its class names: templates of a file, accuracies, retrieval, and the report."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hetxl.contrastive import class_retrieval
from hetxl_train.cli.commands import app
from hetxl_train.config import read_templates
from hetxl_train.report.contrastive import write_contrastive_report
from hetxl_train.training import train
from support.pairs import QUIET, image_folder, small_pairs
from support.training import write_images

RUNNER = CliRunner()


def test_templates_are_read_from_a_file_or_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("a photo of a {}.\n\n{c} in the wild\n")
    (tmp_path / "a.json").write_text(json.dumps(["a photo of a {}.", "{c} in the wild"]))
    expected = ("a photo of a {}.", "{} in the wild")
    assert read_templates(str(tmp_path / "a.txt")) == read_templates(str(tmp_path / "a.json")) == expected
    assert read_templates("a photo of a {}.|{} in the wild") == expected
    with pytest.raises(ValueError, match="cannot be read as a file of templates"):
        read_templates(str(tmp_path / "missing.txt"))


def test_class_retrieval_has_values_by_hand():
    weights = torch.eye(3)
    images = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.6, 0.5, 0.0]])
    recall = class_retrieval(images, np.array([0, 1, 1]), weights, (1, 2))
    # The third image is nearest to the wrong class; no image is of the third class.
    assert recall == pytest.approx(
        {"image_to_text@1": 2 / 3, "image_to_text@2": 1.0, "text_to_image@1": 1.0, "text_to_image@2": 1.0}
    )


def test_labelled_images_are_named_and_shown_in_the_report(tmp_path):
    run = train(small_pairs(image_folder(tmp_path / "shapes", each=8), tmp_path / "run"), console=QUIET)
    images = write_images(tmp_path / "images", each=20)
    (tmp_path / "templates.txt").write_text("a {} square\na small {c} square\n")
    command = ["contrastive", "zero-shot", str(run.path), str(images), "--templates", str(tmp_path / "templates.txt")]
    result = RUNNER.invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert (values["classes"], values["chance"], values["top5"]) == (2, 0.5, 1.0)
    assert values["top1"] == pytest.approx(values["image_to_text@1"])
    assert values["templates"] == ["a {} square", "a small {} square"]
    table = RUNNER.invoke(app, command)
    assert "class to image, recall@10" in table.output
    page = write_contrastive_report([run.path], tmp_path / "report.html").read_text()
    assert "Other labelled data" in page
