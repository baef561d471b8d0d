"""Options behind the name of a built-in dataset."""

import pytest

from hetxl.data.spec import split_spec


def test_options_have_their_types():
    name, options = split_spec("synthetic:noise=0.5,rows=50000,multi-label=True,kind=plain, seed = 3")
    assert name == "synthetic"
    assert options == {"noise": 0.5, "rows": 50000, "multi_label": True, "kind": "plain", "seed": 3}
    assert type(options["rows"]) is int
    assert type(options["multi_label"]) is bool
    assert split_spec("synthetic:flag=FALSE")[1] == {"flag": False}
    assert split_spec("synthetic:rate=1e-3")[1] == {"rate": 1e-3}


@pytest.mark.parametrize("data", ["pycode", "synthetic", "synthetic:"])
def test_no_options(data):
    assert split_spec(data) == (data.rstrip(":"), {})


@pytest.mark.parametrize("data", ["folder/synthetic:rows=5", "C:/pictures", "s3:bucket,a=b", "features.npy", ""])
def test_a_path_has_no_options(data):
    assert split_spec(data) == (data, {})


@pytest.mark.parametrize("part", ["rows", "=5", " =5"])
def test_what_is_no_option_is_named(part):
    with pytest.raises(ValueError, match=f"write options as synthetic:option=value,option=value, found '{part}'"):
        split_spec(f"synthetic:noise=1,{part}")


def test_twice():
    with pytest.raises(ValueError, match="multi_label is given twice; keep one"):
        split_spec("synthetic:multi-label=true,multi_label=false")
