"""The text of a dictionary: entries found, markup gone, words cut and joined."""

import gzip
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.data.words_text import NUMBER, Entry, paragraphs, plain_text, read_entries, words

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


def write(folder, entries, extra=()):
    """A dictionary of texts (bytes) under headwords, as dictd has it."""
    content, lines = b"", list(extra)
    for names, text in entries:
        lines += [f"{name}\t{number(len(content))}\t{number(len(text))}" for name in names]
        content += text + b"\n"
    (folder / "x.index").write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
    (folder / "x.dict.dz").write_bytes(gzip.compress(content))
    return folder / "x.index", folder / "x.dict.dz"


def test_entries_in_the_order_of_the_text(tmp_path):
    found = read_entries(
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
    assert [entry.headword for entry in found] == ["Zoo garden", "Caesar", "Ant", "Ant"]
    assert found[0].text == "Zoo  garden \\Zoo\\, n.\n   Animals.\n" * 40
    assert list(paragraphs(found[1])) == ["A man's."]
    assert list(paragraphs(found[3])) == ["A word."]


def test_only_the_first(tmp_path):
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
def test_files_that_are_no_dictionary(tmp_path, damage):
    paths = write(tmp_path, [(["ant"], b"Ant \\Ant\\, n.\n   An insect.\n")])
    damage(*paths)
    with pytest.raises(ValueError, match=r"x.dict.dz or x.index beside it is not a dictionary of dictd"):
        read_entries(*paths)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x.dict.dz"):
        read_entries(tmp_path / "x.index", tmp_path / "x.dict.dz")


def test_markup_goes_and_text_stays():
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
def test_heads_and_ends(text, expected):
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
def test_words(text, expected):
    assert words(text) == expected


def test_text_for_readers():
    text = '"He (a man) came," they said; "so... gone: 1 -- or 2?" we'
    assert plain_text(words(text)) == '"he (a man) came," they said; "so... gone: <number> -- or <number>?" we'
    assert plain_text([]) == ""
    assert plain_text(["<other>", ",", "as"]) == "<other>, as"


@given(st.text(alphabet="ab1 .,;-'\"()[]{}\\\n?", max_size=60))
def test_any_text_is_cut(text):
    tokens = [token for paragraph in paragraphs(Entry("a", text)) for token in words(paragraph)]
    assert all(token == token.lower() and token and " " not in token for token in tokens)
    assert not set("[]{}\\") & set("".join(tokens))
    # What was cut and joined is cut in the same way again, numbers aside.
    plain = [token for token in tokens if token != NUMBER and token[0].isalpha()]
    assert words(" ".join(plain)) == plain
