"""The matrix of the integrations page: every cell has a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = ("train", "evaluate", "save", "load", "predict with uncertainty", "export")
HERE = "tests/hetxl/integrations"
EXPORT = f"{HERE}/test_exports.py::test_models_are_exported_with_their_uncertainty"
LEARN = "tests/repository/test_examples.py::test_programs_for_other_libraries_learn"
LIGHTNING, ROWS = f"{HERE}/test_lightning.py", f"{HERE}/test_sklearn.py"
ACCELERATE = f"{HERE}/test_accelerate.py::test_runs_are_trained_evaluated_saved_and_loaded"
TRAINER = f"{HERE}/test_transformers.py::test_the_trainer_trains_and_evaluates"
CONVERT, PEFT, CLIP = f"{HERE}/convert/test_convert.py", f"{HERE}/test_peft.py", f"{HERE}/test_open_clip.py"
TESTS = {
    "any model": (
        *2 * (f"{CONVERT}::test_a_converted_model_learns",),
        *2 * (f"{CONVERT}::test_state_dicts_load_into_models_converted_alike",),
        f"{CONVERT}::test_predictions_of_a_converted_model",
        f"{HERE}/export/test_export.py::test_torch_export_equals_predict",
    ),
    "timm": (
        f"{HERE}/test_timm.py::test_timm_training_loop_learns",
        LEARN,
        *3 * (f"{HERE}/test_timm.py::test_timm_architectures_are_converted",),
        EXPORT,
    ),
    "transformers": (
        *4 * (TRAINER,),
        f"{HERE}/test_transformers.py::test_pipelines_return_uncertainty",
        EXPORT,
    ),
    "PEFT": (
        *2 * (f"{PEFT}::test_trainer_trains_and_evaluates_adapters",),
        *2 * (f"{PEFT}::test_adapters_are_saved_and_loaded_with_the_head",),
        f"{PEFT}::test_merged_models_predict_as_adapted_ones_and_are_saved",
        EXPORT,
    ),
    "Lightning": (
        f"{LIGHTNING}::test_training_lowers_the_validation_nll",
        f"{LIGHTNING}::test_metrics_are_those_of_evaluation",
        *2 * (f"{LIGHTNING}::test_a_checkpoint_gives_the_same_predictions",),
        f"{LIGHTNING}::test_predict_returns_probabilities_and_uncertainty",
        EXPORT,
    ),
    "accelerate": (*5 * (ACCELERATE,), EXPORT),
    "scikit-learn": (
        f"{ROWS}::test_clean_digits_are_learned_as_well_as_by_logistic_regression",
        f"{ROWS}::test_a_grid_search_in_a_pipeline",
        *2 * (f"{ROWS}::test_pickled_stream_continues_bit_for_bit",),
        f"{ROWS}::test_predict_uncertainty_splits_the_entropy",
        f"{HERE}/test_exports.py::test_a_classifier_of_rows_is_exported_with_its_own_noise",
    ),
    "open_clip": (
        f"{CLIP}::test_wrapped_model_trains_in_open_clips_loop",
        LEARN,
        *2 * (f"{CLIP}::test_state_dicts_keep_loading",),
        *2 * (f"{CLIP}::test_zero_shot_head_averages_over_the_noise_of_the_model",),
    ),
    "`hetxl`": (
        "tests/hetxl_train/cli/test_train.py::test_train_writes_a_run",
        "tests/hetxl_train/cli/test_run.py::test_evaluate_uses_the_test_split_of_the_run",
        "tests/hetxl_train/test_hub.py::test_saved_runs_are_run_directories_for_the_commands",
        "tests/hetxl_train/test_runs.py::test_predictions_are_those_before_saving",
        "tests/hetxl_train/cli/test_run.py::test_predict_writes_a_table",
        "tests/hetxl_train/test_export_run.py::test_onnx_of_a_calibrated_run_has_its_prediction_sets",
    ),
}
"""For each row of the matrix the tests of its cells, in the order of the columns."""


def test_every_cell_of_the_page_is_listed():
    page = (ROOT / "docs" / "integrations.md").read_text()
    table = re.findall(r"^\| (.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    header, _, *rows = [[cell.strip() for cell in line.split(" | ")] for line in table]
    assert tuple(header[1:]) == STEPS
    assert [row[0] for row in rows] == list(TESTS)
    assert all(len(row) == 7 and all(row) for row in rows)


@pytest.mark.parametrize("row", TESTS)
def test_every_cell_has_a_test(row):
    assert len(TESTS[row]) == len(STEPS)
    for cell in TESTS[row]:
        path, _, name = cell.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), cell
