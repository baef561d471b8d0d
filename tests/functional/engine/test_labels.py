import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import IGNORE_INDEX, LabelLists, Targets, check_targets
from hetxl.functional.engine.labels import LabelBlocks

B, K = 6, 11
LIKE = torch.empty(0, dtype=torch.float64)
SOFT = torch.rand(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IDS = torch.tensor([3, 0, 10, 5, 7, 7])
LISTS = [[0, 4], [], [10], [1, 2, 3], list(range(K)), [5]]


def matrix_of_lists():
    out = torch.zeros(B, K, dtype=torch.float64)
    for example, classes in enumerate(LISTS):
        out[example, classes] = 1
    return out


SPARSE = SOFT * (SOFT > 0.6)
PADDED = torch.full((B, K), IGNORE_INDEX)
for row, classes in enumerate(LISTS):
    PADDED[row, : len(classes)] = torch.tensor(classes)
FORMS = {
    "dense": (SOFT, SOFT),
    "integers": ((SOFT > 0.5).long(), (SOFT > 0.5).double()),
    "ids": (IDS, torch.nn.functional.one_hot(IDS, K).double()),
    "lists": (LISTS, matrix_of_lists()),
    "padded": (LabelLists.from_padded(PADDED), matrix_of_lists()),
    "sparse": (SPARSE.to_sparse(), SPARSE),
    "empty": ([[]] * B, torch.zeros(B, K, dtype=torch.float64)),
}


def slices(total):
    """Any slice with at least one entry."""
    pairs = st.tuples(st.integers(0, total - 1), st.integers(1, total))
    return pairs.map(lambda pair: slice(pair[0], min(total, pair[0] + pair[1])))


@pytest.mark.parametrize("form", FORMS)
@given(examples=slices(B), classes=slices(K))
def test_a_block_is_a_slice_of_the_matrix(form, examples, classes):
    targets, matrix = FORMS[form]
    blocks = LabelBlocks(check_targets(targets, torch.Size([B]), K, "sigmoid"), LIKE)
    torch.testing.assert_close(blocks.block(examples, classes), matrix[examples, classes].T, rtol=0, atol=0)


def test_a_label_named_twice_is_one_label():
    blocks = LabelBlocks(Targets(lists=LabelLists.from_lists([[2, 2, 2], [1]])), LIKE)
    assert blocks.block(slice(0, 2), slice(0, 4)).T.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("form", FORMS)
def test_blocks_have_the_precision_of_the_sums(form):
    targets, matrix = FORMS[form]
    like = torch.empty(0, dtype=torch.float32)
    block = LabelBlocks(check_targets(targets, torch.Size([B]), K, "sigmoid"), like).block(slice(0, B), slice(0, K))
    assert block.dtype == torch.float32
    torch.testing.assert_close(block, matrix.T.float(), rtol=0, atol=0)


def test_a_block_of_examples_that_are_left_out_can_be_made():
    # An ignored id is read as class 0; the example's weight of 0 takes it out of the loss.
    blocks = LabelBlocks(Targets(ids=torch.tensor([IGNORE_INDEX, 2])), LIKE)
    assert blocks.block(slice(0, 2), slice(0, 3)).shape == (3, 2)


def test_a_batch_of_several_dimensions_is_flattened():
    for targets in (Targets(ids=IDS.view(2, 3)), Targets(dense=torch.nn.functional.one_hot(IDS, K).view(2, 3, K))):
        block = LabelBlocks(targets, LIKE).block(slice(2, 5), slice(0, K))
        assert block.argmax(0).tolist() == IDS[2:5].tolist()
