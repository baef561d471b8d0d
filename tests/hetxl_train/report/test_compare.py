import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from hetxl._tensors import write_tensors
from hetxl_train.report import advice, as_dict, compare_table, find_runs, verdict
from hetxl_train.report.compare import baseline_label, example_test, group_runs, read_losses
from hetxl_train.report.read import Comparison, Run
from hetxl_train.report.statistics import paired_test
from support.runs import HEADS, write_comparison


def run(label, seed=0, nll=None, split="test", comparison=None, **result):
    metrics = {split: {"nll": nll, **result.pop("metrics", {})}}
    return Run(
        Path(f"{label}-{seed}"),
        result={"label": label, "seed": seed, "metrics": metrics, **result},
        comparison=comparison,
    )


def cells(table, label):
    """Return the cells of a row by their keys."""
    row = next(row for row in table.rows if row.label == label)
    return {column.key: table.cell(row, column.key) for column in table.columns}


def test_means_errors_and_the_paired_test():
    det, het = [4.0, 4.2, 4.4], [3.9, 4.05, 4.2]
    runs = [run("DET", seed, nll) for seed, nll in enumerate(det)] + [
        run("HET", seed, nll) for seed, nll in enumerate(het)
    ]
    table = compare_table(runs)
    row = table.row("HET")
    assert row.seeds == 3
    assert cells(table, row.label)["nll"].value == pytest.approx(4.05)
    assert cells(table, row.label)["nll"].error == pytest.approx(0.15 / math.sqrt(3))
    assert cells(table, row.label)["nll"].text == "4.050 ± 0.087"
    expected = paired_test(het, det)
    assert cells(table, row.label)["difference"].value == pytest.approx(-0.15)
    assert cells(table, row.label)["difference"].error == pytest.approx(expected.error)
    assert cells(table, row.label)["p"].value == pytest.approx(expected.p)
    assert cells(table, row.label)["p"].value == pytest.approx(0.0351, abs=1e-4)
    assert cells(table, "DET")["difference"].value is None


def test_seeds_are_paired_by_number():
    runs = [run("DET", 1, 5.0), run("DET", 2, 6.0), run("HET", 2, 5.5), run("HET", 1, 4.6), run("HET", 7, 1.0)]
    cell = cells(compare_table(runs), "HET")["difference"]
    assert cell.value == pytest.approx(-0.45)


def test_no_common_seed_gives_no_difference():
    row = cells(compare_table([run("DET", 0, 5.0), run("HET", 1, 4.0)]), "HET")
    assert row["difference"].value is None
    assert row["p"].text == "no common seed"


def test_one_seed_is_not_tested():
    table = compare_table([run("DET", 0, 4.2), run("HET", 0, 4.1)])
    row = cells(table, "HET")
    assert (row["nll"].text, row["difference"].text, row["p"].text) == ("4.100", "−0.100", "1 seed")
    assert any("1 seed" in note for note in table.notes)


def test_one_seed_is_tested_over_its_examples_where_these_are_known(tmp_path):
    table = compare_table(find_runs(write_comparison(tmp_path, ("DET", "HET-XL"), seeds=1, steps=20)))
    row = table.row("HET-XL")
    assert row.tested == "examples"
    assert cells(table, row.label)["nll"].error is None
    assert cells(table, row.label)["difference"].value == pytest.approx(table.nll(row) - table.nll(table.row("DET")))
    assert 0 < cells(table, row.label)["difference"].error < 0.1
    assert 0 < cells(table, row.label)["p"].value < 0.05
    assert any("over examples" in note for note in table.notes)
    assert "over the examples of 1 seed, another may differ" in verdict(table)
    assert as_dict(table)["rows"][1]["tested_over"] == "examples"


def test_a_head_that_is_worse_is_shown_as_worse():
    cell = cells(compare_table([run("DET", 0, 4.0), run("HET", 0, 4.2)]), "HET")["difference"]
    assert cell.worse
    assert cell.text == "+0.200 worse"
    cell = cells(compare_table([run("DET", 0, 4.0), run("HET", 0, 4.0000001)]), "HET")["difference"]
    assert (cell.worse, cell.text) == (False, "0.000")


def test_best_values_by_column():
    runs = [
        run("DET", 0, 4.2, metrics={"precision@1": 0.5, "brier": 0.3}, parameters={"total": 10}),
        run("HET", 0, 4.1, metrics={"precision@1": 0.4, "brier": 0.3}, parameters={"total": 20}),
    ]
    det, het = (cells(compare_table(runs), label) for label in ("DET", "HET"))
    assert (det["nll"].best, het["nll"].best) == (False, True)
    assert (det["precision@1"].best, het["precision@1"].best) == (True, False)
    assert (det["parameters"].best, het["parameters"].best) == (True, False)
    assert not det["brier"].best  # the same for all: none is best
    assert not cells(compare_table([runs[0]]), "DET")["nll"].best  # nothing to be better than


