"""Heads are saved, loaded and pushed by the conventions of the hub."""

import sys

import pytest
import torch
from huggingface_hub import ModelCard

import hetxl
from hetxl.integrations.hub import from_pretrained, push_to_hub, save_pretrained

NAMES = [f"class {number}" for number in range(7)]


@pytest.fixture
def head():
    torch.manual_seed(0)
    return hetxl.HetXLHead(5, 7, rank=2, noise_init=1.0).eval()


def test_saved_heads_predict_the_same(head, tmp_path):
    save_pretrained(head, tmp_path / "head", class_names=NAMES)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["README.md", "head.safetensors"]
    features = torch.randn(3, 5)
    for name in (tmp_path / "head", str(tmp_path / "head"), tmp_path / "head" / "head.safetensors"):
        assert torch.equal(from_pretrained(name).predict(features).probs, head.predict(features).probs)
    assert from_pretrained(tmp_path / "head", dtype=torch.float64).classifier.weight.dtype == torch.float64


def test_card_of_a_head_is_one_of_the_hub(head, tmp_path):
    save_pretrained(head, tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "hetxl"
    assert "het-xl" in card.data.tags
    assert "5 features to 7\nclasses" in card.text
    save_pretrained(head, tmp_path, card="mine")
    save_pretrained(head, tmp_path)  # a card that somebody wrote stays
    assert (tmp_path / "README.md").read_text() == "mine"


def test_push_to_a_directory_needs_no_hub(head, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert push_to_hub(head, str(tmp_path / "pushed"), class_names=NAMES) == str(tmp_path / "pushed")
    features = torch.randn(3, 5)
    assert torch.equal(from_pretrained(tmp_path / "pushed").predict(features).probs, head.predict(features).probs)
    with pytest.raises(ImportError, match="to push to the hub, install huggingface_hub"):
        push_to_hub(head, "owner/name")
    with pytest.raises(ImportError, match="owner/name is not a directory, and to load it from the hub, install"):
        from_pretrained("owner/name")


def test_names_that_cannot_be_loaded_raise(head, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no head\.safetensors"):
        from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist; pass a directory or a repository"):
        from_pretrained(tmp_path / "missing")
    with pytest.raises(ValueError, match="revision is for repositories"):
        from_pretrained(tmp_path, revision="main")
    with pytest.raises(ValueError, match="neither a directory nor the name of a repository"):
        from_pretrained("--no--")
    with pytest.raises(ValueError, match="cannot be the name of a repository"):
        push_to_hub(head, "--no--")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        push_to_hub(head, str(tmp_path / "file"))
