"""HetXLClassifier: scikit-learn's own checks, and what they leave open."""

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification, make_multilabel_classification
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from hetxl.integrations.sklearn import HetXLClassifier, check_parameters

QUICK = {"rank": 2, "train_samples": 4, "eval_samples": 16, "random_state": 0}
X, Y = make_classification(90, 5, n_informative=4, n_redundant=0, n_classes=3, random_state=0)
NAMES = np.array(["red", "green", "blue"])


pytestmark = pytest.mark.usefixtures("one_thread")


def quick(**options):
    return HetXLClassifier(**{**QUICK, "max_iter": 20, **options})


@parametrize_with_checks(
    [
        quick(head=head, train_samples=2, eval_samples=8, tol=1e-3, learning_rate=0.1, max_iter=10)
        for head in ("het-xl", "det")
    ]
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split(images.astype("float32"), labels, test_size=0.25, random_state=0)


def test_clean_digits_are_learned_as_well_as_by_logistic_regression(digits):
    train, test, labels, test_labels = digits
    expected = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(train, labels)
    accuracy = HetXLClassifier(random_state=0).fit(train, labels).score(test, test_labels)
    assert accuracy > expected.score(test, test_labels) - 0.015


def test_noise_helps_where_labels_are_wrong(digits):
    train, test, labels, test_labels = digits
    generator = np.random.default_rng(0)
    wrong = generator.random(len(labels)) < 0.3
    noisy = np.where(wrong, (labels + 1) % 10, labels)
    loss = {}
    for head in ("det", "het-xl"):
        model = HetXLClassifier(head=head, random_state=0).fit(train, noisy)
        loss[head] = log_loss(test_labels, model.predict_proba(test))
    assert loss["het-xl"] < loss["det"] - 0.02


def test_det_head_equals_logistic_regression():
    model = quick(head="det", max_iter=600, batch_size=90, tol=0, learning_rate=0.1, weight_decay=0).fit(X, Y)
    expected = make_pipeline(StandardScaler(), LogisticRegression(C=1e6, max_iter=1000)).fit(X, Y)
    np.testing.assert_allclose(model.predict_proba(X), expected.predict_proba(X), atol=0.01)


@pytest.mark.parametrize("labels", [NAMES, NAMES.astype(object), np.array([7, -1, 3]), np.array([True, False, True])])
def test_labels_come_back_as_they_were(labels):
    model = quick().fit(X, labels[Y])
    predicted = model.predict(X)
    assert predicted.dtype == labels.dtype
    assert set(predicted) <= set(labels)
    assert list(model.classes_) == sorted(set(labels))
    assert model.score(X, labels[Y]) > 0.5
    assert model.predict_proba(X).shape == (90, len(model.classes_))


def test_one_class_is_certain():
    model = quick().fit(X, ["only"] * 90)
    assert set(model.predict(X)) == {"only"}
    np.testing.assert_array_equal(model.predict_proba(X), np.ones((90, 1)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_have_the_dtype_of_the_rows(dtype):
    model = quick().fit(X.astype(dtype), Y)
    assert model.predict_proba(X).dtype == dtype
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1, rtol=10 * np.finfo(dtype).eps)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def test_sparse_rows_are_the_same_rows():
    rows = np.where(np.random.default_rng(0).random(X.shape) < 0.5, 0, X)
    dense, sparse = quick().fit(rows, Y), quick().fit(csr_matrix(rows), Y)
    np.testing.assert_allclose(dense.predict_proba(rows), sparse.predict_proba(csr_matrix(rows)), rtol=1e-6)


def test_fit_is_reproducible_and_leaves_global_generators_unchanged():
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = (quick(batch_size=16).fit(X, Y).predict_proba(X) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, quick(batch_size=16, random_state=1).fit(X, Y).predict_proba(X))


def test_a_row_of_weight_zero_is_left_out_of_small_batches_too():
    weight = np.arange(90) % 3 > 0
    weighted = quick(batch_size=16).fit(X, Y, weight).predict_proba(X)
    np.testing.assert_array_equal(weighted, quick(batch_size=16).fit(X[weight], Y[weight]).predict_proba(X))


def test_only_proportions_of_weights_matter_without_a_prior():
    weight = np.random.default_rng(0).random(90)
    first, second = (
        quick(batch_size=16, weight_decay=0.1).fit(X, Y, factor * weight).predict_proba(X) for factor in (1, 1000)
    )
    np.testing.assert_allclose(first, second, rtol=1e-6)


def test_balanced_classes_are_weighted_by_their_inverse_frequency():
    labels = np.where(np.arange(90) < 70, 0, Y)
    counts = np.bincount(labels)
    decayed = {"weight_decay": 0.1}  # instead of a prior, to which the sum of the weights matters
    balanced = quick(class_weight="balanced", **decayed).fit(X, NAMES[labels])
    by_hand = quick(**decayed).fit(X, NAMES[labels], 1 / counts[labels])
    by_dict = quick(class_weight=dict(zip(NAMES, 1 / counts, strict=True)), **decayed).fit(X, NAMES[labels])
    np.testing.assert_allclose(balanced.predict_proba(X), by_hand.predict_proba(X), rtol=1e-6)
    np.testing.assert_allclose(by_dict.predict_proba(X), by_hand.predict_proba(X), rtol=1e-6)
    assert not np.allclose(quick().fit(X, NAMES[labels]).predict_proba(X), by_hand.predict_proba(X), rtol=1e-2)


def test_partial_fit_learns_from_a_stream():
    model = quick(learning_rate=0.05)
    for _ in range(10):
        for start in range(0, 90, 30):
            model.partial_fit(X[start : start + 30], NAMES[Y[start : start + 30]], classes=NAMES)
    assert model.n_iter_ == len(model.loss_curve_) == 30
    assert model.score(X, NAMES[Y]) > 0.6
    np.testing.assert_allclose(model.network_.mean, X.mean(0))
    np.testing.assert_allclose(model.network_.scale, X.std(0))


def test_pickled_stream_continues_bit_for_bit():
    model = quick(batch_size=16).partial_fit(X, Y, classes=range(3))
    other = pickle.loads(pickle.dumps(model))
    for computed in (model, other):
        computed.partial_fit(X[::-1], Y[::-1])
    np.testing.assert_array_equal(model.predict_proba(X), other.predict_proba(X))


def test_partial_fit_rejects_inconsistent_calls():
    with pytest.raises(ValueError, match="classes must be given to the first call"):
        quick().partial_fit(X, Y)
    with pytest.raises(ValueError, match=r"not among the classes: \[2\]"):
        quick().partial_fit(X, Y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"balanced.*use fit"):
        quick(class_weight="balanced").partial_fit(X, Y, classes=range(3))
    model = quick().partial_fit(X, Y, classes=range(3))
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        model.partial_fit(X, Y, classes=range(4))
    with pytest.raises(ValueError, match="5 features"):
        model.partial_fit(X[:, :2], Y)
    with pytest.raises(ValueError, match="y is multilabel-indicator"):
        model.partial_fit(X, np.eye(3, dtype=int)[Y])


def test_failed_fit_keeps_the_previous_model():
    model = quick().fit(X, Y)
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="sample_weight must not be negative"):
        model.fit(X, Y, -np.ones(90))
    np.testing.assert_array_equal(model.predict_proba(X), before)


def test_warm_start_continues_from_the_last_fit():
    model = quick(warm_start=True).fit(X, Y)
    start, end, network = model.loss_curve_[0], model.loss_curve_[-1], model.network_
    model.fit(X, Y)
    assert model.network_ is network
    assert model.loss_curve_[0] < (start + end) / 2
    assert model.loss_curve_[-1] < end
    assert model.n_iter_ == 20
    with pytest.raises(ValueError, match="not among the classes"):
        model.fit(X, Y + 1)
    assert quick().fit(X, Y).fit(X, Y).loss_curve_[0] == pytest.approx(np.log(3), rel=0.1)


def test_early_stopping_keeps_the_best_weights():
    generator = np.random.default_rng(0)
    rows, labels = generator.normal(size=(60, 30)), generator.integers(2, size=60)  # nothing to learn but by heart
    options = {"early_stopping": True, "validation_fraction": 0.3, "max_iter": 60, "learning_rate": 0.02}
    first, second = (quick(n_iter_no_change=wait, **options).fit(rows, labels) for wait in (3, 6))
    best = int(np.argmin(second.validation_loss_curve_))
    assert best == np.argmin(first.validation_loss_curve_)
    assert first.n_iter_ < second.n_iter_ < 60
    np.testing.assert_array_equal(first.predict_proba(rows), second.predict_proba(rows))
    with pytest.raises(ValueError, match="at least two rows"):
        quick(early_stopping=True).fit(rows[:1], labels[:1])


def test_training_stops_when_the_loss_stops_falling():
    assert quick(head="det", max_iter=100, tol=10.0, n_iter_no_change=5).fit(X, Y).n_iter_ == 56
    # Not before the noise is switched on, after 30 epochs.
    assert quick(max_iter=100, tol=10.0, n_iter_no_change=5).fit(X, Y).n_iter_ == 71
    assert quick(max_iter=30, tol=0).fit(X, Y).n_iter_ == 30


def test_few_rows_get_more_epochs():
    model = HetXLClassifier(**QUICK, head="det", tol=0, batch_size=10).fit(X, Y)
    assert model.n_iter_ == 223  # 9 steps in an epoch, and 2,000 in all


def test_several_labels_for_a_row():
    rows, labels = make_multilabel_classification(100, 8, n_classes=4, random_state=0)[:2]
    model = quick(max_iter=60, learning_rate=0.05).fit(rows, labels)
    probs = model.predict_proba(rows)
    assert probs.shape == (100, 4)
    assert (model.predict(rows) == labels).mean() > 0.75  # 0.79 for one logistic regression each, 0.55 for guessing
    np.testing.assert_array_equal(model.predict(rows), probs > 0.5)
    np.testing.assert_allclose(1 / (1 + np.exp(-model.decision_function(rows))), probs)
    np.testing.assert_array_equal(
        probs, quick(max_iter=60, learning_rate=0.05).fit(rows, csr_matrix(labels)).predict_proba(rows)
    )
    entropy = -(probs * np.log(probs) + (1 - probs) * np.log1p(-probs)).sum(1)
    np.testing.assert_allclose(model.predict_uncertainty(rows).entropy, entropy)
    stream = quick().partial_fit(rows, labels).partial_fit(rows, labels)
    with pytest.raises(ValueError, match="y must have 4 columns, one for each class, found 3"):
        stream.partial_fit(rows, labels[:, :3])
    with pytest.raises(ValueError, match=r"y is .*, and the y of the fit"):
        stream.partial_fit(rows, labels[:, 0])
    with pytest.raises(ValueError, match="class_weight is for one label per row"):
        quick(class_weight="balanced").fit(rows, labels)
    for wrong in (labels + 1, labels * np.arange(4)):
        with pytest.raises(ValueError, match="zeros and ones"):
            quick().fit(rows, wrong)


@pytest.mark.parametrize("head", ["het-xl", "det"])
def test_predict_uncertainty_splits_the_entropy(head):
    model = quick(head=head, noise_init=1.0, hidden=(6,)).fit(X, Y)
    probs, uncertainty = model.predict_proba(X), model.predict_uncertainty(X)
    np.testing.assert_allclose(uncertainty.entropy, -(probs * np.log(probs)).sum(1))
    explained = uncertainty.entropy - uncertainty.expected_entropy
    if head == "det":
        np.testing.assert_allclose(explained, 0, atol=1e-12)
    else:
        assert (explained > 1e-4).all()


def test_two_classes_have_log_odds():
    model = quick().fit(X, Y == 0)
    log_probs = model.predict_log_proba(X)
    np.testing.assert_allclose(model.decision_function(X), log_probs[:, 1] - log_probs[:, 0])


def test_names_of_columns_are_kept_and_checked():
    table = pa.table({name: X[:, column] for column, name in enumerate("abcde")})
    model = quick().fit(table, Y)
    assert list(model.feature_names_in_) == list("abcde")
    np.testing.assert_array_equal(model.predict(table), quick().fit(X, Y).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename_columns(list("abcdx")))


def test_a_grid_search_in_a_pipeline():
    search = GridSearchCV(
        make_pipeline(StandardScaler(), quick(max_iter=10)),
        {"hetxlclassifier__head": ["det", "het-xl"], "hetxlclassifier__rank": np.array([1, 2])},
        cv=2,
        scoring="neg_log_loss",
    )
    assert search.fit(X, NAMES[Y]).best_score_ > -np.log(3)


def test_parameters_survive_a_clone():
    model = quick(hidden=(4, 3), class_weight={0: 2.0}, temperature="learned")
    assert clone(model).get_params() == model.get_params()
    network = model.fit(X, Y).network_
    assert [layer.out_features for layer in network.body if isinstance(layer, torch.nn.Linear)] == [4, 3]
    assert network.head.temperature().item() != 1
    assert quick(temperature=2).fit(X, Y).network_.head.temperature() == 2


def test_features_can_be_left_as_they_are():
    network = quick(standardize=False).fit(X, Y).network_
    assert torch.equal(network(torch.from_numpy(X)), torch.from_numpy(X))


def test_verbose_prints_each_epoch(capsys):
    model = quick(max_iter=3, verbose=True).fit(X, Y)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"epoch {epoch}: loss {loss:.6f}" for epoch, loss in enumerate(model.loss_curve_, 1)]