def test_values_printed_like_the_best_are_marked_best():
    runs = [run("DET", 0, 4.10001), run("HET", 0, 4.10002), run("HET-XL", 0, 4.3)]
    assert [cells(compare_table(runs), label)["nll"].best for label in ("DET", "HET", "HET-XL")] == [True, True, False]


def test_the_true_model_is_the_first_row_and_never_best():
    table = compare_table([run("DET", 0, 4.2, best_nll=4.0), run("HET", 0, 4.1, best_nll=4.0)])
    truth = table.rows[0]
    assert (truth.label, truth.reference) == ("true model", True)
    assert cells(table, "true model")["nll"].text == "4.000"
    assert cells(table, "true model")["difference"].value == pytest.approx(-0.2)
    assert not cells(table, "true model")["nll"].best
    assert [row.label for row in table.heads] == ["DET", "HET"]


def test_validation_metrics_are_used_only_without_test_metrics():
    table = compare_table([run("DET", 0, 4.2, split="validation"), run("HET", 0, 4.1, split="validation")])
    assert table.split == "validation"
    assert any("validation" in note for note in table.notes)
    table = compare_table([run("DET", 0, 4.2, split="validation"), run("HET", 0, 4.1)])
    assert table.split == "test"
    assert cells(table, "DET")["nll"].value is None
    assert "DET, seed 0: no test metrics yet." in table.notes


def test_notes_name_missing_and_derived_runs():
    plan = Comparison(heads=("DET", "HET-H", "HET"))
    table = compare_table([run("HET", 0, 4.0, comparison=plan), run("scaled", 0, 4.0, derived_from="det-0")])
    assert "HET-H: no run yet." in table.notes
    assert "No run of DET, so there are no differences to it." in table.notes
    assert "scaled is not trained by itself but derived from det-0." in table.notes
    table = compare_table([run("DET", 0, 4.0), run("scaled", 0, 4.0, derived_from="DET-0")])
    assert "scaled is not trained by itself but derived from DET." in table.notes


def test_runs_without_anything_give_dashes():
    table = compare_table([Run(Path("a")), Run(Path("b"))])
    assert all(cell.text == "–" for row in table.grid for cell in row)


def test_small_losses_get_more_decimals():
    assert cells(compare_table([run("DET", 0, 0.01234)]), "DET")["nll"].text == "0.0123"


def test_as_dict_is_plain_json(tmp_path):
    table = compare_table(find_runs(write_comparison(tmp_path, seeds=2, steps=20, best_nll=4.0)))
    plain = json.loads(json.dumps(as_dict(table), allow_nan=False))
    assert [row["label"] for row in plain["rows"]] == ["true model", *HEADS]
    assert plain["baseline"] == "DET"
    last = plain["rows"][-1]
    assert last["seeds"] == 2
    assert last["nll"]["mean"] == pytest.approx(cells(table, "HET-XL")["nll"].value)
    assert 0 < last["p"] < 1


def said(values, **extra):
    """The verdict on NLLs by label, one for each seed."""
    runs = []
    for label, losses in values.items():
        for seed, nll in enumerate(losses):
            result = {"label": label, "seed": seed, "metrics": {"test": {"nll": nll, **extra.get(label, {})}}}
            result |= {"best_nll": extra.get("best_nll"), "parameters": {"total": 100 if label == "DET" else 150}}
            runs.append(Run(Path(f"{label}-{seed}"), result=result))
    return verdict(compare_table(runs))


def test_verdict_names_a_clear_winner():
    text = said({"DET": [4.30, 4.31, 4.32], "HET-XL": [4.20, 4.212, 4.22]})
    assert text.startswith(
        "HET-XL has the lowest NLL, 4.211 ± 0.006 against 4.310 ± 0.006 for DET (p < 0.001 over 3 seeds)."
    )
    assert "1.50 times the parameters" in text
    assert "chance" not in text


def test_a_difference_that_could_be_chance_is_called_so():
    text = said({"DET": [4.30, 4.20], "HET-XL": [4.20, 4.28]})
    assert "it could be chance" in text
    assert "1 seed: it could be chance" in said({"DET": [4.3], "HET": [4.2]})


