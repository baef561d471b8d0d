"""The reader of WordNet's files: on lines of their format, and on the real ones."""

import re

import pytest

from hetxl.data.wordnet_files import FILES, PARTS, Synset, definition, read_senses, read_synsets
from support.packages import needs_debian

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
DOG = (
    "02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 004 @ 02083346 n 0000 #m 02083863 n 0000 "
    '@i 01317541 n 0000 @ 02083346 n 0000 | a member of the genus Canis; "the dog barked all night"  \n'
)
GALORE = '00013887 00 s 02 abounding 0 galore(ip) 0 001 & 00013662 a 0000 | existing in abundance; "whiskey galore"  \n'
BREATHE = "00001740 29 v 01 breathe 0 001 @ 00005041 v 0000 02 + 02 00 + 08 00 | draw air into the lungs  \n"


def test_a_noun(tmp_path):
    (tmp_path / "data.noun").write_text(LICENCE + DOG)
    assert read_synsets(tmp_path, "noun") == [
        Synset(
            key="n02084071",
            file=5,
            words=("dog", "domestic dog", "Canis familiaris"),
            hypernyms=("n02083346", "n01317541"),
            gloss='a member of the genus Canis; "the dog barked all night"',
        )
    ]


def test_a_verb_with_frames_and_an_adjective_with_a_marker(tmp_path):
    (tmp_path / "data.verb").write_text(BREATHE)
    (tmp_path / "data.adj").write_text(GALORE)
    assert read_synsets(tmp_path, "verb") == [
        Synset("v00001740", 29, ("breathe",), ("v00005041",), "draw air into the lungs")
    ]
    assert read_synsets(tmp_path, "adj")[0].words == ("abounding", "galore")


def test_more_than_nine_words_are_counted_in_hexadecimal_digits(tmp_path):
    words = " ".join(f"word{number} 0" for number in range(11))
    (tmp_path / "data.noun").write_text(f"00000001 03 n 0b {words} 001 @ 00000002 n 0000 | a thing  \n")
    (found,) = read_synsets(tmp_path, "noun")
    assert len(found.words) == 11
    assert found.hypernyms == ("n00000002",)


def test_the_first_ones_only(tmp_path):
    (tmp_path / "data.noun").write_text(LICENCE + DOG + "nothing that could be read\n")
    assert len(read_synsets(tmp_path, "noun", limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (DOG.replace(" | ", " "), "it has no gloss"),
        (DOG.replace(" 05 n", " 45 n"), "it begins with '02084071 45 n 03'"),
        (DOG.replace("02084071", "dog"), "it begins with 'dog 05 n 03'"),
        (DOG.replace(" 004 ", " 400 "), "list index out of range"),
        (DOG.replace(" 004 ", " four "), "invalid literal"),
        ("\n", "it has no gloss"),
    ],
)
def test_what_is_no_synset_is_named_with_its_line(tmp_path, line, reason):
    (tmp_path / "data.noun").write_text(LICENCE + DOG + line)
    message = rf"data\.noun has no synset in line 3, as wndb\(5\) describes them: .*{re.escape(reason)}"
    with pytest.raises(ValueError, match=message):
        read_synsets(tmp_path, "noun")


def test_senses(tmp_path):
    (tmp_path / "index.noun").write_text(
        LICENCE + "dog n 2 3 @ ~ #m 2 1 02084071 10114209  \nhot_dog n 1 1 @ 1 0 07697537  \n"
    )
    assert read_senses(tmp_path, "noun") == {
        ("dog", "n02084071"): 1,
        ("dog", "n10114209"): 2,
        ("hot dog", "n07697537"): 1,
    }
    (tmp_path / "index.noun").write_text("dog n many\n")
    with pytest.raises(ValueError, match=r"index\.noun has no word in line 1"):
        read_senses(tmp_path, "noun")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.noun"):
        read_synsets(tmp_path, "noun")


@pytest.mark.parametrize(
    ("gloss", "kept"),
    [
        ("a separate entity", "a separate entity"),
        ('a dog; "it barked"; "it bit"', "a dog"),
        ('a range: "a gamut of emotions"', "a range"),
        ('a range :"a gamut of emotions"', "a range"),
        ('in fear, "she hurried down the stairs"', "in fear"),
        ("one thing; or another;", "one thing; or another"),
        ('progress (in the phrase "make strides"); "big strides"', 'progress (in the phrase "make strides")'),
        ('a demand in the phrase "the call of duty"', 'a demand in the phrase "the call of duty"'),
        ('; "only an example"', '; "only an example"'),
    ],
)
def test_definitions(gloss, kept):
    assert definition(gloss) == kept


def test_the_real_files():
    folder = needs_debian("wordnet-base").root / "usr/share/wordnet"
    for part, letter in PARTS.items():
        synsets = read_synsets(folder, part, limit=300)
        assert len(synsets) == 300
        for synset in synsets:
            assert synset.key.startswith(letter)
            assert FILES[synset.file].startswith(part)
            assert all(re.fullmatch(r"[nv]\d{8}", key) for key in synset.hypernyms)
            assert definition(synset.gloss)
    first = read_synsets(folder, "noun", limit=3)
    assert [synset.words[0] for synset in first] == ["entity", "physical entity", "abstraction"]
    assert [synset.hypernyms for synset in first] == [(), ("n00001740",), ("n00001740",)]
    senses = read_senses(folder, "adv")
    assert senses["well", "r00011093"] == 1
