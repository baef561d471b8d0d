import numpy as np
import pytest
import torch

from hetxl import HetXLHead
from hetxl.functional import LabelLists
from hetxl.metrics import Records, RecordsBuilder
from hetxl.metrics import records as records_module
from hetxl.metrics.records import label_entries
from hetxl.metrics.summary import precision_at
from support.cases import VARIANTS, make, normals
from support.records import assert_close, predict_logits, records_of, same

LISTS = [[1, 2], [], [0], [3, 3], [6, 5, 4, 3], [2]]


def predicted(variant, link, n=6):
    head = make(variant, link=link)
    features = torch.randn(n, 5, dtype=torch.float64)
    return head, features, normals(head, n)


@pytest.mark.parametrize("variant", VARIANTS)
def test_softmax_numbers_are_those_of_the_whole_matrix(variant):
    head, features, noise = predicted(variant, "softmax")
    targets = torch.tensor([0, 6, 3, 3, 1, 5])
    prediction = head.predict(features, noise=noise)
    gatherer = RecordsBuilder()
    gatherer.add(prediction, targets, np.arange(10, 16))
    records = gatherer.build()
    probs = prediction.probs.numpy()
    onehot = np.eye(7)[targets]
    loss = head.eval()(features, targets, noise=noise, reduction="none")
    np.testing.assert_allclose(-records.log_prob, loss.detach())
    np.testing.assert_allclose(records.squared, ((probs - onehot) ** 2).sum(-1))
    order = np.argsort(-probs, -1)
    assert np.array_equal(records.top_ids, order[:, :5])
    np.testing.assert_allclose(records.top_probs, np.take_along_axis(probs, order[:, :5], -1), rtol=1e-6)
    assert np.array_equal(records.rank, (order == targets.numpy()[:, None]).argmax(-1))
    assert np.array_equal(records.hit, order[:, 0] == targets.numpy())
    assert np.array_equal(records.label, targets)
    assert np.array_equal(records.rows, np.arange(10, 16))
    np.testing.assert_allclose(records.entropy, prediction.entropy)
    np.testing.assert_allclose(records.expected_entropy, prediction.expected_entropy)
    variance = prediction.logit_variance.gather(-1, prediction.top_class.unsqueeze(-1))[:, 0]
    np.testing.assert_allclose(records.logit_std, variance.sqrt(), rtol=1e-6)
    assert (records.logit_std > 0).all() == (variant != "det")


@pytest.mark.parametrize("variant", VARIANTS)
def test_sigmoid_numbers_are_those_of_the_whole_matrix(variant):
    head, features, noise = predicted(variant, "sigmoid")
    lists = LabelLists.from_lists(LISTS)
    prediction = head.predict(features, noise=noise)
    gatherer = RecordsBuilder("sigmoid")
    gatherer.add(prediction, lists, np.arange(6))
    records = gatherer.build()
    probs, dense = prediction.probs.numpy(), lists.dense(7, torch.float64).numpy()
    loss = head.eval()(features, lists, noise=noise, reduction="none")
    np.testing.assert_allclose(-records.log_prob, loss.detach())
    np.testing.assert_allclose(records.squared, ((probs - dense) ** 2).sum(-1))
    order = np.argsort(-probs, -1)
    is_label = np.take_along_axis(dense, order, -1) > 0
    assert np.array_equal(records.rank, np.where(is_label.any(-1), is_label.argmax(-1), 7))
    assert np.array_equal(records.hit, is_label[:, 0])
    assert (records.label == -1).all()


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_single_precision_is_enough(link):
    head = make("het-xl", classes=500, link=link, dtype=torch.float32)
    # Probabilities up to 1 − 1e-6: nearer to 1, a prediction in single precision does not hold 1 − p to four digits.
    torch.nn.init.normal_(head.classifier.weight, std=1.0)
    features, targets = torch.randn(40, 5), torch.randint(500, (40,))
    noise = normals(head, 40, samples=16, dtype=torch.float32)
    gatherer = RecordsBuilder(link)
    gatherer.add(head.predict(features, noise=noise), targets, np.arange(40))
    loss = head.double()(features.double(), targets, noise=noise.double(), reduction="none").detach()
    np.testing.assert_allclose(-gatherer.build().log_prob, loss, rtol=1e-4)