def test_heads_that_are_as_good_are_named():
    text = said({"DET": [4.5, 4.6], "HET": [4.2, 4.3], "HET-H": [4.4, 4.41], "HET-XL": [4.19, 4.3]})
    assert text.startswith("HET-XL has the lowest NLL")
    assert "; HET is within one standard error of it" in text
    assert "within" not in said({"DET": [4.5], "HET": [4.2], "HET-XL": [4.19]})


def test_means_over_different_seeds_do_not_hide_a_loss():
    text = said({"DET": [4.0, 4.1, 5.0], "HET": [4.05, 4.16]})
    assert text.startswith("HET has the lowest NLL")
    assert "over 2 seeds" in text
    assert "on the seeds that both have, the difference is +0.055 ± 0.005 worse" in text


def test_verdict_names_det_as_best():
    text = said({"DET": [4.1, 4.2], "HET": [4.3, 4.41], "HET-XL": [4.15, 4.26]})
    assert text.startswith("DET has the lowest NLL, 4.150 ± 0.050: no other head beats it, the closest is HET-XL")
    assert "0.055 more" in text


def test_heads_that_lose_to_det_are_named():
    assert "HET and HET-H are worse than DET" in said({"DET": [4.2], "HET": [4.3], "HET-H": [4.25], "HET-XL": [4.1]})


@pytest.mark.parametrize(("ours", "word"), [(0.5, "better"), (0.3, "worse"), (0.4, "the same")])
def test_verdict_has_higher_and_lower_precision(ours, word):
    extra = {"DET": {"precision@1": 0.4}, "HET": {"precision@1": ours}}
    assert f"its accuracy is {word}" in said({"DET": [4.2], "HET": [4.1]}, **extra)


def test_a_lower_calibration_error_is_better():
    extra = {"DET": {"calibration_error": 0.02}, "HET": {"calibration_error": 0.03}}
    assert "its calibration error is worse, 3.00% against 2.00%" in said({"DET": [4.2], "HET": [4.1]}, **extra)


def test_the_true_model_is_named():
    assert "the true model has 4.000" in said({"DET": [4.2], "HET": [4.1]}, best_nll=4.0)


def test_without_a_baseline_the_second_best_is_the_measure():
    assert said({"HET": [4.2], "HET-XL": [4.1]}).startswith("HET-XL has the lowest NLL, 4.100 against 4.200 for HET.")


def test_verdict_of_one_head_and_of_none():
    assert (
        said({"DET": [4.2]}) == "DET has an NLL of 4.200 on the test data. There is no other head to compare it with."
    )
    assert verdict(compare_table([Run(Path("a"))])).startswith("No run has test metrics yet.")


def test_verdict_is_two_sentences():
    text = said({"DET": [4.3, 4.31], "HET": [4.4, 4.39], "HET-XL": [4.2, 4.21]}, best_nll=4.0)
    assert len(re.findall(r"\.(?: |$)", text)) == 2


def named_run(name, label, seed=0, comparison=None, **result):
    return Run(Path(name), result={"label": label, "seed": seed, **result}, comparison=comparison)


def test_runs_of_a_label_are_together_by_seed():
    groups = group_runs([named_run("c", "HET-XL", 1), named_run("a", "DET", 0), named_run("b", "HET-XL", 0)])
    assert [(group.label, [member.seed for member in group.runs]) for group in groups] == [
        ("DET", [0]),
        ("HET-XL", [0, 1]),
    ]


def test_the_order_of_the_comparison_comes_first_then_that_of_the_paper():
    plan = Comparison(heads=("own", "HET-XL", "DET"))
    labels = ("DET", "HET-XL", "own")
    assert [group.label for group in group_runs([named_run(label, label, comparison=plan) for label in labels])] == [
        *plan.heads
    ]
    groups = group_runs([named_run(label, label) for label in ("zz", "HET-XL", "aa", "DET")])
    assert [group.label for group in groups] == ["DET", "HET-XL", "zz", "aa"]


def test_the_same_seed_twice_is_two_heads_not_two_seeds():
    groups = group_runs([named_run("out/rank-10", "HET"), named_run("out/rank-20", "HET")])
    assert [group.label for group in groups] == ["HET (rank-10)", "HET (rank-20)"]
    groups = group_runs([named_run("one/a", "HET"), named_run("two/a", "HET")])
    assert [group.label for group in groups] == ["HET (one/a)", "HET (two/a)"]
    groups = group_runs([named_run("x/one/a", "HET"), named_run("y/one/a", "HET")])
    assert [group.label for group in groups] == ["HET (x/one/a)", "HET (y/one/a)"]


