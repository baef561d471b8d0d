"""Next-word prediction on a dictionary: its text, entries and words, and a slice of the real one."""

import gzip
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl_lab.build.store import open_built, record_builds
from hetxl_lab.datasets.words import (
    NUMBER,
    VERSION,
    Entry,
    build_words,
    load_words,
    paragraphs,
    plain_text,
    read_entries,
    read_words,
    words,
)
from hetxl_train.data import open_dataset
from hetxl_train.data.tokens import OTHER, split_of
from support.packages import cache_with_packages, needs_debian

BENEFIT = """\
Benefit \\Ben"e*fit\\ (b[e^]n"[-e]*f[i^]t), n. [OE. benefet, F.
   bienfait, fr. L. benefactum; (cf. [=a]b) + factum, p. p. of facere to do. See {Bounty}, and
   {Fact [x]}.] (Law)
   1. An act of kindness; a favor conferred; -- also, a gift.
      [1913 Webster]

            Bless the Lord, O my soul, and forget not all his
            benefits.                             --Ps. ciii. 2.
      [1913 Webster]

   2. (Eng. Law) Whatever promotes well-
      being; as, the h[ae]moglobin of 1,913 m[aum]nner. [Obs.]
      "He said . . . so." --Jer. Taylor.
      [Webster 1913 Suppl. +PJC]

   {Benefit of clergy}. See under {Clergy}. -- {Ben`e*fi"cial} (?), a.

   Syn: Profit; service.
        [PJC] Benefiter
"""
CLEAN = [
    "An act of kindness; a favor conferred; -- also, a gift.",
    "Bless the Lord, O my soul, and forget not all his benefits.",
    'Whatever promotes well-being; as, the haemoglobin of 1,913 manner. "He said . . . so."',
    "Benefit of clergy. See under Clergy.",
    "Syn: Profit; service.",
]


def number(value):
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    text = ""
    while True:
        text = digits[value % 64] + text
        value //= 64
        if not value:
            return text


def write(directory, entries, extra=()):
    """A dictionary of texts (bytes) under headwords, as dictd has it."""
    content, lines = b"", list(extra)
    for names, text in entries:
        lines += [f"{name}\t{number(len(content))}\t{number(len(text))}" for name in names]
        content += text + b"\n"
    (directory / "x.index").write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
    (directory / "x.dict.dz").write_bytes(gzip.compress(content))
    return directory / "x.index", directory / "x.dict.dz"


def test_entries_in_the_order_of_the_text(tmp_path):
    entries = read_entries(
        *write(
            tmp_path,
            [
                (["00-database-info"], b"00-database-info\n   About it.\n"),
                (["zoo", "zoos"], b"Zoo  garden \\Zoo\\, n.\n   Animals.\n" * 40),
                (["C\u00e6sar"], 'C[ae]sar \\C[ae]"sar\\ n.\n   A man\u2019s.\n'.encode("cp1252")),
                (["ant"], b"Ant \\Ant\\, n.\n   An insect.\n"),
                (["rest"], b"\n   2. A word.\n"),
            ],
        )
    )
    assert [entry.headword for entry in entries] == ["Zoo garden", "Caesar", "Ant", "Ant"]
    assert entries[0].text == "Zoo  garden \\Zoo\\, n.\n   Animals.\n" * 40
    assert list(paragraphs(entries[1])) == ["A man's."]
    assert list(paragraphs(entries[3])) == ["A word."]


def test_limit_reads_the_first_entries(tmp_path):
    paths = write(tmp_path, [([f"w{n}"], b"W%d \\w\\, n.\n   Text.\n" % n) for n in range(9)])
    assert [entry.headword for entry in read_entries(*paths, 3)] == ["W0", "W1", "W2"]
    assert len(read_entries(*paths)) == 9