@pytest.mark.parametrize("head", ["het-xl", "det"])
def test_rescaling_to_clean_labels_lowers_the_loss(digits, head):
    train, test, labels, test_labels = digits
    rng = np.random.default_rng(0)
    other = (labels + rng.integers(1, 10, len(labels))) % 10
    noisy_labels = np.where(rng.random(len(labels)) < 0.4, other, labels)
    model = HetXLClassifier(head=head, max_iter=20, random_state=0).fit(train[200:], noisy_labels[200:])
    before = log_loss(test_labels, model.predict_proba(test))
    assert not hasattr(model, "scales_")
    assert model.rescale(train[:200], labels[:200]) is model
    assert log_loss(test_labels, model.predict_proba(test)) < before - 0.1
    scales, trained = model.scales_, model.network_.head
    assert (trained.temperature(), trained.noise_scale) == scales
    assert model.rescale(train[:200], labels[:200]).scales_ == scales  # of what was trained, and not of the last time


@pytest.mark.parametrize("temperature", [1.0, "learned"])
def test_partial_fit_continues_from_the_unscaled_model(temperature):
    plain, scaled = (quick(temperature=temperature, max_iter=3, warm_start=True).fit(X, Y) for _ in range(2))
    scaled.rescale(X[:30], Y[:30])
    restored = pickle.loads(pickle.dumps(scaled))
    assert np.array_equal(restored.predict_proba(X), scaled.predict_proba(X))
    expected = plain.partial_fit(X, Y).predict_proba(X)
    for model in (scaled, restored):
        assert np.array_equal(model.partial_fit(X, Y).predict_proba(X), expected)
        assert not hasattr(model, "scales_")
    expected = plain.fit(X, Y).predict_proba(X)
    assert np.array_equal(scaled.rescale(X, Y).fit(X, Y).predict_proba(X), expected)


