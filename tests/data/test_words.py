"""Next-word prediction on a real dictionary: a slice of it, built and opened."""

from collections import Counter

import numpy as np
import pytest

from hetxl.data import open_dataset
from hetxl.data.build import array, find, read_json, watched
from hetxl.data.corpus import split_of
from hetxl.data.tokens import OTHER
from hetxl.data.words import VERSION, build_words, load_words, read_words
from hetxl.data.words_text import Entry
from support.packages import cache_with_packages, needs_debian

ENTRIES = 3000


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_debian("dict-gcide")
    folder = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_words(entries=ENTRIES, cache=folder)
    return folder


def load(cache, **options):
    return load_words(**({"entries": ENTRIES, "classes": 1000, "cache": cache} | options))


def entry(headword, text):
    return Entry(headword, f"{headword} \\{headword}\\, n.\n   {text}\n")


def test_entries_become_words():
    corpus, repeated = read_words(
        [entry("Ant", "An insect."), entry("Bee hive", "A home."), Entry("C", "C \\C\\, n.\n")]
    )
    assert list(corpus.files) == ["Ant", "Bee hive"]
    found = [corpus.texts[number] for number in corpus.ids]
    assert found == ["ant", ":", "an", "insect", ".", "bee", "hive", ":", "a", "home", "."]
    assert corpus.offsets.tolist() == [0, 5, 11]
    assert corpus.ids.dtype == np.int32
    assert repeated == 0


def test_long_paragraphs_are_kept_once():
    long = "Bless the Lord, O my soul, and forget not."
    corpus, repeated = read_words([entry("A", long), entry("B", long), entry("C", "Short."), entry("D", "Short.")])
    assert repeated == 1
    assert list(corpus.files) == ["A", "C", "D"]
    assert read_words([])[0].offsets.tolist() == [0]


def test_the_dictionary(cache):
    dataset = load(cache)
    assert dataset.num_classes == 1000
    assert (dataset.input.kind, dataset.input.shape, dataset.input.vocabulary) == ("tokens", (16,), 1003)
    assert {"the", "of", ",", "<number>", "pertaining"} < set(dataset.class_names)
    assert len(dataset.splits["train"]) > 50_000
    for name in ("validation", "test"):
        assert 0.02 < len(dataset.splits[name]) / len(dataset.splits["train"]) < 0.12
    assert not [name for name in dataset.class_names if set(name) & set("[]{}\\*") or name != name.lower()]
    # Marks of the sources would be among the most frequent words.
    assert not {"webster", "pjc", "wordnet", "obs"} & set(dataset.class_names)
    notes = " | ".join(dataset.notes)
    assert "source: dict-gcide " in notes
    assert "licence of dict-gcide: see usr/share/doc/dict-gcide/copyright" in notes
    assert "split by headword" in notes


def test_rows_follow_the_words_of_the_files(cache):
    """The first training entry, by hand."""
    built = find("words", {"entries": ENTRIES}, cache, VERSION)
    ids, texts, offsets = array(built, "ids"), read_json(built, "texts"), array(built, "offsets")
    headwords = read_json(built, "headwords")
    first = next(number for number, word in enumerate(headwords) if split_of(word.casefold()) == "train")
    entry_words = [texts[number] for number in ids[offsets[first] : offsets[first + 1]]]
    dataset = load(cache, context=4)
    targets = [word for word in entry_words if word in dataset.class_names]
    labels = dataset.splits["train"].labels.ids[: len(targets)]
    assert [dataset.class_names[label] for label in labels] == targets
    assert dataset.splits["train"].show(0).text.endswith("→ ?")


def test_splits_share_no_headword_and_no_passage(cache):
    built = find("words", {"entries": ENTRIES}, cache, VERSION)
    ids, offsets, headwords = array(built, "ids"), array(built, "offsets"), read_json(built, "headwords")
    homes = {}
    for word in headwords:
        homes.setdefault(word.casefold(), set()).add(split_of(word.casefold()))
    assert all(len(splits) == 1 for splits in homes.values())
    assert len(homes) < len(headwords)  # several entries of one headword are there, and together
    passages = {name: Counter() for name in ("train", "test")}
    for number, word in enumerate(headwords):
        found = passages.get(split_of(word.casefold()))
        if found is not None:
            text = ids[offsets[number] : offsets[number + 1]].tolist()
            found.update(tuple(text[start : start + 17]) for start in range(len(text) - 16))
    shared = sum(count for passage, count in passages["test"].items() if passage in passages["train"])
    assert passages["test"].total() > 1000
    assert shared / passages["test"].total() < 0.005


def test_other_is_context_and_never_a_target(cache):
    dataset = load(cache)
    assert OTHER not in dataset.class_names
    for split in dataset.splits.values():
        assert split.labels.ids.max() < 1000
        assert (split.fetch(np.arange(500)).inputs == 1000).any()


def test_the_same_files_and_rows_every_time(cache, tmp_path):
    other = cache_with_packages(tmp_path / "other")
    first = find("words", {"entries": ENTRIES}, cache, VERSION).folder
    with watched() as made:
        second = build_words(entries=ENTRIES, cache=other)
        assert build_words(entries=ENTRIES, cache=other) == second
    assert made == [second]
    files = sorted(path.name for path in first.iterdir())
    assert files == ["headwords.json", "ids.npy", "manifest.json", "offsets.npy", "texts.json"]
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    here, there = (load(folder, limit=100, seed=1) for folder in (cache, other))
    assert len(here.splits["train"]) == 100
    assert list(here.class_names) == list(there.class_names)
    assert here.notes == there.notes
    for name, split in here.splits.items():
        rows = np.arange(100)
        assert split.fetch(rows).inputs.equal(there.splits[name].fetch(rows).inputs)
        np.testing.assert_array_equal(split.labels.ids, there.splits[name].labels.ids)


def test_by_name(cache):
    dataset = open_dataset("words", entries=ENTRIES, classes=300, context=4, cache=cache)
    assert (dataset.name, dataset.num_classes, dataset.input.shape) == ("words", 300, (4,))
    many = load(cache, classes=50_000)
    assert any(note.startswith("50,000 classes were asked for") for note in many.notes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": 1}, ValueError, "classes must be at least 2, found 1"),
        ({"classes": 50_001}, ValueError, "classes must be at most 50,000, found 50,001"),
        ({"classes": 8.0}, TypeError, "classes must be an integer"),
        ({"context": 0}, ValueError, "context must be at least 1, found 0"),
        ({"limit": 0}, ValueError, "limit must be at least 1, found 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
        ({"entries": 0}, ValueError, "entries must be at least 1, found 0"),
        ({}, FileNotFoundError, "words is not built on this machine; build it with: hetxl data build words$"),
        ({"entries": 7}, FileNotFoundError, "hetxl data build words:entries=7$"),
    ],
)
def test_bad_options(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        load_words(**({"cache": tmp_path} | options))
    assert not list(tmp_path.iterdir())


def test_too_few_entries(tmp_path):
    needs_debian("dict-gcide")
    folder = cache_with_packages(tmp_path)
    build_words(entries=2, cache=folder)
    with pytest.raises(ValueError, match=r"entries must be more than 2: the split '.*' has no rows of so few"):
        load_words(entries=2, cache=folder)
