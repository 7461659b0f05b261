"""From a caption as found to the words that are encoded, as CLIP does it (Radford et al. 2021)."""

from __future__ import annotations

import functools
import html

# Contractions, runs of letters, single digits, runs of anything else. The case is ignored although words come
# lower-cased, because the long s of old prints is a lower-case letter that matches "s" only without case.
WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clean(text: str) -> str:
    """Repair Unicode, resolve HTML entities (doubly escaped ones too), collapse white space, lower the case."""
    import ftfy  # here, as regex below: together they take a fifth of a second that --help need not wait for

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


@functools.cache
def _word():
    import regex

    return regex.compile(WORD_PATTERN, regex.IGNORECASE)


def split_words(text: str) -> list[str]:
    """The pieces of a clean text that are encoded one by one. Together they hold all of it but the white space."""
    return _word().findall(text)
