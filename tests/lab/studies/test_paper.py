"""The paper's figures: some typed in a second time, and those that follow from others by arithmetic."""

import math

import pytest
import torch

from hetxl.nn import build_head
from hetxl.profiling.backbones import build_backbone
from hetxl.profiling.parameters import count_parameters
from hetxl_lab.studies.covariance import expected_random
from hetxl_lab.studies.paper import classes_of, features_of, figures, labels, paper_table, value_in
from hetxl_train.report.tables import Column, Row, Table


@pytest.mark.parametrize(
    ("label", "row", "column", "group", "value"),
    [
        ("tab:results", "HET-XL", "ResNet152x1 NLL", "JFT-300M", 8.11),
        ("tab:results", "HET-XL", "ViT-L/32 Prec@1", "JFT-4B", 0.544),
        ("tab:results", "DET", "ViT-L/32 NLL", "ImageNet-21k", 5.72),
        ("tab:data_scale_ablation_jft300m", "HET", "28 epochs Prec@1", None, 0.505),
        ("tab:data_scale_ablation_jft4b", "HET-XL", "3 epochs NLL", None, 5.25),
        ("tab:model_scale_ablation", "HET-XL", "Prec@1", None, 0.526),
        ("tab:temp_ablation", "DET, learned τ", "JFT-300M NLL", None, 8.44),
        ("tab:7_90_epoch_learn_tau", "learned τ", "NLL", "7 epochs", 7.507),
        ("tab:latency_vs_perf", "1000", "HET-XL TPU training hours", None, 3278),
        ("tab:latency_vs_perf", "16", "HET-XL NLL", None, 6.12),
        ("tab:mc_samples_sensitivity", "256", "Prec@1", None, 0.485),
        ("tab:w_sharing", "HET-XL, own W′", "NLL", None, 5.62),
        ("tab:sensitivity_to_M", "64", "Prec@1", None, 0.465),
        ("tab:spa", "W learned by HET", "cosine of the smallest principal angle", None, 0.829),
        ("tab:temp_dynamics", "HET-XL, τ fixed at its final value", "NLL", None, 5.74),
        ("tab:tau_start_point", "4.9 in 0.05 … 5", "Prec@1", None, 0.478),
        ("tab:tau_range", "2.525 in 0.001 … 5", "NLL", None, 5.5),
        ("tab:diag_parameterization", "diagonal, learned τ", "NLL", None, 5.67),
        ("tab:few_shot", "HET-XL", "10-shot accuracy, %", None, 82.7),
        ("tab:app_tuning_tau", "Simple gradient (val)", "NLL", None, 6.22),
        ("tab:contrastive_zero_shot", "HET-XL", "ImageNet", None, 85.56),
        ("section HET-XL LiT, 4 billion examples", "DET, 4 billion examples", "CIFAR-100", None, 83.14),
        ("section HET-XL LiT, p-values", "HET-XL against DET", "Oxford-IIIT Pet", None, 0.596),
        ("tab:data_scale_ablation_jft4b", "DET", "2 epochs Prec@1", None, 0.515),
    ],
)
def test_table_values_are_the_papers(label, row, column, group, value):
    assert value_in(paper_table(label), row, column, group) == value


def test_every_table_can_be_read_and_is_complete():
    assert len(labels()) == 24
    for label in labels():
        table = paper_table(label)
        assert table.title
        assert table.note
        assert len({(row.group, row.label) for row in table.rows}) == len(table.rows)


def test_an_unknown_label_is_named():
    with pytest.raises(ValueError, match=r"one of tab:results, .*found 'tab:result'"):
        paper_table("tab:result")


def test_two_tables_agree_where_they_show_the_same_run():
    main, learning = paper_table("tab:results"), paper_table("tab:temp_ablation")
    for dataset in ("JFT-300M", "ImageNet-21k", "JFT-4B"):
        for row in ("DET", "HET-XL"):
            for metric in ("NLL", "Prec@1"):
                first = value_in(main, row, f"ResNet152x1 {metric}", dataset)
                assert value_in(learning, row, f"{dataset} {metric}") == first
    sensitivity, time = paper_table("tab:mc_samples_sensitivity"), paper_table("tab:latency_vs_perf")
    for row in sensitivity.rows:
        assert value_in(sensitivity, row.label, "NLL") == value_in(time, row.label, "HET-XL NLL")


def test_the_widened_det_has_as_many_parameters_as_het_xl():
    """1,138 instead of 1,024 in the last layer of ViT-L/32, which is its pooler, counted on modules."""
    table = paper_table("section Equalize DET params with HET-XL")
    width = round(value_in(table, "DET, widened", "width of the last layer"))
    backbone, classes = build_backbone("vit-l/32"), classes_of("JFT-300M")
    assert backbone.features == features_of("ViT-L/32") == 1024
    old, new = (torch.nn.Linear(1024, size, device="meta") for size in (1024, width))
    body = backbone.parameters - count_parameters(old) + count_parameters(new)
    wide = body + count_parameters(build_head("det", width, classes, device="meta"))
    xl = backbone.parameters + count_parameters(build_head("het-xl", 1024, classes, rank=50, device="meta"))
    assert wide / 1e6 == pytest.approx(value_in(table, "DET, widened", "parameters, M"), abs=0.1)
    assert xl / 1e6 == pytest.approx(value_in(table, "HET-XL", "parameters, M"), abs=0.1)
    assert wide == pytest.approx(xl, rel=1e-3)


def test_the_angle_to_a_random_w_is_that_of_random_matrices():
    table = paper_table("tab:spa")
    cosine = value_in(table, "random W", "cosine of the smallest principal angle")
    rank = figures()["settings"]["rank"]
    assert expected_random(features_of("ResNet152x1"), rank, classes_of("ImageNet-21k")) == pytest.approx(
        cosine, abs=0.01
    )
    assert math.acos(cosine) == pytest.approx(1.213, abs=1e-3)


def test_the_times_cross_where_the_paper_says():
    table, crossing = paper_table("tab:latency_vs_perf"), figures()["latency"]
    for row in table.rows:
        faster = value_in(table, row.label, "HET-XL TPU training hours") < value_in(
            table, row.label, "HET TPU training hours"
        )
        assert faster == (int(row.label) <= crossing["het_xl_faster_up_to"])
        assert faster != (int(row.label) >= crossing["het_faster_from"])


def test_tau_starts_in_the_middle_of_its_range():
    temperature = figures()["settings"]["temperature"]
    assert temperature["init"] == (temperature["low"] + temperature["high"]) / 2


def test_value_in_finds_cells_and_names_missing_ones():
    table = Table("t", [Column("NLL", 2, "lower")], [Row("a", [(1.0, 0.1)], "g"), Row("b", ["none"])])
    assert value_in(table, "a", "NLL", "g") == 1.0
    with pytest.raises(ValueError, match="no cell for 'a'"):
        value_in(table, "a", "NLL")
    with pytest.raises(ValueError, match=r"no cell for .* 'time'"):
        value_in(table, "a", "time", "g")
    with pytest.raises(ValueError, match=r"no number for 'b'.*found 'none'"):
        value_in(table, "b", "NLL")
