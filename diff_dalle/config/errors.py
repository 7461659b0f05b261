"""Errors that a user can fix: what is wrong with which setting, as data; a sentence is made of it once, in the spelling
of whoever gave the setting.

Messages are shown, logged and sent to services, so ``redact`` removes the secrets that paths and commands may carry.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

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


@functools.lru_cache(64)  # a busy server refuses many requests with the same sentence
def redact(text: str) -> str:
    """``text`` with ``***`` for its secrets: queries of URLs, ``user:password@``, headers and passwords in commands,
    values of variables such as AWS_SECRET_ACCESS_KEY. Other text, and text that is redacted already, stays as it is."""
    for rule in _RULES:
        text = rule.sub(lambda found: found[1] + HIDDEN, text)
    return text


MARK = "\x1a"  # around the name of a setting in a text
MAX_QUOTED = 120  # characters of a bad value in a message
MAX_FAULTS = 10  # told at once: what reads settings stops there
MAX_BITS = 10_000  # of a number that a message says
ABSENT = ...  # of a fault that is not about a value; the same object in every process
KeyPath = tuple[str | int, ...]  # keys and indices from the root
Spelling = Callable[[str], str]  # the name of a setting, or its path, → what whoever gave it calls it


def named(setting: str) -> str:
    """The name of a setting within a message, to be spelled by whoever shows the message."""
    return f"{MARK}{setting}{MARK}"


def as_flag(setting: str) -> str:
    """The spelling of a command line."""
    return f"--{setting}"


def spelled(text: str, spelling: Spelling = str) -> str:
    """A text with the names of its settings in a spelling."""
    parts = text.split(MARK)
    return "".join(spelling(part) if number % 2 else part for number, part in enumerate(parts))


def cut(text: str) -> str:
    """The beginning of a long text, for a message."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def quoted(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, tuple) and value and not any(isinstance(item, str) for item in value[:MAX_QUOTED]):
        return cut(",".join(map(quoted, value[:MAX_QUOTED])))
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    text = ""
    for piece in _pieces(value):  # until there are enough to be cut, however much there is of it
        text += piece
        if len(text) > MAX_QUOTED:
            break
    return cut(text)


def _pieces(value: object) -> Iterator[str]:
    """Those of ``repr(value)``."""
    if isinstance(value, (list, tuple)):
        yield "[" if isinstance(value, list) else "("
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield f"{', ' if i else ''}{key!r:.{MAX_QUOTED}}: "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        yield f"a number {'below -' if value < 0 else 'above '}2^{MAX_BITS}"  # Python refuses to write some
    else:
        yield repr(value[: MAX_QUOTED + 1] if isinstance(value, (str, bytes)) else value)


_KEYS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def path_of(setting: str) -> KeyPath:
    """``unets[1].dim`` → its keys and indices."""
    return tuple(int(index) if index else key for index, key in _KEYS.findall(setting))


def spelled_path(path: KeyPath) -> str:
    """``decoder.unets[1].dim``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_plain(key)}" for key in path).removeprefix(".")


def _plain(key: str) -> str:
    return cut(key) if key.isprintable() else cut(repr(key))


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with settings.

    setting: the path of the setting, from the class or mapping in which it was found, such as ``unets[1].dim``; "" =
             of none alone.
    rule:    with a value, the rule that it breaks, such as "must be above 0"; else the rest of a sentence that begins
             with the setting, or the whole sentence where there is none. Other settings in it are ``named``.
    value:   what the setting is.
    """

    setting: str
    rule: str
    value: object = ABSENT

    @classmethod
    def of(cls, config: object, setting: str, rule: str) -> Fault:
        """That a setting of a config breaks a rule."""
        value = config
        for key in path_of(setting):
            value = value[key] if isinstance(key, int) else getattr(value, key)  # type: ignore[index]
        return cls(setting, rule, value)

    def below(self, path: KeyPath) -> Fault:
        """The same, from the root of the section at ``path``."""
        rule = spelled(self.rule, lambda name: named(spelled_path((*path, *path_of(name)))))
        rule = rule if self.setting or not path else f": {rule}"
        return replace(self, setting=spelled_path((*path, *path_of(self.setting))), rule=rule)

    def sentence(self, spelling: Spelling = str, others: Spelling | None = None) -> str:
        """spelling: of the setting. others: of those in the rule; None = the same."""
        rule = self.rule if self.value is ABSENT else f"is {quoted(self.value)}, but {self.rule}"
        subject = spelling(self.setting) if self.setting else ""
        blank = "" if rule.startswith(":") or not subject else " "
        return f"{subject}{blank}{spelled(rule, others or spelling)}"


class InputError(ValueError):
    """Bad input of any kind: a flag, a file, a dataset, a log directory. Its message is redacted.

    wrong: texts, in which settings are ``named``, and faults.

    Scripts print its message and exit with status 2; library users catch it as a ValueError.
    """

    def __init__(self, *wrong: str | Fault):
        super().__init__(*(redact(each) if isinstance(each, str) else each for each in wrong))
        self.faults = tuple(each if isinstance(each, Fault) else Fault("", each) for each in wrong)

    @classmethod
    def check(cls, wrong: Iterable[str | Fault]) -> None:
        """Raise an error with all that is wrong, if anything is."""
        if found := list(wrong):
            raise cls(*found)

    def message(self, spelling: Spelling = str) -> str:
        """All that is wrong. spelling: of the settings."""
        sentences = [redact(fault.sentence(spelling)) for fault in self.faults]
        if len(sentences) == 1:
            return sentences[0]
        return "\n  ".join([f"{len(sentences)} settings are wrong:", *sentences])

    def __str__(self) -> str:
        return self.message()


def quantity(count: int, noun: str) -> str:
    """``quantity(1, "file") == "1 file"``, ``quantity(2, "process") == "2 processes"``."""
    plural = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else plural)
