import pytest
import torch

from hetxl.functional import IGNORE_INDEX, LabelLists, check_targets

BATCH, K = torch.Size([3]), 5


def check(targets, link="softmax"):
    return check_targets(targets, BATCH, K, link)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_of_any_integer_type(dtype):
    found = check(torch.tensor([0, 4, 2], dtype=dtype))
    assert found.dense is None
    assert found.ids is not None
    assert found.ids.dtype == torch.int64
    assert found.ids.tolist() == [0, 4, 2]


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_rows_of_any_type(link, dtype):
    found = check(torch.eye(5)[:3].to(dtype), link)
    assert found.ids is None
    assert found.dense is not None
    assert found.dense.is_floating_point()


def test_the_ignored_id_is_allowed():
    assert check(torch.tensor([0, IGNORE_INDEX, 1])).ids is not None


def test_another_id_can_be_ignored_too():
    found = check_targets(torch.tensor([0, 255, 1]), BATCH, K, "softmax", ignore_index=255)
    assert found.ids.tolist() == [0, IGNORE_INDEX, 1]


@pytest.mark.parametrize("bad", [5, -1, 99])
def test_ids_out_of_range(bad):
    with pytest.raises(ValueError, match=rf"class id {bad}; allowed are 0 to 4"):
        check(torch.tensor([0, bad, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_ids_that_are_no_integers(dtype):
    with pytest.raises(TypeError, match=r"class ids must be integers, found dtype"):
        check(torch.tensor([0.0, 1.5, 1.0]).to(dtype))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1), (), (3, 5, 1)])
def test_shapes_that_fit_neither_form(shape):
    with pytest.raises(ValueError, match=r"class ids of shape \[3\] or one row of 5 values .* \[3, 5\]; found shape"):
        check(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(("link", "bad"), [("softmax", -0.1), ("sigmoid", 2.0)])
def test_rows_outside_zero_and_one(link, bad):
    rows = torch.zeros(3, 5)
    rows[1, 2] = bad
    with pytest.raises(ValueError, match=rf"must lie in \[0, 1\], found {bad:g}"):
        check(rows, link)


def test_no_tensor():
    with pytest.raises(TypeError, match="targets must be a tensor, lists of class ids or LabelLists, found str"):
        check_targets("cat", BATCH, K, "sigmoid")


@pytest.mark.parametrize(
    "targets",
    [
        [[0, 3], [], [2]],
        (torch.tensor([0, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([2])),
        LabelLists.from_padded(torch.tensor([[0, 3], [IGNORE_INDEX, IGNORE_INDEX], [2, IGNORE_INDEX]])),
        torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).float().to_sparse(),
    ],
)
def test_lists_of_labels_in_every_form(targets):
    found = check(targets, "sigmoid").lists
    assert found is not None
    assert found.dense(K).tolist() == [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]


def test_soft_labels_in_a_sparse_tensor():
    soft = torch.tensor([[0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0.25, 0, 0]])
    assert torch.equal(check(soft.to_sparse(), "sigmoid").lists.dense(K), soft)


def test_lists_that_do_not_fit():
    with pytest.raises(ValueError, match="targets holds lists for 2 examples and features has 3"):
        check([[1], [2]], "sigmoid")
    with pytest.raises(ValueError, match="class id 5; allowed are 0 to 4"):
        check([[1], [5], []], "sigmoid")
    with pytest.raises(ValueError, match=r"sparse tensor must have shape \[3, 5\], found \[3, 4\]"):
        check(torch.zeros(3, 4).to_sparse(), "sigmoid")
    with pytest.raises(TypeError, match='for link="softmax" give class ids'):
        check([[1], [2], [3]])


def test_the_meta_device_is_not_looked_at():
    assert check(torch.zeros(3, dtype=torch.int64, device="meta")).ids is not None


def test_what_is_compiled_is_checked_too():
    compiled = torch.compile(lambda targets: (check(targets).ids, 1), backend="eager")
    assert compiled(torch.tensor([0, IGNORE_INDEX, 4]))[0].tolist() == [0, IGNORE_INDEX, 4]
    for bad in (K, -1):
        with pytest.raises(ValueError, match=f"class id {bad}; allowed are 0 to 4"):
            compiled(torch.tensor([0, bad, 1]))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], found 2"):
        compiled(torch.full((3, K), 2.0))
