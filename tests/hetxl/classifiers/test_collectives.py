"""Each exchange against the same numbers in one process."""

import copy

import pytest
import torch

from hetxl.classifiers.collectives import (
    NEVER,
    Ranks,
    Traffic,
    copy_to_ranks,
    gather_from_ranks,
    log_sum_exp_over_ranks,
    nothing,
    sum_over_ranks,
)
from support import exchanges
from support.exchanges import exchanged
from support.sharded import run

RANKS = 3
TIMEOUT = 3.0
ITEM = 8


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run(exchanges.exchanges, RANKS, tmp_path_factory.mktemp("exchanges"))


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    return run(exchanges.lost, RANKS, tmp_path_factory.mktemp("lost"), TIMEOUT, lost=1)


def test_mesh_has_its_size_and_first_rank(answers):
    assert [rank["size"] for rank in answers] == [RANKS] * RANKS
    assert [rank["first"] for rank in answers] == [0] * RANKS


def test_copies_are_copies_and_their_gradients_are_summed(answers):
    weight, total = exchanged(100), sum(exchanged(rank) for rank in range(RANKS))
    for rank, answer in enumerate(answers):
        value, first, second, size, calls = answer["copy"]
        torch.testing.assert_close(value, (exchanged(99) * exchanged(rank) + exchanged(99)[0].float().double()).sum(0))
        torch.testing.assert_close(first, total * weight.sum(0))
        torch.testing.assert_close(second, (RANKS * 4 * weight.sum(0)).float())
        assert first.dtype == torch.float64
        assert second.dtype == torch.float32
        assert (size, calls) == ((4 * 5 + 5) * ITEM, 1)  # one message for both


def test_sums_keep_the_gradient_of_each_part(answers):
    weight, total = exchanged(100), sum(exchanged(rank) for rank in range(RANKS))
    for answer in answers:
        value, gradient, size, calls = answer["sum"]
        torch.testing.assert_close(value, total)
        torch.testing.assert_close(gradient, weight)
        assert (size, calls) == (4 * 5 * ITEM, 1)


def test_log_sum_exp_is_that_of_all_processes(answers):
    weight = exchanged(100)
    values = torch.stack([exchanged(rank) for rank in range(RANKS)]).requires_grad_()
    parts = torch.stack([exchanged(rank + 50) for rank in range(RANKS)])
    expected = values.logsumexp(0) - parts.sum(0)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), values)
    for rank, answer in enumerate(answers):
        value, of_values, of_parts, size, calls = answer["log-sum-exp"]
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(of_values, gradient[rank])
        torch.testing.assert_close(of_parts, -weight)
        assert (size, calls) == (3 * 4 * 5 * ITEM, 2)


def test_log_sum_exp_with_processes_that_have_nothing(answers):
    for answer in answers:
        torch.testing.assert_close(answer["alone"], torch.full((4, 5), 0.5, dtype=torch.float64))


def test_gathered_columns_are_side_by_side_and_keep_their_gradients(answers):
    weight, total = exchanged(100), 2 * RANKS - 1
    parts = [exchanged(rank)[:, : 1 if rank == RANKS - 1 else 2] for rank in range(RANKS)]
    for rank, answer in enumerate(answers):
        value, gradient, size, calls = answer["gather"]
        torch.testing.assert_close(value, torch.cat(parts, -1))
        torch.testing.assert_close(gradient, weight[:, 2 * rank : 2 * rank + 2][:, : parts[rank].shape[1]])
        assert value.shape[-1] == total
        assert (size, calls) == (4 * 2 * ITEM, 1)


def test_differences_between_processes_are_detected(answers):
    for answer in answers:
        assert answer["differ"].tolist() == [0.0, RANKS - 1.0]


def test_second_derivatives_are_refused(answers):
    assert all("once_differentiable" in answer["twice"] for answer in answers)


def test_one_process_exchanges_nothing():
    ranks, values = Ranks(None), torch.arange(6.0).view(2, 3)
    assert copy_to_ranks(ranks, values)[0] is values
    assert sum_over_ranks(ranks, values) is values
    assert gather_from_ranks(ranks, values, 3) is values
    combined, parts = log_sum_exp_over_ranks(ranks, values, 2 * values)
    torch.testing.assert_close(combined, values)
    torch.testing.assert_close(parts, 2 * values)
    assert ranks.gather(values, "test").shape == (1, 2, 3)
    assert ranks.traffic == Traffic(0, 0)


def test_a_copy_of_the_ranks_counts_for_itself():
    ranks = Ranks(None)
    ranks.traffic.add(torch.zeros(3))
    assert ranks.traffic == Traffic(12, 1)
    assert copy.deepcopy(ranks).traffic == Traffic(0, 0)


def test_nothing_answers_with_zeros_in_the_backward_pass():
    tensors = torch.ones(2, 3, requires_grad=True), torch.ones(4), torch.ones(0, 3, requires_grad=True)
    value = nothing(NEVER, torch.Size((2, 5)), tensors)
    assert value.tolist() == torch.full((2, 5), NEVER).tolist()
    value.sum().backward()
    assert tensors[0].grad.tolist() == [[0.0] * 3] * 2
    assert tensors[1].grad is None
    assert tensors[2].grad.shape == (0, 3)


@pytest.mark.parametrize("how", ["killed", "slow"])
def test_a_lost_process_ends_the_others_within_the_time_out(lost, how):
    answer = lost[0][how]
    assert answer["seconds"] < TIMEOUT + 2
    for words in ("rank 0", f"rank {1 if how == 'killed' else 2},", "gradients", "has ended", "time-out", "checkpoint"):
        assert words in answer["message"]
    assert "torchrun --max-restarts" in answer["message"]
