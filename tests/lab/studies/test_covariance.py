import math

import pytest
import torch

from hetxl_lab.studies.covariance import FACTORS_ALONE, LEARNED_W, RANDOM_W, SHARED, cosines, expected_random, sizes_of
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.runs import RunCache
from hetxl_lab.studies.study import Lab

SHARING = load_study("sharing")


def test_sharing_study_orders_sizes_by_parameters(studied):
    _, summary = studied("sharing")
    assert [line["label"] for line in summary["lines"]] == [SHARED, "1", "2", "4", "8"]
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert parameters[1:] == sorted(parameters[1:])
    assert parameters[-1] > parameters[0]


def test_sizes_go_from_a_thirty_second_of_the_features_to_all():
    assert sizes_of(PROFILES["full"]) == [4, 8, 16, 32, 64, 128]
    assert sizes_of(PROFILES["miniature"]) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("own", "small", "word"),
    [(2.005, 2.3, "holds here"), (2.3, 2.5, "does not hold here"), (2.005, 1.8, "does not hold")],
)
def test_sharing_the_conclusion_follows_the_numbers(lines, own, small, word):
    summary = lines({(SHARED, "shared"): 2.0, ("4", "own W′"): small, ("128", "own W′"): own})
    text = SHARING.conclusion(summary)
    assert word in text
    assert "with M = D compared with M = 4" in text


RESIDUAL = load_study("residual")


def test_residual_study_has_four_lines(studied):
    text, summary = studied("residual")
    assert [line["label"] for line in summary["lines"]] == [
        "rank-1, learned τ",
        "diagonal, learned τ",
        "rank-1, τ not learned",
        "diagonal, τ not learned",
    ]
    assert len({line["values"]["parameters"] for line in summary["lines"][:2]}) == 1  # as many, the paper says
    # Seconds of runs that ran beside others say nothing of what a residual costs.
    assert "training, s" not in text


@pytest.mark.parametrize(("diagonal", "word"), [(2.001, "holds here"), (2.2, "does not hold here")])
def test_residual_the_conclusion_follows_the_numbers(lines, diagonal, word):
    values = {
        (f"{kind}, {tau}", None): nll
        for tau in ("learned τ", "τ not learned")
        for kind, nll in (("rank-1", 2.0), ("diagonal", diagonal))
    }
    assert word in RESIDUAL.conclusion(lines(values))


def test_a_loss_that_was_not_finite(lines, made_up):
    values = {("rank-1, learned τ", None): 2.0, ("diagonal, learned τ", None): None}
    values |= {("rank-1, τ not learned", None): 2.0, ("diagonal, τ not learned", None): 2.0}
    text = RESIDUAL.conclusion(lines(values))
    assert "not known, as a loss did not stay finite" in text
    assert "do not decide" in text


ALIGNMENT = load_study("alignment")

PROFILE = PROFILES["miniature"]


def test_angles_of_known_subspaces():
    eye = torch.eye(4)
    basis = eye[:, :2]  # the plane of the first two axes
    tilted = torch.tensor([0.0, math.cos(0.3), math.sin(0.3), 0.0])
    noise = torch.stack(
        (torch.stack((5 * tilted, eye[3])), torch.stack((eye[2], eye[3])), torch.stack((eye[0], eye[3])))
    )
    values = cosines(basis, noise)
    assert torch.allclose(values, torch.tensor([math.cos(0.3), 0.0, 1.0]), atol=1e-6)


def test_random_subspaces_are_as_expected():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2000, 60)).Q
    mean = cosines(basis, torch.randn(20, 6, 2000)).mean()
    assert float(mean) == pytest.approx(expected_random(60, 6, 2000), abs=0.02)
    assert expected_random(8, 8, 4) == 1.0


def test_alignment_study_measures_cosines(studied):
    text, summary = studied("alignment")
    assert summary["sizes"] == {"D": 8, "Q": 3, "K": 20}
    for label in (LEARNED_W, RANDOM_W, FACTORS_ALONE):
        assert [len(row) for row in summary["cosines"][label]] == [PROFILE.angles, PROFILE.angles]
        assert all(0 <= value <= 1 + 1e-6 for row in summary["cosines"][label] for value in row)
    assert "K = 20, D = 8, Q = 3" in text
    # A subspace of a subspace is not nearer.
    for whole, part in zip(summary["cosines"][LEARNED_W], summary["cosines"][FACTORS_ALONE], strict=True):
        assert all(a <= b + 1e-5 for a, b in zip(part, whole, strict=True))


def test_without_a_finite_run_there_is_nothing_to_measure(tmp_path):
    lab = Lab(PROFILE, (0,), RunCache(tmp_path))
    (run,) = ALIGNMENT.runs(PROFILE, (0,))
    lab.cache.directory(run).mkdir()
    (lab.cache.directory(run) / "diverged.json").write_text("{}")
    with pytest.raises(ValueError, match="no run of HET on synthetic stayed finite"):
        ALIGNMENT.measure(lab)


@pytest.mark.parametrize(
    ("learned", "word"), [(0.8, "holds here"), (0.1, "does not hold here"), (0.36, "do not decide")]
)
def test_alignment_the_conclusion_follows_the_numbers(learned, word):
    spread = [-0.05, 0.0, 0.05]
    around = {LEARNED_W: learned, RANDOM_W: 0.35, FACTORS_ALONE: 0.3}
    summary = {"cosines": {label: [[centre + x for x in spread]] for label, centre in around.items()}}
    text = ALIGNMENT.conclusion(summary)
    assert word in text
    assert "Without the residual it is 0.300." in text
