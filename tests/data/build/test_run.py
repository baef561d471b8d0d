"""Building by name: what is made, what is told, and what is refused before anything is made."""

import pytest

from hetxl.data.build.run import build_dataset, names
from support.packages import cache_with_packages, needs_debian

SMALL = "words:entries=1500,classes=100"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_debian("dict-gcide")
    folder = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_dataset(SMALL, cache=folder)
    return folder


def test_there_already_and_made_again(cache):
    found = build_dataset(SMALL, cache=cache)
    assert not found.made
    assert found.folder == cache / "built" / "words-1-entries=1500"
    assert found.size == sum(path.stat().st_size for path in found.folder.iterdir())
    assert found.dataset.num_classes == 100
    lines = found.lines()
    assert lines[0].startswith(f"words is there already: {found.folder} (")
    assert lines[1].endswith("; 100 classes")
    assert any(line.startswith("source: dict-gcide ") for line in lines)
    assert any(line.startswith("licence of dict-gcide: ") for line in lines)
    again = build_dataset(SMALL, force=True, cache=cache)
    assert again.made
    assert again.lines()[0].startswith("words: built in ")
    assert again.lines()[1:] == lines[1:]


def test_damage_is_mended(cache):
    folder = build_dataset(SMALL, cache=cache).folder
    (folder / "ids.npy").write_bytes(b"")
    assert build_dataset(SMALL, cache=cache).made


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("wrds", ValueError, "'wrds' is no dataset that can be built; did you mean 'words'?\nwords: next-word"),
        ("pycode", ValueError, "'pycode' is no dataset that can be built\nwords: "),
        ("words:clases=3", TypeError, "'words' has no option 'clases', only classes, .*did you mean 'classes'"),
        ("words:cache=x", TypeError, "'words' has no option 'cache'"),
        ("words:classes=1", ValueError, "classes must be at least 2, found 1"),
        ("words:entries=few", TypeError, "entries must be an integer"),
    ],
)
def test_what_cannot_be_built(tmp_path, data, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")):
        build_dataset(data, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_line_for_each_name():
    assert [line.partition(":")[0] for line in names()] == ["words", "wordnet", "glyphs"]
