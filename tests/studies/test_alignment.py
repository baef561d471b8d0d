import math

import pytest
import torch

from hetxl.studies.alignment import FACTORS, LEARNED, RANDOM, STUDY, cosines, expected_random
from hetxl.studies.cache import Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.study import Lab

FORM = FORMS["miniature"]


def test_angles_of_known_subspaces():
    eye = torch.eye(4)
    basis = eye[:, :2]  # the plane of the first two axes
    tilted = torch.tensor([0.0, math.cos(0.3), math.sin(0.3), 0.0])
    noise = torch.stack(
        (torch.stack((5 * tilted, eye[3])), torch.stack((eye[2], eye[3])), torch.stack((eye[0], eye[3])))
    )
    found = cosines(basis, noise)
    assert torch.allclose(found, torch.tensor([math.cos(0.3), 0.0, 1.0]), atol=1e-6)


def test_random_subspaces_are_as_expected():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2000, 60)).Q
    found = cosines(basis, torch.randn(20, 6, 2000)).mean()
    assert float(found) == pytest.approx(expected_random(60, 6, 2000), abs=0.02)
    assert expected_random(8, 8, 4) == 1.0


def test_miniature(studied):
    text, summary = studied("alignment")
    assert summary["sizes"] == {"D": 8, "Q": 3, "K": 20}
    for label in (LEARNED, RANDOM, FACTORS):
        assert [len(one) for one in summary["cosines"][label]] == [FORM.angles, FORM.angles]
        assert all(0 <= value <= 1 + 1e-6 for one in summary["cosines"][label] for value in one)
    assert "K = 20, D = 8, Q = 3" in text
    # A subspace of a subspace is not nearer.
    for whole, part in zip(summary["cosines"][LEARNED], summary["cosines"][FACTORS], strict=True):
        assert all(a <= b + 1e-5 for a, b in zip(part, whole, strict=True))


def test_without_a_finite_training_there_is_nothing_to_measure(tmp_path):
    lab = Lab(FORM, (0,), Cache(tmp_path))
    (training,) = STUDY.trainings(FORM, (0,))
    lab.cache.place(training).mkdir()
    (lab.cache.place(training) / "diverged.json").write_text("{}")
    with pytest.raises(ValueError, match="no training of HET on synthetic stayed finite"):
        STUDY.measure(lab)


@pytest.mark.parametrize(
    ("learned", "word"), [(0.8, "holds here"), (0.1, "does not hold here"), (0.36, "do not decide")]
)
def test_the_conclusion_follows_the_numbers(learned, word):
    spread = [-0.05, 0.0, 0.05]
    around = {LEARNED: learned, RANDOM: 0.35, FACTORS: 0.3}
    summary = {"cosines": {label: [[centre + x for x in spread]] for label, centre in around.items()}}
    text = STUDY.conclusion(summary)
    assert word in text
    assert "Without the residual it is 0.300." in text
