"""Counts against formulas written out here, never against the modules that are counted."""

from typing import Any

import pytest
import torch
from torch import nn

import hetxl
from hetxl.profiling import compare_heads, count_head, count_parameters, format_bytes, format_count
from hetxl.profiling.parameters import LARGEST_SIZE, ParameterCount

D, K, R, M, H = 48, 300, 7, 5, 11


def classifier():
    return D * K + K


def efficient(noise):
    """Scale and residual are linear layers D → N, J is R × N."""
    return 2 * (D * noise + noise) + R * noise


def low_rank(noise):
    """V is a linear layer D → N·R, the residual one D → N."""
    return (D * noise * R + noise * R) + (D * noise + noise)


def diagonal(noise):
    return D * noise + noise


def full(noise):
    """L is a linear layer D → N² without a bias, and there is no residual."""
    return D * noise * noise


FORMULAS = {"efficient": efficient, "low_rank": low_rank, "diagonal": diagonal, "full": full}


def by_name(features: int = D, classes: int = K, **options) -> dict[str, Any]:
    """The rows under the names of their heads."""
    return {row.head: row for row in compare_heads(features, classes, **({"rank": R} | options))}


def test_count_parameters_counts_a_shared_one_once():
    linear = nn.Linear(3, 4)
    assert count_parameters(nn.Sequential(linear, nn.ReLU(), linear)) == 3 * 4 + 4


@pytest.mark.parametrize("covariance", FORMULAS)
def test_every_head_by_formula(covariance):
    rows = by_name(covariance=covariance)
    assert list(rows) == ["det", "het", "het-h", "het-xl"]
    assert rows["det"].count.total == classifier()
    for name, noise in (("het", K), ("het-h", D), ("het-xl", D)):
        head = rows[name].count.head
        assert (head.classifier, head.covariance) == (classifier(), FORMULAS[covariance](noise))
        assert (head.projection, head.temperature) == (0, 1)
        assert rows[name].count.total == classifier() + FORMULAS[covariance](noise) + 1


def test_rank_zero_is_the_residual_alone():
    rows = by_name(rank=0)
    assert rows["het-xl"].count.head.covariance == diagonal(D)


def test_the_default_rank_is_the_papers():
    row = compare_heads(D, K)[-1]
    assert row.count is not None
    assert row.count.total == D * K + K + 2 * (D * D + D) + 50 * D + 1


def test_own_noise_space_and_buckets_touch_one_head_each():
    rows = by_name(noise_features=M, buckets=H)
    assert rows["het-xl"].count.head.projection == K * M
    assert rows["het-xl"].count.total == classifier() + efficient(M) + K * M + 1
    assert rows["het-h"].count.total == classifier() + efficient(H) + 1
    assert rows["het"].count.total == classifier() + efficient(K) + 1


def test_the_backbone_is_in_the_total_and_in_the_share():
    rows = by_name(backbone=1000)
    det, xl = rows["det"], rows["het-xl"]
    assert det.count.backbone == xl.count.backbone == 1000
    assert det.count.total == 1000 + classifier()
    assert det.added == 0
    assert xl.added == pytest.approx((efficient(D) + 1) / (1000 + classifier()))


def test_training_takes_16_bytes_for_each_parameter():
    count = by_name(backbone=1000)["het-xl"].count
    memory = count.training_bytes
    parameters = 1000 + classifier() + efficient(D) + 1
    assert (memory.weights, memory.gradients, memory.optimiser) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert memory.total == 16 * parameters


def test_bytes_are_those_of_real_training():
    head = hetxl.HetXLHead(6, 9, rank=2)
    optimiser = torch.optim.Adam(head.parameters())
    head(torch.randn(4, 6), torch.randint(9, (4,))).backward()
    optimiser.step()
    parameters = list(head.parameters())
    moments = [state[key] for state in optimiser.state.values() for key in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    memory = ParameterCount(0, count_head(head)).training_bytes
    assert memory.weights == sum(tensor.nbytes for tensor in parameters)
    assert memory.gradients == sum(tensor.nbytes for tensor in gradients)
    assert memory.optimiser == sum(tensor.nbytes for tensor in moments)


def test_parts_of_a_head_add_up_to_the_module():
    head = hetxl.HetXLHead(D, K, rank=R, noise_features=M)
    assert count_head(head).total == count_parameters(head)


def test_a_function_as_classifier_has_no_parameters():
    head = hetxl.HetXLHead(4, 3, rank=2, classifier=lambda features: features[..., :3])
    assert count_head(head).classifier == 0
    assert count_head(head).total == 2 * (4 * 4 + 4) + 2 * 4


def test_a_covariance_too_large_is_refused_in_its_row_only():
    rows = by_name(64, 5000, covariance="full")
    assert rows["het"].count is None
    assert rows["het"].added is None
    assert "1,600,000,000 parameters" in rows["het"].refused
    assert "low_rank" in rows["het"].refused
    assert rows["het"].as_dict() == {"head": "het", "refused": rows["het"].refused, "added_over_det": None}
    assert rows["het-xl"].refused is None
    assert rows["het-xl"].count.head.covariance == 64**3


def test_sizes_beyond_any_address_are_refused_in_their_rows():
    rows = compare_heads(LARGEST_SIZE, 1000, covariance="low_rank", rank=LARGEST_SIZE)
    assert [row.head for row in rows if row.count is None] == ["het", "het-h", "het-xl"]
    assert all("too large" in (row.refused or "") for row in rows[1:])


def test_a_row_as_plain_numbers():
    row = by_name(backbone=1000, noise_features=M)["het-xl"].as_dict()
    total = 1000 + classifier() + efficient(M) + K * M + 1
    assert row["parameters"] == {
        "backbone": 1000,
        "classifier": classifier(),
        "covariance": efficient(M),
        "projection": K * M,
        "temperature": 1,
        "head": total - 1000,
        "total": total,
    }
    assert row["bytes"] == {"weights": 4 * total, "gradients": 4 * total, "optimiser": 8 * total, "total": 16 * total}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes must be at least 1, found 0"),
        ({"in_features": 0}, "in_features must be at least 1, found 0"),
        ({"rank": -1}, "rank must be at least 0, found -1"),
        ({"buckets": 0}, "buckets must be at least 1, found 0"),
        ({"noise_features": 0}, "noise_features must be at least 1, found 0"),
        ({"num_classes": 10**9}, "num_classes must be at most 100,000,000, found 1,000,000,000"),
        ({"covariance": "ful"}, "did you mean 'full'"),
        ({"residual": "rank2"}, "did you mean 'rank1'"),
    ],
)
def test_wrong_options_raise(options, message):
    sizes = {"in_features": D, "num_classes": K}
    with pytest.raises(ValueError, match=message):
        compare_heads(**(sizes | options))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999_999, "999,999"), (1_000_000, "1.00M"), (5_130_000_000, "5,130.00M")]
)
def test_format_count(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**51, "2,048.00 TiB"),
    ],
)
def test_format_bytes(number, text):
    assert format_bytes(number) == text
