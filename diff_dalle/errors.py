"""Errors that a user can fix: one sentence naming the value, the rule, and the flag or field to change.

Messages are shown, logged and sent to services, so ``redact`` removes the secrets that paths and commands may carry.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# A quoted text (to the end where the quote is left open, as in a message that was cut) or a single word.
_VALUE = r"""(?:\*\*\*|\\?"(?:[^"\\]|\\.)*(?:"|$)|\\?'(?:[^'\\]|\\.)*(?:'|$)|[^\s'"&;|)]*[^\s'"&;|):,.])"""
# Parts of names of variables, flags and fields whose values are secret; not ``tokenizer`` and ``max_tokens``.
_SECRET = (
    r"(?:secret|passw(?:or)?d|token(?!iz|s)|credential|signature|authorization|cookie"
    r"|(?:api|access|account|auth|private|secret|encryption|subscription|customer)[-_]?key)"
)
# What follows group 1 is secret. Names and blanks before it are bounded, so that a long text from a hostile file takes
# time in proportion to its length. Order: the flag of a header hides all of the header, before its name hides a part.
_RULES = tuple(
    re.compile(rule, re.IGNORECASE)
    for rule in (
        r"([a-z][a-z0-9+.-]{0,20}://)[^\s/'\"]+(?=@)",  # user:password@
        r"(\bhttps?://[^\s?'\"]{0,2000}\?)[^\s'\"]*[^\s'\",;:.)]",  # the query of a URL, which may be signed
        r"(\?)[\w.%~-]+=[^\s'\"]*[^\s'\",;:.)]",  # the query of a URL whose beginning is elsewhere
        # curl, wget and aria2 give a header as an argument; curl's short flags may be joined, as in -sSH
        r"((?<![\w-])(?:--(?:proxy-)?header[=\s]\s{0,9}|(?-i:-[A-Za-z]{0,9}H)\s{0,9}))"
        r"(?:\\?\"[^\"]*(?:\"|$)|\\?'[^']*(?:'|$)|[^\s:'\"]+:\s?\S+)",
        r"((?<![\w-])--(?:proxy-)?user[=\s]\s{0,9}|(?<![\w-])(?-i:-[A-Za-z]{0,9}?[uU])\s{0,9})"
        r"(?:\"[^\"]*:[^\"]*\"|'[^']*:[^']*'|[^\s:/'\"]+:(?!//)[^\s'\"]+)",
        rf"((?<![\w-])--(?:[\w-]{{0,64}}{_SECRET}(?!(?-i:[a-z]))[\w-]{{0,64}}|oauth2-bearer)(?:=|\s{{1,9}})){_VALUE}",
        rf"((?:[\w.-]{{0,64}}{_SECRET}(?!(?-i:[a-z]))[\w-]{{0,64}}|\bsig)=){_VALUE}",  # AWS_SECRET_ACCESS_KEY=…
        r"(\b(?:proxy-)?authorization[\"']?\s{0,9}:\s{0,9}"
        rf"(?:(?:basic|bearer|digest|negotiate|token|aws4-hmac-sha256)\s{{1,9}})?){_VALUE}",
        # x-api-key: …
        rf"(\b(?:[\w-]{{0,64}}[-_]{_SECRET}|(?:set-)?cookie|password|api_?key)[\"']?\s{{0,9}}:\s{{0,9}}){_VALUE}",
        # The word alone is English too: a token is longer, or not made of letters alone.
        r"(\bbearer\s{1,9})(?!(?-i:[A-Za-z][a-z]{0,18})(?![\w~+/=-]))[\w.~+/=-]+",
    )
)


def redact(text: str) -> str:
    """``text`` with ``***`` for its secrets: queries of URLs, ``user:password@``, headers and passwords in commands,
    values of variables such as AWS_SECRET_ACCESS_KEY. Other text, and text that is redacted already, stays as it is."""
    for rule in _RULES:
        text = rule.sub(lambda found: found[1] + HIDDEN, text)
    return text


class InputError(ValueError):
    """Bad input of any kind: a flag, a file, a dataset, a log directory. Its message is redacted.

    Scripts print its message as one line and exit with status 2; library users catch it as a ValueError.
    """

    def __init__(self, *args: object):
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


def quantity(count: int, noun: str) -> str:
    """``quantity(1, "file") == "1 file"``, ``quantity(2, "process") == "2 processes"``."""
    plural = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else plural)