def test_baseline_is_that_of_the_comparison_or_det():
    plan = Comparison(baseline="HET")
    assert baseline_label(group_runs([named_run("a", "DET"), named_run("b", "HET", comparison=plan)])) == "HET"
    assert baseline_label(group_runs([named_run("a", "HET"), named_run("b", "DET")])) == "DET"
    assert (
        baseline_label(group_runs([named_run("a", "HET", head="het"), named_run("b", "plain", head="det")])) == "plain"
    )
    assert baseline_label(group_runs([named_run("a", "HET")])) is None


def test_runs_of_different_data_are_refused():
    with pytest.raises(ValueError, match="same data to be compared, found birds, pycode"):
        group_runs([named_run("a", "DET", dataset="pycode"), named_run("b", "HET", dataset="birds")])
    assert len(group_runs([named_run("a", "DET", dataset="pycode"), named_run("b", "HET")])) == 2
    with pytest.raises(ValueError, match="at least one run"):
        group_runs([])


def test_metrics_by_seed_leave_out_what_is_missing():
    (group,) = group_runs(
        [
            named_run("a", "DET", 0, metrics={"test": {"nll": 4.0}}, train_seconds=3.0, parameters={"total": 5}),
            named_run("b", "DET", 1, metrics={"test": {"nll": None}}),
        ]
    )
    assert group.metrics("nll", "test") == {0: 4.0}
    assert group.values("train_seconds") == [3.0]
    assert group.parameters() == [5.0]


def evaluated_run(folder, rows, losses):
    (folder / "records").mkdir(parents=True)
    tensors = {"rows": np.array(rows), "log_prob": -np.array(losses, dtype=np.float64)}
    save_file(tensors, folder / "records" / "test.safetensors")
    return Run(folder)


def test_losses_come_in_the_order_of_their_rows(tmp_path):
    rows_and_losses = read_losses(evaluated_run(tmp_path / "a", [5, 2, 9], [0.5, 0.2, 0.9]), "test")
    assert rows_and_losses is not None
    rows, losses = rows_and_losses
    assert rows.tolist() == [2, 5, 9]
    assert losses.tolist() == [0.2, 0.5, 0.9]


def test_example_test_equals_the_paired_test(tmp_path):
    first, second = (
        evaluated_run(tmp_path / "a", [0, 1, 2], [1.0, 2.0, 4.0]),
        evaluated_run(tmp_path / "b", [2, 1, 0], [3.5, 2.5, 0.1]),
    )
    expected = paired_test([1.0, 2.0, 4.0], [0.1, 2.5, 3.5])
    test = example_test(first, second, "test")
    assert test == pytest.approx(expected)
    assert example_test(first, first, "test").p == 1


def test_other_examples_or_none_give_no_test(tmp_path):
    first = evaluated_run(tmp_path / "a", [0, 1, 2], [1.0, 2.0, 4.0])
    assert example_test(first, evaluated_run(tmp_path / "b", [0, 1, 3], [1.0, 2.0, 4.0]), "test") is None
    assert example_test(first, evaluated_run(tmp_path / "c", [0], [1.0]), "test") is None
    assert example_test(first, first, "validation") is None
    assert example_test(first, Run(Path("nowhere")), "test") is None
    assert read_losses(evaluated_run(tmp_path / "d", [0, 1], [1.0, np.inf]), "test") is None


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00", b"text" * 100])
def test_a_broken_file_is_an_error_that_names_it(tmp_path, content):
    broken = evaluated_run(tmp_path / "a", [0, 1], [1.0, 2.0])
    (tmp_path / "a" / "records" / "test.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"test\.safetensors is not a complete safetensors file"):
        read_losses(broken, "test")


def test_changed_losses_are_refused(tmp_path):
    run = evaluated_run(tmp_path / "a", [0, 1], [1.0, 2.0])
    path = tmp_path / "a" / "records" / "test.safetensors"
    write_tensors(path, {"rows": torch.arange(2), "log_prob": -torch.tensor([1.0, 2.0])})
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="its content does not match its checksum"):
        read_losses(run, "test")


def test_a_file_without_losses_gives_none(tmp_path):
    (tmp_path / "records").mkdir()
    save_file({"rows": np.arange(3)}, tmp_path / "records" / "test.safetensors")
    assert read_losses(Run(tmp_path), "test") is None


def advice_on(det, *, cost=1.0, calibration_error=0.01, **others):
    """What to do with NLLs by label, one for each seed; others take `cost` times as long as DET."""
    runs = []
    for label, values in {"DET": det, **others}.items():
        factor = 1.0 if label.startswith("DET") else cost
        times = {"train_seconds": 10 * factor, "predict_seconds_per_1000": factor}
        metrics = {"calibration_error": calibration_error}
        runs += [run(label, seed, nll, metrics=metrics, **times) for seed, nll in enumerate(values)]
    return advice(compare_table(runs))