def test_soft_labels_under_the_sigmoid():
    logits = torch.randn(3, 4, dtype=torch.float64)
    dense = torch.tensor([[0.3, 0.9, 0, 0], [0, 0, 0, 0.2], [1, 0, 0.5, 0]], dtype=torch.float64)
    records = records_of(logits, LabelLists.from_sparse(dense.to_sparse()), "sigmoid")
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, reduction="none").sum(-1)
    np.testing.assert_allclose(-records.log_prob, loss)
    np.testing.assert_allclose(records.squared, (logits.sigmoid() - dense).square().sum(-1))
    assert records.rank[1] == 5  # 0.2 is no label


def test_a_class_id_under_the_sigmoid_is_its_one_label():
    logits = torch.randn(4, 6)
    targets = torch.tensor([5, 0, 2, 2])
    by_id = records_of(logits, targets, "sigmoid")
    by_list = records_of(logits, LabelLists.from_lists([[5], [0], [2], [2]]), "sigmoid")
    assert by_id.label.tolist() == targets.tolist()
    assert np.array_equal(by_id.log_prob, by_list.log_prob)
    assert np.array_equal(by_id.rank, by_list.rank)


def test_a_label_that_is_certainly_wrong_stays_finite():
    # float32 holds no probability between 1 − 2⁻²⁴ and 1.
    records = records_of(torch.tensor([[100.0, -100.0]]), torch.tensor([1]), "sigmoid")
    np.testing.assert_allclose(records.log_prob, -100 + np.log(2.0**-24), rtol=1e-6)
    assert records_of(torch.tensor([[0.0, -300.0]]), torch.tensor([1])).log_prob == pytest.approx(-300)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_batches_give_what_one_batch_gives(link, monkeypatch):
    logits = torch.randn(23, 40)
    targets = torch.randint(40, (23,))
    whole = records_of(logits, targets, link)
    monkeypatch.setattr(records_module, "_BLOCK", 3 * 40)  # three examples at a time within a batch
    gatherer = RecordsBuilder(link)
    for rows in np.array_split(np.arange(23), 5):
        gatherer.add(predict_logits(logits[rows], link), targets[rows], rows)
        assert len(gatherer.build()) == rows[-1] + 1
    assert len(gatherer) == 23
    assert_close(gatherer.build(), whole)


def test_ties_do_not_favour_the_label():
    targets = torch.arange(20)
    records = records_of(torch.zeros(20, 20), targets)
    # All classes tie: one label is on top, five are among the top five, as for a guess.
    assert records.hit.sum() == 1
    assert (records.rank < 5).sum() == 5
    assert (records.rank[records.rank >= 5] == 9).all()
    actual = [
        list(row).index(label) if label in row else 9 for row, label in zip(records.top_ids, targets, strict=True)
    ]
    assert records.rank.tolist() == actual


def test_a_hit_is_a_rank_of_zero_and_the_top_classes_hold_the_rank():
    logits = torch.randn(50, 30).round()
    targets = torch.randint(30, (50,))
    records = records_of(logits, targets)
    assert np.array_equal(records.hit, records.rank == 0)
    assert np.array_equal(records.rank < 5, (records.top_ids == targets.numpy()[:, None]).any(-1))
    higher = (logits > logits.gather(1, targets[:, None])).sum(-1).numpy()
    assert (records.rank >= higher).all()


@pytest.mark.parametrize("classes", [1, 2, 5, 6])
def test_records_of_few_classes_keep_all_of_them(classes):
    records = records_of(torch.randn(3, classes), torch.zeros(3, dtype=torch.int64))
    assert records.top_ids.shape == (3, min(5, classes))
    if classes == 1:
        assert records.log_prob.tolist() == [0, 0, 0]
        assert records.squared.tolist() == [0, 0, 0]


def test_few_classes_and_no_label():
    empty = LabelLists.from_lists([[], [], [0]])
    records = records_of(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), empty, link="sigmoid")
    assert records.rank.tolist() == [5, 5, 0]
    assert precision_at(records, 5) == pytest.approx(1 / 3)


def test_predictions_under_autocast():
    head = HetXLHead(8, 10).eval()
    features, targets = torch.randn(4, 8), torch.arange(4)
    expected = RecordsBuilder()
    expected.add(head.predict(features, generator=torch.Generator().manual_seed(0)), targets, np.arange(4))
    builder = RecordsBuilder()
    with torch.autocast("cpu", torch.bfloat16):
        builder.add(head.predict(features, generator=torch.Generator().manual_seed(0)), targets, np.arange(4))
    np.testing.assert_allclose(builder.build().logit_std, expected.build().logit_std, rtol=0.02)


