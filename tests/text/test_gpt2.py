"""GPT-2's vocabulary, which GLIDE reads: words keep the space before them, and texts have no end token."""

import pytest
import torch
from refusing import refused

from diff_dalle.text.tokenizer import Tokenizer, load_tokenizer
from diff_dalle.text.vocabulary import parse_vocabulary

MERGES = ["Ġ t", "h e", "Ġt he", "c a", "ca t"]
T, H, S, SPACE = (ord("t") - 33, ord("h") - 33, ord("s") - 33, 220)  # printable bytes from ! on come first


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2") / "vocab.bpe"
    path.write_text("\n".join(["#version: 0.2", *MERGES]) + "\n", encoding="utf-8")
    return load_tokenizer(str(path))


def test_ids(tokenizer):
    """The 256 bytes, the merges in order, and the one special token."""
    assert (tokenizer.start, tokenizer.vocab_size) == (256 + 5, 256 + 5 + 1)
    assert tokenizer.identity.startswith("gpt2-262:")
    assert tokenizer.encode("the cat") == [261, T, 257, SPACE, 260]
    assert tokenizer.encode("The The  cats") == [261, T, 257, 258, SPACE, 260, S]
    assert tokenizer.encode("") == [261]


def test_digits_are_one_word(tokenizer):
    """A merge of digits could join them; with CLIP's pattern each digit is a word."""
    vocabulary = parse_vocabulary("#version: 0.2\n1 2\n", "here")
    assert Tokenizer(vocabulary).encode("12") == [257, 256]


@pytest.mark.parametrize("text", ["the cat's 42 hats", "☃ don't", "a"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches(tokenizer):
    """Nothing is put at the end of a truncated text; the empty text keeps its start alone."""
    with pytest.warns(UserWarning, match="truncated"):
        tokens, mask = tokenizer(["the cat", "the", ""], 4)
    assert tokens.tolist() == [[261, T, 257, SPACE], [261, T, 257, 0], [261, 0, 0, 0]]
    assert torch.equal(mask.sum(1), torch.tensor([4, 3, 1]))


def test_the_text_of_the_file_comes_back(tokenizer):
    again = parse_vocabulary(tokenizer.vocabulary.text(), "here")
    assert again == tokenizer.vocabulary and Tokenizer(again).identity == tokenizer.identity


def test_words_with_ends_under_the_same_header_are_not_gpt2():
    assert parse_vocabulary("#version: 0.2\nt h\nth e</w>\n", "here").name == "bpe"


def test_added_tokens_follow(tokenizer):
    star = tokenizer.extended(["[star]"])
    assert star.encode("the [star]") == [261, T, 257, SPACE, 262] and star.decode([262]).strip() == "[star]"
    with refused("not a token id"):
        tokenizer.decode([262])