def test_advice_names_the_head_its_gain_and_its_cost():
    text = advice_on([2.0, 2.1, 2.2], cost=3.0, **{"HET-XL": [1.9, 2.0, 2.1001]})
    assert text.startswith(
        "Take HET-XL: its NLL is lower than DET's by 0.100, for 3 times the time to train and 3 times"
    )
    assert text.endswith("Next, train longer (--epochs): that helps more than another head in most cases.")


@pytest.mark.parametrize("het", [[2.1, 2.2, 2.3], [1.8, 2.3, 2.15]])
def test_advice_is_det_where_nothing_is_gained(het):
    text = advice_on([2.0, 2.1, 2.2], **{"HET-XL": het})
    assert text.startswith("Take DET: nothing else has a lower NLL by more than chance.")


def test_advice_prefers_the_faster_of_equal_heads():
    near = {"HET-XL": [1.9, 2.0, 2.11], "DET + scaling": [1.9, 2.005, 2.11]}
    assert advice_on([2.0, 2.1, 2.2], cost=3.0, **near).startswith("Take DET + scaling: its NLL")


def test_advice_names_what_gains_less_for_much_less_time():
    rows = {
        "DET ensemble": ([1.8, 1.9, 2.0001], 5),
        "HET-XL": ([1.9, 2.0, 2.1001], 2),
        "HET": ([1.95, 2.05, 2.1501], 1),
    }
    runs = [run("DET", seed, nll, **times(1)) for seed, nll in enumerate([2.0, 2.1, 2.2])]
    runs += [
        run(label, seed, nll, **times(cost)) for label, (nlls, cost) in rows.items() for seed, nll in enumerate(nlls)
    ]
    assert advice(compare_table(runs)).startswith(
        "Take DET ensemble: its NLL is lower than DET's by 0.200, for 5 times the time to train and 5 times the time "
        "to predict; HET-XL's by 0.100, for 2 times the time to train and 2 times the time to predict."
    )


def times(factor):
    return {"train_seconds": 10 * factor, "predict_seconds_per_1000": factor}


def test_prediction_time_is_relative_to_the_baseline():
    runs = [run("DET", 0, 2.0, **times(2)), run("DET", 1, 2.0, **times(4)), run("HET", 0, 2.0, **times(36))]
    table = compare_table([*runs, run("HET-XL", 0, 2.0)])
    assert [cells(table, label)["predict_ratio"].text for label in ("DET", "HET", "HET-XL")] == ["1.0×", "12×", "–"]
    rows = {row["label"]: row["predict_ratio"]["mean"] for row in as_dict(table)["rows"]}
    assert rows == {"DET": 1.0, "HET": 12.0, "HET-XL": None}
    assert cells(compare_table(runs[2:]), "HET")["predict_ratio"].text == "–"


def test_an_ensemble_states_its_cost():
    table = compare_table([run("DET", 0, 2.0), run("DET ensemble", 0, 1.9, derived_from="DET-0", members=5)])
    assert (
        "DET ensemble averages 5 runs of DET: 5 times the training, and at least as many times the prediction."
        in table.notes
    )
    assert not any("not trained by itself" in note for note in table.notes)


def test_what_averages_is_not_advised_to_be_rescaled():
    metrics, nlls = {"calibration_error": 0.2}, enumerate([2.0, 2.1, 2.2])
    runs = [run("DET", seed, nll, metrics=metrics) for seed, nll in nlls]
    runs += [run("DET ensemble", each.seed, 1.5, metrics=metrics, members=5) for each in runs]
    text = advice(compare_table(runs))
    assert text.startswith("Take DET ensemble")
    assert "rescale" not in text


def test_advice_on_one_seed_asks_for_more():
    assert advice_on([2.0], **{"HET-XL": [1.9]}).endswith("Next, repeat it with --seeds 3: another seed may differ.")


def test_advice_on_probabilities_that_are_off():
    text = advice_on([2.0, 2.1, 2.2], calibration_error=0.2, **{"HET-XL": [1.9, 2.0, 2.1001]})
    assert "off by 20.0%: fit them to labels that you trust, hetxl rescale" in text


def test_there_is_no_advice_without_a_baseline():
    assert advice(compare_table([run("HET", 0, 1.0), run("HET-XL", 0, 2.0)])) == ""
    assert advice(compare_table([run("DET", 0, 1.0)])) == ""