def test_rescale_accepts_a_label_matrix():
    rows, several = make_multilabel_classification(120, 6, n_classes=4, random_state=0)
    model = quick(max_iter=5).fit(rows[:60], several[:60])
    before = model.predict_proba(rows)
    model.rescale(rows[60:], several[60:])
    assert not np.array_equal(model.predict_proba(rows), before)
    with pytest.raises(ValueError, match="labels that are not among the classes"):
        quick(max_iter=1).fit(X, Y).rescale(X, Y + 1)
    with pytest.raises(NotFittedError):
        quick().rescale(X, Y)


def test_wide_rows_need_a_hidden_layer():
    rows = csr_matrix((6, 50_000))
    with pytest.raises(ValueError, match=r"50,000 features needs 2,500,000,000 .* hidden=\(512,\)"):
        quick().fit(rows, [0, 1, 2, 0, 1, 2])
    assert quick(hidden=(4,), max_iter=1).fit(rows, [0, 1, 2, 0, 1, 2]).n_features_in_ == 50_000


def test_scikit_learn_is_imported_only_here_and_named_when_missing():
    code = (
        "import sys, hetxl, hetxl.integrations; print('sklearn' in sys.modules);"
        "sys.modules['sklearn'] = None; import hetxl.integrations.sklearn"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "False"
    assert "ImportError: hetxl.integrations.sklearn needs scikit-learn 1.6 or newer: pip install -U scikit-learn" in (
        process.stderr
    )


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
def test_valid_parameters_pass(options):
    check_parameters(HetXLClassifier(**options))


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_labels_that_are_any_class_alike_are_left_out_of_clean_probabilities(head):
    generator = np.random.default_rng(0)
    labels = generator.integers(4, size=1400)
    X = (4 * np.eye(4)[labels] + generator.normal(size=(1400, 4))).astype(np.float32)
    wrong = generator.random(1400) < 0.4
    y = np.where(wrong, generator.integers(4, size=1400), labels)
    options = {"head": head, "rank": 2, "train_samples": 2, "eval_samples": 16, "max_iter": 20, "random_state": 0}
    model = HetXLClassifier(**options).fit(X[:1200], y[:1200])
    assert model.flip_rate_ == pytest.approx(0.4, abs=0.12)  # 120 held-out rows: a standard error of 0.045
    observed, clean = (model.predict_proba(X[1200:], target=target) for target in ("observed", "clean"))
    rows = np.arange(200)
    losses = [-np.log(probs[rows, labels[1200:]]).mean() for probs in (observed, clean)]
    assert losses[1] < 0.6 * losses[0]
    np.testing.assert_allclose(clean.sum(1), 1, rtol=1e-5)
    if head == "det":
        expected = (1 - model.flip_rate_) * clean + model.flip_rate_ / 4
        np.testing.assert_allclose(observed, expected, rtol=1e-4)
    right = HetXLClassifier(**options).fit(X[:1200], labels[:1200])
    assert right.flip_rate_ == 0
    model.rescale(X[1200:], labels[1200:])
    assert model.network_.head.flip_rate == 0
    with pytest.raises(ValueError, match="target must be one of"):
        model.predict_proba(X, target="true")
