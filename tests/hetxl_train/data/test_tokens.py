"""Windows into tokens: classes, examples, and what is shown of them."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from hetxl_train.data.tokens import SPECIALS, Corpus, TokenSplit, Windows, join, token_splits, vocabulary

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]


def small_corpus(files=40, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, files)
    ids = np.minimum(rng.geometric(0.35, lengths.sum()) - 1, len(WORDS) - 1).astype(np.int32)
    return Corpus(ids, WORDS, [f"f{number}" for number in range(files)], np.cumsum([0, *lengths]))


def slashed(tokens):
    return "/".join(tokens)


def cut(corpus=None, **options):
    corpus = corpus or small_corpus()
    homes = np.arange(len(corpus.files)) % 4 % 3
    values = {"classes": 5, "context": 3, "limit": None, "seed": 0, "text": slashed} | options
    return token_splits(corpus, homes, **values)


def rows_of(split):
    inputs = split.fetch(np.arange(len(split))).inputs
    return torch.cat((inputs, split.labels.take(np.arange(len(split)))[:, None]), 1)


@pytest.mark.parametrize("context", [1, 3, 30])
def test_windows_of_texts_are_those_of_files(context):
    corpus = small_corpus()
    examples = cut(corpus, context=context)
    texts = []
    for file in range(len(corpus.files)):
        if file % 4 % 3 == 0:  # of the first split
            words = [WORDS[word] for word in corpus.ids[corpus.offsets[file] : corpus.offsets[file + 1]]]
            texts += [" ".join(words[:at]) for at, word in enumerate(words) if word in examples.classes]
    inputs = Windows(examples.classes, context, str.split)(texts)
    assert torch.equal(inputs, rows_of(examples.splits["train"])[:, :-1])


@pytest.mark.parametrize("context", [1, 3, 30])
@pytest.mark.parametrize("home", [0, 1, 2])
def test_examples_match_a_plain_loop(context, home):
    corpus = small_corpus()
    examples = cut(corpus, context=context)
    ids = {name: number for number, name in enumerate(examples.classes)}
    other, padding, start = 5, 6, 7
    expected = []
    for file in range(len(corpus.files)):
        if file % 4 % 3 != home:
            continue
        before = [padding] * (context - 1) + [start]
        for word in corpus.ids[corpus.offsets[file] : corpus.offsets[file + 1]]:
            token = ids.get(WORDS[word], other)
            if token != other:
                expected.append([*before[-context:], token])
            before.append(token)
    split = examples.splits[("train", "validation", "test")[home]]
    assert rows_of(split).tolist() == expected
    assert examples.input.shape == (context,)
    assert examples.input.vocabulary == 8


def test_classes_are_the_most_frequent_in_training():
    corpus = small_corpus()
    training = np.arange(40) % 2 == 0
    names, mapping = vocabulary(corpus, training, 4)
    counts = Counter()
    for file in np.flatnonzero(training):
        counts.update(WORDS[word] for word in corpus.ids[corpus.offsets[file] : corpus.offsets[file + 1]])
    assert names == sorted(counts, key=lambda word: (-counts[word], word))[:4]
    assert [WORDS[number] for number in np.flatnonzero(mapping < 4)] == sorted(names)
    assert [names[mapping[WORDS.index(name)]] for name in names] == names
    assert set(mapping[mapping >= 4].tolist()) == {4}


def test_equally_frequent_tokens_go_by_their_text():
    corpus = Corpus(np.arange(3, dtype=np.int32), ["b", "c", "a"], ["f"], np.array([0, 3]))
    assert vocabulary(corpus, np.array([True]), 2)[0] == ["a", "b"]


def test_tokens_missing_in_training_are_not_classes():
    corpus = Corpus(np.array([0, 1], dtype=np.int32), ["a", "b"], ["f", "g"], np.array([0, 1, 2]))
    examples = cut(corpus, classes=10)
    assert examples.classes == ["a"]
    assert examples.known == 0.5
    assert len(examples.splits["validation"]) == 0


def test_join_puts_padding_and_start_before_every_file():
    corpus = Corpus(np.arange(4, dtype=np.int32), list("abcd"), ["f", "g", "h"], np.array([0, 1, 1, 4]))
    assert join(corpus, corpus.ids, np.array([0, 1, 2]), 2, 4).tolist() == [5, 6, 0, 5, 6, 5, 6, 1, 2, 3]
    assert join(corpus, corpus.ids, np.array([2]), 1, 4).tolist() == [6, 1, 2, 3]
    assert join(corpus, corpus.ids, np.empty(0, dtype=np.int64), 3, 4).tolist() == []


def test_empty_corpus_gives_no_examples():
    examples = cut(Corpus(np.empty(0, dtype=np.int32), [], [], np.array([0])))
    assert examples.classes == []
    assert examples.known == 0
    assert [len(split) for split in examples.splits.values()] == [0, 0, 0]


def test_limit_keeps_training_rows_at_random():
    def training_rows(**options):
        return Counter(map(tuple, rows_of(cut(**options).splits["train"]).tolist()))

    rows, few, more = training_rows(), training_rows(limit=10), training_rows(limit=60)
    assert few.total() == 10
    assert few <= more <= rows
    assert few == training_rows(limit=10)
    assert few != training_rows(limit=10, seed=1)
    assert training_rows(limit=10**9) == rows
    assert len(cut(limit=10).splits["test"]) == len(cut().splits["test"])


def test_rows_in_any_order_and_any_number():
    split = cut().splits["train"]
    inputs = split.fetch(np.arange(len(split))).inputs
    rows = np.array([5, 0, 5, len(split) - 1])
    fetched = split.fetch(rows, seeds=np.zeros(4, dtype=np.int64))
    assert torch.equal(fetched.inputs, inputs[rows])
    assert fetched.inputs.dtype == torch.int64
    np.testing.assert_array_equal(fetched.rows, rows)
    assert not fetched.unreadable
    assert split.fetch(np.empty(0, dtype=np.int64)).inputs.shape == (0, 3)
    again = pickle.loads(pickle.dumps(split))
    assert torch.equal(again.fetch(rows).inputs, inputs[rows])
    assert again.show(3) == split.show(3)


def test_examples_are_shown_by_the_text_function():
    names = ["a", "b", *SPECIALS]
    tokens = np.array([3, 4, 0, 2, 1, 1], dtype=np.int32)
    split = TokenSplit(tokens, np.array([2, 4, 5]), 2, names, slashed)
    assert [split.show(row).text for row in range(3)] == ["→ ?", "… a/<other> → ?", "… <other>/b → ?"]
    assert TokenSplit(tokens, np.array([4]), 2, names).show(0).text == "… a <other> → ?"
    lines = TokenSplit(tokens, np.array([4]), 2, names, lambda tokens: "\n".join(tokens) + "\n")
    assert lines.show(0).text == "… a\n<other>\n→ ?"
