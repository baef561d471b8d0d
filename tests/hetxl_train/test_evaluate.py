import numpy as np
import pytest
import torch
from torch import nn

from hetxl import DetHead, HetXLHead
from hetxl.metrics import RecordsBuilder, summarise
from hetxl_train.evaluate import evaluate
from support.cases import VARIANTS, make
from support.records import ArraySplit, assert_close, records_of, same


def data(n=50, classes=7, **options):
    generator = np.random.default_rng(0)
    return ArraySplit(generator.normal(size=(n, 5)), generator.integers(0, classes, n), **options)


def small(variant="het-xl", **options):
    return make(variant, dtype=torch.float32, eval_samples=8, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_evaluation_gives_the_same_numbers_to_the_bit(variant):
    head, split = small(variant), data()
    first = evaluate(nn.Identity(), head, split, batch_size=16)
    torch.rand(3)
    second = evaluate(nn.Identity(), head, split, batch_size=16)
    assert same(first.records, second.records)
    assert first.pairs == second.pairs
    other = evaluate(nn.Identity(), head, split, batch_size=16, seed=1)
    assert same(first.records, other.records) == (variant == "det")
    assert first.records.rows.tolist() == list(range(50))
    assert first.unreadable == []
    assert first.seconds > 0


def test_evaluation_equals_the_heads_predictions():
    head, split = DetHead(5, 7), data()
    logits = head.logit_distribution(torch.from_numpy(split.inputs)).mean.detach()
    expected = records_of(logits, torch.from_numpy(split.labels.ids))
    assert_close(evaluate(nn.Identity(), head, split, batch_size=13).records, expected)


def test_methods_and_samples_reach_the_head():
    head, split = small(), data()
    rows = torch.from_numpy(split.inputs)
    for options in ({"method": "mean_field"}, {"method": "deterministic"}):
        builder = RecordsBuilder()
        builder.add(head.predict(rows, **options), split.labels.take(np.arange(50)), np.arange(50))
        assert_close(evaluate(nn.Identity(), head, split, **options).records, builder.build())
    assert not same(
        evaluate(nn.Identity(), head, split, num_samples=2).records, evaluate(nn.Identity(), head, split).records
    )


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_backbone_is_evaluated_in_a_lower_precision_and_the_head_is_not(precision):
    torch.manual_seed(0)
    backbone, head, split, seen = nn.Linear(5, 5), small(), data(), []
    backbone.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    predict, received = head.predict, []
    head.predict = lambda features, **options: received.append(features.dtype) or predict(features, **options)
    wide = evaluate(backbone, head, split).records
    low = evaluate(backbone, head, split, precision=precision).records
    assert set(seen) == {torch.float32, getattr(torch, precision)}
    assert set(received) == {torch.float32}
    assert not same(low, wide)
    np.testing.assert_allclose(low.log_prob, wide.log_prob, atol=0.05)


def test_the_batch_size_of_a_deterministic_head_does_not_matter(monkeypatch):
    head, split = small("det"), data()
    whole = evaluate(nn.Identity(), head, split)
    monkeypatch.setattr("hetxl_train.evaluate.MAX_BYTES", 3 * 4 * 7)  # three examples at a time
    blocks = evaluate(nn.Identity(), head, split, batch_size=10)
    assert_close(blocks.records, whole.records)
    for pair, other in zip(blocks.pairs, whole.pairs, strict=True):
        assert pair == {**other, "weight": pytest.approx(other["weight"], rel=1e-5)}


def test_the_probabilities_that_exist_at_a_time_are_bounded(monkeypatch):
    sizes = []

    class Watched(DetHead):
        def predict(self, features, *args, **options):
            sizes.append(len(features))
            return super().predict(features, *args, **options)

    monkeypatch.setattr("hetxl_train.evaluate.MAX_BYTES", 8 * 4 * 7)
    evaluate(nn.Identity(), Watched(5, 7), data(), batch_size=20)
    assert sizes == [8, 8, 4, 8, 8, 4, 8, 2]
    sizes.clear()
    monkeypatch.setattr("hetxl_train.evaluate.MAX_BYTES", 1)
    evaluate(nn.Identity(), Watched(5, 7), data(3), batch_size=20)
    assert sizes == [1, 1, 1]


def test_an_opaque_classifier_gets_fewer_examples_at_a_time(monkeypatch):
    monkeypatch.setattr("hetxl_train.evaluate.MAX_BYTES", 3 * 8 * 4 * 7)  # 8 samples
    calls = []

    def get_logits(features):
        calls.append(len(features))
        return features.repeat(1, 2)[:, :7]

    head = HetXLHead(5, 7, rank=2, classifier=get_logits, eval_samples=8)
    evaluation = evaluate(nn.Identity(), head, data(9))
    assert len(evaluation.records) == 9
    assert max(calls) == 3 * 8


def test_modules_and_generators_are_left_as_they_were():
    backbone = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    head, split = small(), data()
    backbone.train()
    backbone[2].eval()
    head.train()
    state, mean = torch.get_rng_state(), backbone[2].running_mean.clone()
    first = evaluate(backbone, head, split)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(backbone[2].running_mean, mean)
    modes = [module.training for module in (backbone, *backbone, head, head.covariance)]
    assert modes == [True, True, True, False, True, True]
    # Dropout was off: the same again.
    assert same(evaluate(backbone, head, split).records, first.records)


def test_a_backbone_that_draws_is_seeded_too():
    def noisy(inputs):
        return inputs + torch.randn_like(inputs)

    head, split = small("det"), data()
    state = torch.get_rng_state()
    first = evaluate(noisy, head, split)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same(evaluate(noisy, head, split).records, first.records)
    assert not same(evaluate(noisy, head, split, seed=1).records, first.records)


def test_modules_are_restored_after_an_error():
    class Failing(nn.Module):
        def forward(self, inputs):
            raise RuntimeError("out of memory")

    backbone = Failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(backbone, small(), data())
    assert backbone.training


def test_limit_takes_the_same_rows_for_any_seed():
    split = data()
    first = evaluate(nn.Identity(), small(), split, limit=20)
    second = evaluate(nn.Identity(), small("het"), split, limit=20, seed=5)
    rows = first.records.rows
    assert np.array_equal(second.records.rows, rows)
    assert len(set(rows.tolist())) == 20
    assert (np.diff(rows) > 0).all()
    assert rows.max() > 20  # not the first ones
    assert len(evaluate(nn.Identity(), small(), split, limit=1000).records) == 50


def test_unreadable_rows_are_reported_and_left_out():
    split = data(broken=[3, 4, 5, 20])
    evaluation = evaluate(nn.Identity(), small(), split, batch_size=3)  # one batch is all broken
    assert [item.path for item in evaluation.unreadable] == ["row 3", "row 4", "row 5", "row 20"]
    assert len(evaluation.records) == 46
    assert not set(evaluation.records.rows) & {3, 4, 5, 20}
    with pytest.raises(ValueError, match="none of the 50 rows of the split could be read: row 0: cannot be read"):
        evaluate(nn.Identity(), small(), data(broken=range(50)))


def test_rows_without_a_label_are_not_predicted():
    split = data()
    split.labels.ids[::2] = -100
    seen = []
    evaluation = evaluate(lambda inputs: (seen.append(len(inputs)), inputs)[1], small(), split)
    assert evaluation.records.rows.tolist() == list(range(1, 50, 2))
    assert sum(seen) == 25
    split.labels.ids[:] = -100
    with pytest.raises(ValueError, match="none of the 50 rows of the split has a label"):
        evaluate(nn.Identity(), small(), split)


def test_multi_label_rows_are_evaluated():
    labels, offsets = np.array([0, 1, 6, 2, 2, 5]), np.array([0, 2, 2, 3, 6])
    split = ArraySplit(np.random.default_rng(0).normal(size=(4, 5)), labels, offsets)
    evaluation = evaluate(nn.Identity(), small(link="sigmoid"), split, batch_size=3)
    assert evaluation.records.label.tolist() == [-1] * 4
    assert evaluation.records.rank[1] == 7
    assert summarise(evaluation.records)["examples"] == 4
    with pytest.raises(ValueError, match='use link="sigmoid"'):
        evaluate(nn.Identity(), small(), split)


def test_pairs_have_names_and_can_be_left_out():
    names = ["a", "b", "c", "d", "e", "f", "g"]
    head = small()
    evaluation = evaluate(nn.Identity(), head, data(), class_names=names)
    assert 0 < len(evaluation.pairs) <= 20
    assert {entry["first"] for entry in evaluation.pairs} <= set(names)
    assert evaluation.confusions.pairs(names=names) == evaluation.pairs
    without = evaluate(nn.Identity(), head, data(), confusions=False)
    assert (without.pairs, without.confusions) == ([], None)
    assert same(without.records, evaluation.records)


def test_reading_can_be_replaced():
    split, read = data(), []

    def fetch(batches):
        for rows in batches:
            read.append(len(rows))
            yield split.fetch(rows)

    head = small()
    evaluation = evaluate(nn.Identity(), head, split, batch_size=20, fetch=fetch, quiet=True)
    assert read == [20, 20, 10]
    assert same(evaluation.records, evaluate(nn.Identity(), head, split, batch_size=20).records)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"method": "mcmc"}, "method must be one of 'mc'"),
        ({"class_names": ["a"]}, "class_names must be 7 names, one for each class, found 1"),
    ],
)
def test_invalid_arguments_raise(options, words):
    with pytest.raises(ValueError, match=words):
        evaluate(nn.Identity(), small(), data(), **options)
