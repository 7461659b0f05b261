import hashlib
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from refusing import refused

from diff_dalle.commands.train_tokenizer import VocabularyConfig, train_tokenizer
from diff_dalle.data.tar import write_tar
from diff_dalle.text.bpe_training import CAPTION_WORDS, add_caption_words, count_words, learn_merges, wordnet_glosses
from diff_dalle.text.tokenizer import load_tokenizer, merge_word
from diff_dalle.text.vocabulary import (
    CAPTIONS_HEADER,
    OWN_FILE,
    OWN_HEADER,
    byte_symbols,
    merge_file_text,
    write_merge_file,
)

WORDNET = Path("/usr/share/wordnet")
WORDNET_NOUNS = "fea17d2f9656611334eac790e5d69e47645fa180c4aa481fb4cd9b3520754ca2"  # sha256, WordNet 3.0


def learn_plainly(counts, num_merges):
    """The definition: count all pairs again before each merge."""
    merges, ids = {}, {}
    words = {word: [ids.setdefault(symbol, len(ids)) for symbol in byte_symbols(word)] for word in counts}
    symbols, out = {i: symbol for symbol, i in ids.items()}, []
    for new in range(len(ids), len(ids) + num_merges):
        pairs = Counter()
        for word, start in words.items():
            for pair in pairwise(merge_word(start, merges)):
                pairs[pair] += counts[word]
        left, right = min(pairs, key=lambda pair: (-pairs[pair], symbols[pair[0]], symbols[pair[1]]))
        merges[left, right], symbols[new] = new, symbols[left] + symbols[right]
        out.append((symbols[left], symbols[right]))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_definition(seed):
    """Incremental counts give the same merges as recounting, including ties and repeated letters."""
    rng = random.Random(seed)
    counts = {"".join(rng.choices("aab", k=rng.randint(1, 9))): rng.randint(1, 4) for _ in range(60)}
    assert learn_merges(counts, 40) == learn_plainly(counts, 40)


def test_too_little_text():
    with refused(r"only 2 merges.*num_merges"):
        learn_merges({"abc": 2}, 3)


def test_a_vocabulary_of_captions(tmp_path):
    """As many merges as asked for, which join the captions' own words, from all shards and no image."""
    texts = ["a zebra", "zebras", "the zebra crossing", "a crossing"]
    write_tar(str(tmp_path / "a.tar"), ((f"{i}", {"txt": text.encode()}) for i, text in enumerate(texts)))
    write_tar(str(tmp_path / "b.tar"), [("0", {"txt": b"zebra crossing"}), ("1", {"txt": b" "})])
    out = str(tmp_path / "vocabulary.txt")
    line = train_tokenizer(VocabularyConfig(data_dir=(str(tmp_path),), num_merges=11, out=out))
    tokenizer = load_tokenizer(out)
    assert (
        tokenizer.identity in line
        and tokenizer.identity.startswith("captions-")
        and tokenizer.vocab_size == 11 + 512 + 2
    )
    merges = learn_merges(count_words([*texts, "zebra crossing"]), 11)
    assert Path(out).read_text() == merge_file_text(CAPTIONS_HEADER, merges)
    assert len(tokenizer.encode("zebra crossing")) == 4  # start, two words, end


def test_glosses(tmp_path):
    """License lines and synsets are left out."""
    (tmp_path / "data.adj").write_text('  1 A license | of sorts\n0001 00 a 01 red 0 000 | like blood; "red ink"\n')
    assert [gloss.strip() for gloss in wordnet_glosses(tmp_path)] == ['like blood; "red ink"']
    with refused("wordnet-base"):
        list(wordnet_glosses(tmp_path / "nothing"))


def test_caption_words_are_single_tokens():
    tokenizer = load_tokenizer()
    assert [word for word in CAPTION_WORDS.split() if len(tokenizer.encode(word)) != 3] == []


def test_the_vocabulary_is_reproduced(tmp_path):
    """The script reproduces the built-in file from WordNet 3.0, byte for byte."""
    nouns = WORDNET / "data.noun"
    if not nouns.is_file() or hashlib.sha256(nouns.read_bytes()).hexdigest() != WORDNET_NOUNS:
        pytest.skip("needs WordNet 3.0 (Debian: apt-get install wordnet-base)")
    merges = learn_merges(add_caption_words(count_words(wordnet_glosses(WORDNET))), 16384)
    write_merge_file(str(tmp_path / "vocabulary.txt"), OWN_HEADER, merges)
    assert (tmp_path / "vocabulary.txt").read_bytes() == Path(OWN_FILE).read_bytes().replace(b"\r\n", b"\n")
