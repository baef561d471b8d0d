"""Libraries around scikit-learn's interface, with `HetXLClassifier` inside: cleanlab, MAPIE, calibration, searches."""

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_class_weight

from hetxl.integrations.sklearn import HetXLClassifier

pytestmark = pytest.mark.usefixtures("one_thread")


def quick(**options):
    return HetXLClassifier(**{"max_iter": 15, "rank": 4, "random_state": 0} | options)


@pytest.fixture(scope="module")
def noisy_digits():
    """Digits with a quarter of the labels of the first 900 rows those of the next digit; which; and 400 right ones."""
    images, digits = load_digits(return_X_y=True)
    wrong = np.random.default_rng(0).random(900) < 0.25
    return images[:900], (digits[:900] + wrong) % 10, wrong, images[900:1300], digits[900:1300]


def test_cleanlab_finds_wrong_labels_and_trains_without_them(noisy_digits):
    from cleanlab.classification import CleanLearning

    rows, labels, wrong, test_rows, test_labels = noisy_digits
    cleaner = CleanLearning(quick(), cv_n_folds=3, seed=0)
    cleaner.fit(rows, labels)
    issues = cleaner.get_label_issues()["is_label_issue"].to_numpy()
    assert wrong[issues].mean() > 0.7
    assert issues[wrong].mean() > 0.7
    assert cleaner.score(test_rows, test_labels) > quick(head="det").fit(rows, labels).score(test_rows, test_labels)


def test_mapie_sets_cover_the_labels(noisy_digits):
    from mapie.classification import SplitConformalClassifier

    rows, labels, _, test_rows, test_labels = noisy_digits
    model = quick().fit(rows, labels)
    sets = SplitConformalClassifier(model, confidence_level=0.9, prefit=True)
    sets.conformalize(test_rows[:200], test_labels[:200])
    predicted, inside = sets.predict_set(test_rows[200:])
    assert np.array_equal(predicted, model.predict(test_rows[200:]))
    assert inside[np.arange(200), test_labels[200:], 0].mean() > 0.82  # 0.9 but for the draw of 200 and 200 rows
    assert 1 <= inside.sum(1).mean() < 4


def test_calibration_to_right_labels_lowers_the_loss(noisy_digits):
    from sklearn.frozen import FrozenEstimator

    rows, labels, _, test_rows, test_labels = noisy_digits
    model = quick().fit(rows, labels)
    calibrated = CalibratedClassifierCV(FrozenEstimator(model), method="temperature")
    calibrated.fit(test_rows[:200], test_labels[:200])
    losses = [log_loss(test_labels[200:], each.predict_proba(test_rows[200:])) for each in (model, calibrated)]
    assert losses[1] < losses[0]


def test_calibration_by_folds_trains_a_model_for_each(noisy_digits):
    rows, labels, _, test_rows, test_labels = noisy_digits
    calibrated = CalibratedClassifierCV(quick(max_iter=5), cv=2).fit(rows[:300], labels[:300])
    probs = calibrated.predict_proba(test_rows)
    assert len(calibrated.calibrated_classifiers_) == 2
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-6)
    assert (probs.argmax(1) == test_labels).mean() > 0.6


def test_class_weights_on_a_stream_raise_the_recall_of_a_rare_class():
    generator = np.random.default_rng(0)
    labels = (generator.random(5000) < 0.08).astype(int)
    rows = generator.normal(size=(5000, 4)).astype("float32") + labels[:, None]
    balanced = dict(enumerate(compute_class_weight("balanced", classes=np.arange(2), y=labels[:300])))
    recalls = []
    for class_weight in (None, balanced):
        stream = quick(class_weight=class_weight, batch_size=16)
        for part in np.split(np.arange(1000), 10):
            stream.partial_fit(rows[part], labels[part], classes=[0, 1])
        recalls.append((stream.predict(rows[1000:])[labels[1000:] == 1] == 1).mean())
    assert recalls[1] > recalls[0] + 0.2
