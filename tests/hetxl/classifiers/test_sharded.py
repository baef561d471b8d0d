"""W split over 1, 2 and 4 processes: losses, gradients, checkpoints and restarts are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetxl import DetHead, HetHead, HetXLHead
from hetxl.classifiers.sharded import BLOCK, ShardedClassifier
from support import sharded
from support.distributed import gradients
from support.sharded import CASES, LINKS, SIZES, B, D, S, answers_of, loss_and_gradients, run, setting, trained

SUPPORT = Path(sharded.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def answers_by_ranks(folder):
    """What each process answers, by how many there are; four first, which leave a checkpoint for the others."""
    return {ranks: run(sharded.everything, ranks, folder, folder) for ranks in (4, 1, 2, 3)}


def assert_same(actual, expected, tolerance=1e-10):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=1e-13, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_all_gradients_are_those_of_one_process(answers_by_ranks, name, ranks):
    expected = loss_and_gradients(name, plain=True)
    for answer in answers_by_ranks[ranks]:
        assert_same(answer["cases"][name], expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicated_gradients_are_the_same_to_the_bit(answers_by_ranks, ranks):
    for name in CASES:
        for answer in answers_by_ranks[ranks][1:]:
            for what, value in answers_by_ranks[ranks][0]["cases"][name].items():
                assert torch.equal(answer["cases"][name][what], value), (name, what)


@pytest.mark.parametrize("name", CASES)
def test_one_process_without_a_mesh(name):
    assert_same(loss_and_gradients(name), loss_and_gradients(name, plain=True))
    assert not dist.is_initialized()


@pytest.mark.parametrize("link", LINKS)
def test_traffic_does_not_depend_on_the_number_of_classes(answers_by_ranks, link):
    few, many = ({answer["bytes"][link, classes] for answer in answers_by_ranks[4]} for classes in SIZES)
    assert few == many
    ((size, calls),) = few
    rank = 2
    in_forward = 3 * B * S if link == "softmax" else B
    in_backward = 3 * B * D + rank * D  # features, scale and residual; factors
    assert size == 8 * (in_forward + in_backward)
    assert calls == (3 if link == "softmax" else 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_checkpoint_of_four_processes_is_read_by_any_number(answers_by_ranks, ranks):
    expected = answers_of(trained(None))
    for answer in answers_by_ranks[ranks]:
        assert torch.equal(answer["loaded"]["indices"], expected["indices"])
        torch.testing.assert_close(answer["loaded"]["probs"], expected["probs"], rtol=1e-10, atol=0)
        assert answer["loaded"]["draws"] == expected["draws"] == 3


@pytest.mark.parametrize("name", ["det softmax", "samples first", "sigmoid rows"])
def test_data_and_classes_on_two_by_two_processes_under_fsdp(answers_by_ranks, name):
    model, inputs, targets, options = setting(name, plain=True)
    del options["weight"]
    model(inputs, targets.clamp(min=0), **options).backward()
    for answer in answers_by_ranks[4]:
        assert_same(answer["two by two"][name], gradients(model))
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(answer["two by two"][f"{name} norm"], norm)
        assert answer["two by two"][f"{name} predicted"][0].shape == (B, 2)
        assert answer["two by two"][f"{name} predicted"][1].shape == (B, 2, 2)
    assert "register_fsdp_forward_method" in answers_by_ranks[4][0]["two by two"]["not gathered"]


def test_replicas_draw_other_noise_and_the_processes_of_one_the_same(answers_by_ranks):
    answers = [answer["two by two"] for answer in answers_by_ranks[4]]
    assert [answer["stream"] for answer in answers] == [0, 0, 2, 2]
    assert torch.equal(answers[0]["noise"], answers[1]["noise"])
    assert torch.equal(answers[2]["noise"], answers[3]["noise"])
    assert not torch.equal(answers[0]["noise"], answers[2]["noise"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_noise_is_the_same_everywhere_and_new_for_every_draw(answers_by_ranks, ranks):
    classifier = ShardedClassifier(D, 11, seed=5)
    first, second = (torch.randn(3, generator=classifier.noise_generator()) for _ in range(2))
    assert not torch.equal(first, second)
    for answer in answers_by_ranks[ranks]:
        values = answer["draws"]["values"]
        assert torch.equal(values[0], first)
        assert torch.equal(values[1], second)
        assert torch.equal(values[2], values[3])  # evaluation does not disturb training
        assert not torch.equal(values[2], second)
        assert answer["draws"]["count"] == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_initial_values_do_not_depend_on_the_number_of_processes(answers_by_ranks, ranks):
    expected = sharded.initial(None)
    covered = []
    for answer in answers_by_ranks[ranks]:
        assert torch.equal(answer["initial"]["weight"], expected["weight"])
        assert torch.equal(answer["initial"]["bias"], expected["bias"])
        covered += answer["initial"]["classes"]
    assert covered == list(range(2500))


def test_initial_values_are_as_those_of_nn_linear():
    classifier = ShardedClassifier(16, 3000)
    bound = 1 / 4
    for values in (classifier.weight, classifier.bias):
        assert values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not torch.equal(classifier.weight[:BLOCK], classifier.weight[BLOCK : 2 * BLOCK])
    assert torch.equal(ShardedClassifier(16, 5000).weight[:3000], classifier.weight)
    assert not torch.equal(ShardedClassifier(16, 3000, seed=1).weight, classifier.weight)


@pytest.mark.parametrize("ranks", [2, 4])
def test_operations_over_all_classes_raise_when_sharded(answers_by_ranks, ranks):
    fixes = {
        "rows": "targets must be class ids",
        "smoothing": "label_smoothing=0.1",
        "method": f'with classes on {ranks} use "mc" or "deterministic"',
        "log-probabilities": "pass targets to the head",
        "other features": "the same batch",
        "other labels": "the same batch",
        "other noise": "the same batch",
        "device": "leave device out",
    }
    for answer in answers_by_ranks[ranks]:
        assert answer["refused"].keys() == fixes.keys()
        for name, words in fixes.items():
            assert words in answer["refused"][name]


def test_a_mesh_of_two_dimensions_is_refused(answers_by_ranks):
    assert 'mesh["classes"]' in answers_by_ranks[4][0]["two by two"]["mesh of two dimensions"]


def test_noise_beside_the_classifier_is_refused():
    classifier = ShardedClassifier(D, 11)
    with pytest.raises(ValueError, match="noise must go through it"):
        HetHead(D, 11, classifier=classifier)
    with pytest.raises(ValueError, match="noise must go through it"):
        HetXLHead(D, 11, noise_features=3, classifier=classifier)
    with pytest.raises(ValueError, match="seed must be"):
        ShardedClassifier(D, 11, seed=-1)
    with pytest.raises(ValueError, match="stream must be"):
        ShardedClassifier(D, 11, stream=-1)


def test_one_process_does_all_that_a_linear_layer_does():
    classifier = ShardedClassifier(D, 11)
    linear = nn.Linear(D, 11)
    linear.load_state_dict({"weight": classifier.weight.detach(), "bias": classifier.bias.detach()})
    head, plain = DetHead(D, 11, classifier=classifier), DetHead(D, 11, classifier=linear)
    features = torch.randn(B, D)
    torch.testing.assert_close(head(features), plain(features))
    rows = torch.rand(B, 11).softmax(-1)
    torch.testing.assert_close(
        head.loss(features, rows, label_smoothing=0.1), plain.loss(features, rows, label_smoothing=0.1)
    )
    classes = torch.tensor([[0, 10]]).expand(B, 2)
    torch.testing.assert_close(classifier.logits_of(features, classes), linear(features)[:, [0, 10]])
    noisy = HetXLHead(D, 11, rank=2, classifier=classifier)
    prediction = noisy.predict(features, top_k=2, method="mean_field")
    assert prediction.covariance.shape == (B, 2, 2)


def test_classifier_without_bias_computes_products_alone():
    classifier = ShardedClassifier(D, 11, bias=False)
    assert classifier.bias is None
    features = torch.randn(B, D)
    torch.testing.assert_close(classifier(features), features @ classifier.weight.T)
    classes = torch.tensor([[3]]).expand(B, 1)
    torch.testing.assert_close(classifier.logits_of(features, classes), classifier(features)[:, [3]])


def test_the_count_of_draws_follows_the_state():
    first, second = (ShardedClassifier(D, 11) for _ in range(2))
    drawn = [torch.randn(3, generator=first.noise_generator()) for _ in range(3)]
    second.noise_generator()
    second.load_state_dict(first.state_dict())
    assert not torch.equal(torch.randn(3, generator=second.noise_generator()), drawn[1])
    assert int(second.draws) == 4
    second.reset_parameters()
    assert torch.equal(torch.randn(3, generator=second.noise_generator()), drawn[0])


def test_parameters_made_without_memory_are_drawn_later():
    classifier = ShardedClassifier(D, 11, device="meta")
    assert classifier.weight.is_meta
    classifier.to_empty(device="cpu").reset_parameters()
    assert torch.equal(classifier.weight, ShardedClassifier(D, 11).weight)


def test_activation_checkpointing_is_refused():
    head = HetXLHead(D, 11, rank=2, classifier=ShardedClassifier(D, 11))
    features = torch.randn(B, D, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(head.loss, features, torch.arange(B), use_reentrant=False)
    with pytest.raises(RuntimeError, match="activation checkpointing"):
        loss.backward()


@pytest.mark.slow
def test_killed_run_resumes_from_its_checkpoint(folder):
    steps, every, last = 12, 5, 8
    out, marker = folder / "killed", folder / "marker"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [SUPPORT / "killed_rank.py", marker, str(last), "--out", out, f"--steps={steps}", f"--every={every}"]
    # Else a restart may read the addresses of processes that have ended.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=env)
    assert process.returncode == 0, process.stderr
    assert marker.exists()

    run(sharded.example, 2, folder, folder / "whole", steps, every)
    logs = [(run_dir / "log.jsonl").read_text().splitlines() for run_dir in (out, folder / "whole")]
    killed, whole = ([json.loads(line) for line in lines] for lines in logs)
    restart = next(index for index in range(1, len(killed)) if killed[index]["step"] <= killed[index - 1]["step"])
    assert [entry["step"] for entry in killed[restart:]] == list(range(every + 1, steps + 1))
    assert killed[restart - 1]["step"] in (last, last + 1)
    assert killed[restart:] == whole[every:]  # the losses too, to the bit
    assert [entry["step"] for entry in whole] == list(range(1, steps + 1))
