import random
from itertools import pairwise

import pytest

from diff_dalle.text.tokenizer import merge_word


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
def test_equals_the_definition(seed):
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
