"""Names that a user may misspell."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from .errors import InputError, quoted
from .other_names import OTHER_NAMES

MAX_NAME = 64  # characters; the longest of ours has half
T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint ``; did you mean X?`` for a name that is not among ``names``, or an empty string: the one that other
    projects call so, else the shortest that begins so, else one that is spelled much alike."""
    if len(name) > MAX_NAME:
        return ""
    known, plain = {_plain(each): each for each in names}, _plain(name)
    meant = OTHER_NAMES.get(plain, (plain,))
    found = [each for each in (plain, *meant) if each in known]
    if meant and not found:
        begun = [each for each in known if len(plain) > 2 and each.startswith(plain)]
        cutoff = 0.6 if len(plain) <= 4 else 0.7  # of a short word one letter is much
        found = sorted(begun, key=len) or difflib.get_close_matches(plain, known, n=1, cutoff=cutoff)
    return f"; did you mean {known[found[0]]}?" if found else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """``table[name]``, or an InputError that lists the known names. ``what`` says what the name is of."""
    if name not in table:
        raise InputError(f"{what} {quoted(name)} is unknown{nearest(name, table)} (known: {', '.join(table)})")
    return table[name]
