"""Parameters that are refused, by fit and by partial_fit."""

import numpy as np
import pytest

from hetxl.integrations.sklearn import HetXLClassifier
from hetxl.integrations.sklearn_parameters import check_parameters

X, Y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "hetxl"}, "head must be one of .* did you mean 'het-xl'"),
        ({"hidden": 64}, r"hidden must be a tuple of sizes such as \(512,\), found 64"),
        ({"hidden": (0,)}, "hidden == 0, must be >= 1"),
        ({"rank": -1}, "rank == -1"),
        ({"batch_size": 0}, "batch_size == 0"),
        ({"max_iter": 1.5}, "max_iter must be an instance of int"),
        ({"learning_rate": 0}, "learning_rate == 0"),
        ({"validation_fraction": 1.0}, "validation_fraction == 1.0"),
        ({"temperature": "learnt"}, "temperature must be one of 'learned'"),
        ({"temperature": 0.0}, "temperature == 0.0"),
        ({"class_weight": "balance"}, "class_weight must be one of 'balanced'"),
        ({"sampler": "sobel"}, "did you mean 'sobol'"),
    ],
)
def test_bad_parameters_are_named(options, message):
    for train in (lambda model: model.fit(X, Y), lambda model: model.partial_fit(X, Y, classes=range(3))):
        with pytest.raises((ValueError, TypeError), match=message):
            train(HetXLClassifier(**options))


@pytest.mark.parametrize("options", [{}, {"hidden": [8]}, {"temperature": "learned"}, {"max_iter": 3, "rank": 0}])
def test_others_pass(options):
    check_parameters(HetXLClassifier(**options))
