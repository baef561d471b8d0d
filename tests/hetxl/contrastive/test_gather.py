"""Pairs over 1, 2 and 4 processes: losses and gradients are those of one process with all of them."""

import copy

import pytest
import torch

from hetxl.contrastive import ContrastiveLoss
from hetxl.contrastive.gather import Alone, Peers, Share
from support import contrastive
from support.contrastive import CASES, EVEN, UNDER_DDP, UNEVEN, B, Pairs, inputs, normals, rows_of, step, whole
from support.sharded import run


@pytest.fixture(scope="module")
def actual(tmp_path_factory):
    """What each process answers, by how many there are."""
    folder = tmp_path_factory.mktemp("pairs")
    return {ranks: run(contrastive.everything, ranks, folder) for ranks in (1, 2, 4)}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.parametrize("split", [EVEN, UNEVEN])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(actual, name, split):
    expected = whole(name)
    for ranks in (1, 2, 4) if split == EVEN else (4,):
        for answer in actual[ranks]:
            assert_same(answer[f"{name}, {split}"], expected)


@pytest.mark.parametrize("name", UNDER_DDP)
def test_ddp_waits_for_no_parameter_and_takes_the_right_mean(actual, name):
    expected = whole(name)
    for ranks in (1, 2, 4):
        for answer in actual[ranks]:
            assert_same(answer[f"{name}, DDP"], expected)


def test_uneven_batches_are_uneven():
    parts = [rows_of(rank, 4, UNEVEN) for rank in range(4)]
    assert [part.stop - part.start for part in parts] == [4, 4, 4, 0]


def test_without_samples_all_parameters_still_have_gradients(actual):
    expected = step(Pairs(), slice(0, B), num_samples=0)
    assert float(expected["loss.image_noise.covariance.loadings.weight"].abs().max()) == 0
    for ranks in (1, 2, 4):
        for answer in actual[ranks]:
            assert_same(answer["no samples"], expected)


def test_the_same_generator_on_all_processes_draws_for_the_whole_batch(actual):
    expected = step(Pairs(), slice(0, B), generator=torch.Generator().manual_seed(5))
    for ranks in (1, 2, 4):
        for answer in actual[ranks]:
            assert_same(answer["generator"], expected)


@pytest.mark.parametrize("name", ["alone", "own group"])
def test_a_process_can_keep_to_itself(actual, name):
    for ranks in (2, 4):
        for rank, answer in enumerate(actual[ranks]):
            assert_same(answer[name], step(Pairs(noise="none"), rows_of(rank, ranks, EVEN)))


def test_the_ring_without_gradients(actual):
    model = Pairs(link="sigmoid")
    expected = model(*inputs(), noise=normals(model, 1)).detach()
    for ranks in (1, 2, 4):
        for answer in actual[ranks]:
            torch.testing.assert_close(answer["evaluated"], expected)


def test_one_process_without_torch_distributed():
    assert Peers().size == Alone().size == 1
    assert Peers().rank == Alone().rank == 0
    share = Share(Peers(), [3])
    values = torch.ones(3, 2)
    assert share.gather(values, same_loss=False) is values
    assert share.weight == pytest.approx(1 / 3)
    assert share.own == slice(0, 3)


def test_a_loss_is_copied_with_its_connections():
    loss = ContrastiveLoss(4)
    assert copy.deepcopy(loss).peers.group is loss.peers.group