def test_examples_without_a_label_are_left_out():
    logits = torch.randn(4, 6)
    records = records_of(logits, torch.tensor([2, -100, 0, -100]))
    counted = records_of(logits[[0, 2]], torch.tensor([2, 0]))
    assert records.rows.tolist() == [0, 2]
    assert np.array_equal(records.log_prob, counted.log_prob)
    assert len(records_of(logits, torch.full((4,), -100))) == 0


def test_an_empty_batch_adds_nothing():
    gatherer = RecordsBuilder()
    gatherer.add(predict_logits(torch.zeros(0, 3)), torch.zeros(0, dtype=torch.int64), np.arange(0))
    assert same(gatherer.build(), Records.empty(3))


def test_mismatched_batches_raise():
    gatherer = RecordsBuilder()
    head, ids = make("det"), torch.tensor([0, 1])
    features = torch.randn(2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="no batch was added"):
        gatherer.build()
    with pytest.raises(ValueError, match=r"over all classes of a batch, \[b, K\], found \[2, 3\], with top_k"):
        gatherer.add(head.predict(features, top_k=3), ids, np.arange(2))
    with pytest.raises(ValueError, match="rows must name the 2 rows of the prediction, found 3"):
        gatherer.add(head.predict(features), ids, np.arange(3))
    gatherer.add(head.predict(features), ids, np.arange(2))
    with pytest.raises(ValueError, match="prediction has 4 classes, those before had 7"):
        gatherer.add(predict_logits(torch.zeros(2, 4)), ids, np.arange(2))
    features[1, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN for row 9"):
        gatherer.add(head.predict(features), ids, np.array([8, 9]))
    with pytest.raises(ValueError, match="link must be one of"):
        RecordsBuilder("soft-max")


def test_class_ids_become_label_entries():
    entries = label_entries(torch.tensor([3, -100, 0]), 3, 4, "softmax")
    assert entries.ids.tolist() == [3, -100, 0]
    assert entries.examples.tolist() == [0, 2]
    assert entries.classes.tolist() == [3, 0]
    assert entries.values.tolist() == [1, 1]


def test_lists_in_any_order_and_with_repeats_are_those_of_the_dense_matrix():
    lists = LabelLists(
        torch.tensor([2, 0, 2, 0, 2]), torch.tensor([1, 3, 0, 3, 1]), torch.tensor([0.25, 0.75, 1, 0.75, 0.5]), 3
    )
    entries = label_entries(lists, 3, 4, "sigmoid")
    assert entries.ids.tolist() == [-1, -1, -1]
    assert entries.examples.tolist() == [0, 2, 2]
    dense = torch.zeros(3, 4, dtype=torch.float64)
    dense[entries.examples, entries.classes] = entries.values
    assert torch.equal(dense, lists.dense(4, torch.float64))


def test_soft_labels_below_one_half_are_no_hits():
    head = HetXLHead(4, 4, rank=1, link="sigmoid")
    prediction = head.predict(torch.randn(1, 4))
    best = int(prediction.probs.argmax())
    for value, hit in ((0.5, True), (0.4, False)):
        builder = RecordsBuilder("sigmoid")
        builder.add(
            prediction, LabelLists(torch.tensor([0]), torch.tensor([best]), torch.tensor([value]), 1), np.arange(1)
        )
        assert bool(builder.build().hit) is hit


def test_a_part_counts_from_its_own_start():
    lists = LabelLists.from_lists([[1, 2], [], [0], [3]])
    part = label_entries(lists, 4, 4, "sigmoid").of(1, 3)
    assert part.ids.tolist() == [-1, -1]
    assert part.examples.tolist() == [1]
    assert part.classes.tolist() == [0]


@pytest.mark.parametrize(
    ("targets", "link", "error", "words"),
    [
        (torch.tensor([4]), "softmax", ValueError, "the class id 4; allowed are 0 to 3"),
        (LabelLists.from_lists([[0]]), "softmax", TypeError, 'for link="sigmoid"'),
        (torch.rand(1, 4), "sigmoid", TypeError, r"LabelLists\.from_sparse"),
        (torch.tensor([1, 2]), "softmax", ValueError, "found shape"),
    ],
)
def test_invalid_targets_raise(targets, link, error, words):
    with pytest.raises(error, match=words):
        label_entries(targets, 1, 4, link)
