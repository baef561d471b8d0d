import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.evaluation.ordering import by_confidence
from hetxl.evaluation.records import Records
from support.records import with_confidence


def test_examples_of_equal_confidence_share_their_hits():
    ordered = by_confidence(with_confidence([0.5, 0.75, 0.5, 1.0, 0.5], [True, False, False, True, False]))
    assert ordered.confidence.tolist() == [1, 0.75, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(ordered.hit, [1, 0, 1 / 3, 1 / 3, 1 / 3])
    assert ordered.ends.tolist() == [1, 2, 5]
    assert ordered.hits.tolist() == [1, 0, 1]


@given(st.lists(st.tuples(st.sampled_from([0.5, 0.625, 0.75, 1.0]), st.booleans()), min_size=1), st.randoms())
def test_the_order_of_the_examples_does_not_matter(pairs, random):
    first = by_confidence(with_confidence(*zip(*pairs, strict=True)))
    random.shuffle(pairs)
    second = by_confidence(with_confidence(*zip(*pairs, strict=True)))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    assert first.hit.sum() == pytest.approx(sum(hit for _, hit in pairs))


def test_no_examples():
    with pytest.raises(ValueError, match="records must hold at least one example, found none"):
        by_confidence(Records.empty(4))