@pytest.mark.parametrize(
    "damage",
    [
        lambda index, content: content.write_bytes(b"no gzip"),
        lambda index, content: content.write_bytes(content.read_bytes()[:-12]),
        lambda index, content: content.write_bytes(content.read_bytes()[:12] + b"\xff" * 20),
        lambda index, content: index.write_text("word\tA!\tB\n"),
        lambda index, content: index.write_text("word\n"),
        lambda index, content: index.write_bytes(b"\xff\tA\tB\n"),
    ],
    ids=["no gzip", "cut off", "garbled", "no number", "no fields", "no UTF-8"],
)
def test_damaged_dictionary_raises(tmp_path, damage):
    paths = write(tmp_path, [(["ant"], b"Ant \\Ant\\, n.\n   An insect.\n")])
    damage(*paths)
    with pytest.raises(ValueError, match=r"x.dict.dz or x.index beside it is not a dictionary of dictd"):
        read_entries(*paths)


def test_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x.dict.dz"):
        read_entries(tmp_path / "x.index", tmp_path / "x.dict.dz")


def test_markup_is_removed_from_paragraphs():
    assert list(paragraphs(Entry("Benefit", BENEFIT))) == CLEAN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A \\A\\, n.; pl.\n   {As}.\n   A letter.\n", ["A letter."]),
        ("A \\A\\ (one;\n   two) n.\n   A letter.\n", ["A letter."]),
        ("A \\A\\, n.\n", []),
        ("A \\A\\, n.\n   Internally; inwardly.\n   [PJC] Next word\n", ["Internally; inwardly."]),
        ("A \\A\\, n.\n   One text without an end\n", ["One text without an end"]),
        ("A \\A\\, n.\n   1. (a) (Bot.) A plant. --Gray.\n", ["A plant."]),
        ("A \\A\\, n.\n   To go; -- With with; said of men.\n", ["To go; -- With with; said of men."]),
    ],
)
def test_heads_and_ends_are_removed(text, expected):
    assert list(paragraphs(Entry("A", text))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One's self, well-made; O'er -- all!", ["one's", "self", ",", "well-made", ";", "o'er", "--", "all", "!"]),
        (
            "In 1,913.5 or the 21st (B. C. 40)?",
            ["in", NUMBER, "or", "the", NUMBER, "(", "b", ".", "c", ".", NUMBER, ")", "?"],
        ),
        ("So . . . and... on----", ["so", "...", "and", "...", "on", "--"]),
        ("H2O_x <other> [a] = Été", ["h", NUMBER, "o", "x", "other", "a", "été"]),
        ("", []),
    ],
)
def test_text_is_cut_into_words(text, expected):
    assert words(text) == expected


def test_plain_text_has_readable_spaces():
    text = '"He (a man) came," they said; "so... gone: 1 -- or 2?" we'
    assert plain_text(words(text)) == '"he (a man) came," they said; "so... gone: <number> -- or <number>?" we'
    assert plain_text([]) == ""
    assert plain_text(["<other>", ",", "as"]) == "<other>, as"


@given(st.text(alphabet="ab1 .,;-'\"()[]{}\\\n?", max_size=60))
def test_any_text_is_cut_into_stable_tokens(text):
    tokens = [token for paragraph in paragraphs(Entry("a", text)) for token in words(paragraph)]
    assert all(token == token.lower() and token and " " not in token for token in tokens)
    assert not set("[]{}\\") & set("".join(tokens))
    # What was cut and joined is cut in the same way again, numbers aside.
    plain = [token for token in tokens if token != NUMBER and token[0].isalpha()]
    assert words(" ".join(plain)) == plain


ENTRIES = 3000


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_debian("dict-gcide")
    directory = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_words(entries=ENTRIES, cache=directory)
    return directory


def load(cache, **options):
    return load_words(**({"entries": ENTRIES, "classes": 1000, "cache": cache} | options))


def entry(headword, text):
    return Entry(headword, f"{headword} \\{headword}\\, n.\n   {text}\n")


def test_entries_become_words():
    corpus, repeated = read_words(
        [entry("Ant", "An insect."), entry("Bee hive", "A home."), Entry("C", "C \\C\\, n.\n")]
    )
    assert list(corpus.files) == ["Ant", "Bee hive"]
    texts = [corpus.texts[number] for number in corpus.ids]
    assert texts == ["ant", ":", "an", "insect", ".", "bee", "hive", ":", "a", "home", "."]
    assert corpus.offsets.tolist() == [0, 5, 11]
    assert corpus.ids.dtype == np.int32
    assert repeated == 0


