"""Caption cleaning and splitting into words, as in CLIP (Radford et al. 2021)."""

from __future__ import annotations

import functools
import html

# Contractions, runs of letters, single digits, runs of anything else. Matched case-insensitively although the text is
# lower-case, because the long s (U+017F) is a lower-case letter that matches "s" only case-insensitively.
WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

# GPT-2's (Radford et al. 2019): runs of digits are words, and words keep the space before them.
SPACED_WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def clean(text: str) -> str:
    """Fix broken Unicode, resolve HTML entities (also doubly escaped), collapse whitespace, convert to lower case."""
    import ftfy  # imported here, like regex below: together they would add 0.2 s to every --help

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


@functools.cache
def _word(spaced: bool):
    import regex

    return regex.compile(SPACED_WORD_PATTERN) if spaced else regex.compile(WORD_PATTERN, regex.IGNORECASE)


def split_words(text: str, spaced: bool = False) -> list[str]:
    """The words of a clean text, which are encoded one by one. Together they contain all of it except whitespace, or
    with it if ``spaced``, as in GPT-2."""
    return _word(spaced).findall(text)
