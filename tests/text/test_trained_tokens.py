"""Tokens that adapters train, and tokenizers with added tokens."""

import pickle

import pytest
from refusing import refused

from diff_dalle.text.tokenizer import Tokenizer, load_tokenizer
from diff_dalle.text.trained_tokens import TokenSpec, find_tokens, parse_token
from diff_dalle.text.vocabulary import parse_vocabulary

BASE = load_tokenizer()
BOTH = BASE.extended(["[star]", "[star]s]"])


def test_entries_are_pairs_or_texts():
    assert parse_token('["[star]", "^dog</w>"]') == TokenSpec("[star]", "^dog</w>")
    assert parse_token('["^snail", null]') == parse_token("^snail") == TokenSpec("^snail")
    assert parse_token("[star]") == TokenSpec("[star]") and parse_token("[1]").is_new
    assert parse_token('["<Star>", "^dog</w>"]') == TokenSpec("<star>", "^dog</w>") and parse_token("<star>").is_new
    assert parse_token("[STAR]") == TokenSpec("[star]") and not parse_token("[star>").is_new


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('["a", "b", "c"]', "each must be a pair"),
        ("[]", "each must be a pair"),
        ('["^snail", "^dog"]', r"existing tokens begin as they are: write null there, or \[snail\]"),
        (
            "[a star]",
            r"adds '\[a star\]', but a new token is a text without spaces in brackets, such as \[star\], <star>",
        ),
        ("<>", "adds '<>', but a new token is a text without spaces"),
        ("<|EndOfText|>", "adds '<|endoftext|>', but a new token is"),
    ],
)
def test_bad_entries_are_refused(entry, words):
    with refused(words):
        parse_token(entry)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["^trianlge</w>"], "which finds no token; did you mean triangle</w>"),
        (['["[star]", "xyzzyx"]'], "'xyzzyx', which finds no token"),
        (["(", "a"], r"the pattern '\(', which is no regular expression"),
        (["(a*)*"], "one group, which is not repeated, and two of"),
        (["(a|b)(c|d)"], "one group"),
        (["a?b?c?"], "two of"),
        (["a" * 201], "up to 200 characters"),
        ([rf"a{{{2**40}}}"], "which is no regular expression"),
        (["a</w>"] * 65, "has 65 entries, but may have up to 64"),
        (["[star]", '["[Star]", "^a</w>"]'], "names a new token twice"),
    ],
)
def test_patterns_that_find_nothing_are_refused(entries, words):
    with refused(words):
        find_tokens(BASE, [parse_token(entry) for entry in entries])


def test_a_token_that_exists_is_refused():
    with refused(r"the token \[star\] exists already in wordnet-.*\+\[star\]"):
        find_tokens(BASE.extended(["[star]"]), [parse_token("[star]")])


def test_new_tokens_have_the_ids_after_the_others_in_their_order():
    found = find_tokens(BASE, [parse_token("[b]"), parse_token('["[a]", "^dog</w>"]')])
    assert found.ids == (BASE.vocab_size, BASE.vocab_size + 1) and found.sources[0] == () != found.sources[1]
    assert found.tokenizer.identity == f"{BASE.identity}+[b]+[a]"


def test_added_tokens_are_found_in_texts_and_the_rest_is_as_before():
    star, long = BASE.vocab_size, BASE.vocab_size + 1
    assert BOTH.encode("A [STAR] left") == [*BASE.encode("a")[:-1], star, *BASE.encode("left")[1:]]
    assert BOTH.encode("[star]s]") == [BASE.start, long, BASE.end]  # the longest name wins
    assert BOTH.encode("[star][star]")[1:-1] == [star, star]
    assert BOTH.encode("a [sta] star") == BASE.encode("a [sta] star")
    assert BOTH.decode(BOTH.encode("a [star] left")) == "a [star] left"
    with refused(f"{long + 1} is not a token id"):
        BOTH.decode([long + 1])


def test_names_in_angle_brackets_and_upper_case_are_found_in_any_case():
    found = find_tokens(BASE, [parse_token('["<Fernando>", "^dog</w>"]'), parse_token("[Fernando]")]).tokenizer
    first, second = BASE.vocab_size, BASE.vocab_size + 1
    for text in ("<Fernando>[FERNANDO]", "<fernando> [Fernando]"):
        assert found.encode(text)[1:-1] == [first, second]
    again = Tokenizer(parse_vocabulary(found.vocabulary.text(), "here"))
    assert again.identity == found.identity and again.encode("<fernando>") == found.encode("<fernando>")


def test_the_identity_is_that_of_the_base_and_the_added_tokens():
    assert BOTH.identity == f"{BASE.identity}+[star]+[star]s]" and BOTH.vocab_size == BASE.vocab_size + 2
    assert (BOTH.start, BOTH.end) == (BASE.start, BASE.end)
    assert BASE.extended([]) is BASE
    assert BASE.extended(["[a]"]).extended(["[b]"]).identity == BASE.extended(["[a]", "[b]"]).identity


def test_merge_files_keep_added_tokens():
    again = Tokenizer(parse_vocabulary(BOTH.vocabulary.text(), "here"))
    assert again.identity == BOTH.identity and again.encode("[star]s] [star]") == BOTH.encode("[star]s] [star]")
    assert pickle.loads(pickle.dumps(BOTH)).encode("[star]") == BOTH.encode("[star]")
    with refused("here adds a token twice"):
        parse_vocabulary("#\na b\n[x]\n[x]\n", "here")