def test_long_paragraphs_are_kept_once():
    long = "Bless the Lord, O my soul, and forget not."
    corpus, repeated = read_words([entry("A", long), entry("B", long), entry("C", "Short."), entry("D", "Short.")])
    assert repeated == 1
    assert list(corpus.files) == ["A", "C", "D"]
    assert read_words([])[0].offsets.tolist() == [0]


def test_dataset_of_the_real_dictionary(cache):
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
    built = open_built("words", {"entries": ENTRIES}, cache, VERSION)
    ids, texts, offsets = built.array("ids"), built.json("texts"), built.array("offsets")
    headwords = built.json("headwords")
    first = next(number for number, word in enumerate(headwords) if split_of(word.casefold()) == "train")
    entry_words = [texts[number] for number in ids[offsets[first] : offsets[first + 1]]]
    dataset = load(cache, context=4)
    targets = [word for word in entry_words if word in dataset.class_names]
    labels = dataset.splits["train"].labels.ids[: len(targets)]
    assert [dataset.class_names[label] for label in labels] == targets
    assert dataset.splits["train"].show(0).text.endswith("→ ?")


def test_splits_share_no_headword_and_no_passage(cache):
    built = open_built("words", {"entries": ENTRIES}, cache, VERSION)
    ids, offsets, headwords = built.array("ids"), built.array("offsets"), built.json("headwords")
    homes = {}
    for word in headwords:
        homes.setdefault(word.casefold(), set()).add(split_of(word.casefold()))
    assert all(len(splits) == 1 for splits in homes.values())
    assert len(homes) < len(headwords)  # several entries of one headword are there, and together
    passages = {name: Counter() for name in ("train", "test")}
    for number, word in enumerate(headwords):
        seen = passages.get(split_of(word.casefold()))
        if seen is not None:
            text = ids[offsets[number] : offsets[number + 1]].tolist()
            seen.update(tuple(text[start : start + 17]) for start in range(len(text) - 16))
    shared = sum(count for passage, count in passages["test"].items() if passage in passages["train"])
    assert passages["test"].total() > 1000
    assert shared / passages["test"].total() < 0.005


def test_other_is_context_and_never_a_target(cache):
    dataset = load(cache)
    assert OTHER not in dataset.class_names
    for split in dataset.splits.values():
        assert split.labels.ids.max() < 1000
        assert (split.fetch(np.arange(500)).inputs == 1000).any()


def test_builds_are_reproducible(cache, tmp_path):
    other = cache_with_packages(tmp_path / "other")
    first = open_built("words", {"entries": ENTRIES}, cache, VERSION).directory
    with record_builds() as builds:
        second = build_words(entries=ENTRIES, cache=other)
        assert build_words(entries=ENTRIES, cache=other) == second
    assert builds == [second]
    files = sorted(path.name for path in first.iterdir())
    assert files == ["headwords.json", "ids.npy", "manifest.json", "offsets.npy", "texts.json"]
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    here, there = (load(directory, limit=100, seed=1) for directory in (cache, other))
    assert len(here.splits["train"]) == 100
    assert list(here.class_names) == list(there.class_names)
    assert here.notes == there.notes
    for name, split in here.splits.items():
        rows = np.arange(100)
        assert split.fetch(rows).inputs.equal(there.splits[name].fetch(rows).inputs)
        np.testing.assert_array_equal(split.labels.ids, there.splits[name].labels.ids)


def test_words_open_by_name(cache):
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
def test_wrong_options_raise(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        load_words(**({"cache": tmp_path} | options))
    assert not list(tmp_path.iterdir())


def test_too_few_entries_raise(tmp_path):
    needs_debian("dict-gcide")
    directory = cache_with_packages(tmp_path)
    build_words(entries=2, cache=directory)
    with pytest.raises(ValueError, match=r"entries must be more than 2: the split '.*' would have no rows"):
        load_words(entries=2, cache=directory)
