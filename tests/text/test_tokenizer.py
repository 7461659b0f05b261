import copy
import pickle
import random
import warnings
from itertools import pairwise

import pytest
import torch
from refusing import refused

from diff_dalle.batch import Conditioning
from diff_dalle.text.tokenizer import Tokenizer, clean, load_tokenizer, merge_word, split_words
from diff_dalle.text.vocabulary import Vocabulary

OURS = load_tokenizer()
BYTES = Tokenizer(Vocabulary("bpe", ()))


def random_text(rng):
    """Characters from all of Unicode, common ranges more often, including lone surrogates."""
    tops = rng.choices([0x7F, 0x24F, 0xFFFF, 0x10FFFF], k=rng.randrange(40))
    return "".join(chr(rng.randint(0, top)) for top in tops)


@pytest.mark.parametrize("tokenizer", [OURS, BYTES], ids=lambda tokenizer: tokenizer.identity)
def test_round_trip(tokenizer):
    """Any text decodes to its clean words, separated by single spaces."""
    rng = random.Random(0)
    for text in ["a red circle", "", "it's 42", "</w> <|endoftext|>", *(random_text(rng) for _ in range(2000))]:
        ids = tokenizer.encode(text)
        assert (ids[0], ids[-1]) == (tokenizer.start, tokenizer.end)
        assert all(0 <= token < tokenizer.start for token in ids[1:-1])
        assert tokenizer.decode(ids) == " ".join(split_words(clean(text)))
        assert tokenizer.decode(ids).replace(" ", "") == clean(text).replace(" ", "")


def test_decode_repairs_and_refuses():
    """A truncated character is replaced, tokens after the end are dropped, and an invalid id is an error."""
    snowman = BYTES.encode("☃ a")
    assert BYTES.decode([*snowman[:3], BYTES.end, 5, 6]) == "\ufffd"
    assert BYTES.decode(torch.tensor(snowman)) == "☃ a"
    for token in (-1, BYTES.vocab_size):
        with refused(f"{token} is not a token id"):
            BYTES.decode([token])


def test_identity_changes_with_the_token_ids():
    """The built-in vocabulary must not change, since checkpoints depend on it; other merges change the identity."""
    assert OURS.identity == "wordnet-16898:298031d37ea0"
    first, second, *rest = OURS.vocabulary.merges
    assert OURS.identity != Tokenizer(Vocabulary("wordnet", (second, first, *rest))).identity


def test_batches():
    """Shapes, padding, and the empty text as the condition of a dropped caption."""
    tokens, mask = OURS(["a red circle", "", " \n"], 8)
    assert (tokens.dtype, mask.dtype, tokens.shape, mask.shape) == (torch.int64, torch.bool, (3, 8), (3, 8))
    assert tokens[0].tolist() == [*OURS.encode("a red circle"), 0, 0, 0]
    assert mask[0].tolist() == [True] * 5 + [False] * 3
    assert tokens[1].tolist() == [OURS.start, OURS.end] + [0] * 6
    dropped = Conditioning(tokens=tokens, mask=mask).drop(torch.tensor([True, True, True]))
    assert torch.equal(dropped.mask, mask[[1, 1, 2]])
    assert [part.shape for part in OURS([], 8)] == [(0, 8), (0, 8)]


def test_long_texts_are_truncated_with_one_warning():
    """The end token stays last, a text that just fits is unchanged, and one warning names the flag and the text."""
    tokenizer = copy.deepcopy(OURS)
    with pytest.warns(UserWarning, match="text_length.*has 6: 'one two three four'") as warned:
        tokens, mask = tokenizer(["one two three", "one two three four", "one " * 50], 5)
        tokenizer(["one " * 50], 5)
    assert len(warned) == 1
    assert tokens[0].tolist() == tokenizer.encode("one two three")
    assert tokens[1].tolist() == tokens[0].tolist()
    assert tokens[2].tolist() == [tokenizer.start, *tokenizer.encode("one one one")[1:-1], tokenizer.end]
    assert mask.all()


def test_misuse():
    with refused("text_length is 1"):
        OURS(["a"], 1)
    with pytest.raises(TypeError, match="sequence of strings"):
        OURS("a red circle", 8)


def test_pickled_copies_are_equal():
    """As sent to a data worker: same ids, same identity, and a small pickle."""
    packed = pickle.dumps(OURS)
    copied = pickle.loads(packed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copied.encode("a purple star, 日本") == OURS.encode("a purple star, 日本")
    assert copied.identity == OURS.identity
    assert len(packed) < 2**20


# -------------------------------------------------------------------------------------------------- words and merges


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  Two\twords\n\n ", "two words"),
        ("caf&eacute; &amp;amp; bar", "café & bar"),
        ("&lt;b&gt; 1 &amp;lt; 2", "<b> 1 < 2"),
        ("schÃ¶n â€“ â€œokâ€\x9d", 'schön – "ok"'),
        ("e\u0301", "é"),
        ("ÀÉ\u00a0ΑΣ", "àé ας"),
        ("a\ud83d\ude00b\ud800", "a😀b\ufffd"),
        ("\x00\u2028 ", ""),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's we'll o'clock", ["it", "'s", "we", "'ll", "o", "'", "clock"]),
        ("3.14 km²", ["3", ".", "1", "4", "km", "²"]),
        ("日本語 ☃️!", ["日本語", "☃️!"]),
        ("", []),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words


def merge_plainly(ids, merges):
    """The definition: find the earliest applicable merge, apply it from left to right, repeat."""
    ids = list(ids)
    while possible := [merges[pair] for pair in pairwise(ids) if pair in merges]:
        first, out = min(possible), []
        for token in ids:
            if out and merges.get((out[-1], token)) == first:
                out[-1] = first
            else:
                out.append(token)
        ids = out
    return ids


@pytest.mark.parametrize("seed", range(40))
def test_merging_equals_the_definition(seed):
    """Any table of merges, also one in which a merge precedes those that produce its parts."""
    rng = random.Random(seed)
    merges = {}
    while len(merges) < 30:
        merges[rng.randrange(20), rng.randrange(20)] = 3 + len(merges)
    for _ in range(50):
        word = [rng.randrange(3) for _ in range(rng.randrange(30))]
        assert merge_word(word, merges) == merge_plainly(word, merges)


def test_a_word_of_a_hundred_thousand_letters():
    """Merging is not quadratic in the length of a word: the definition would take hours here."""
    merges = {(i, 0): i + 1 for i in range(1, 100_000)}
    assert merge_word([1] + [0] * 99_999, merges) == [100_000]
