"""The settings of a base that an adapter is trained for, which are read from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..config import entries, shown, to_dict
from ..errors import InputError

T = TypeVar("T")


def of_base(own: T, base: T, usual: T, path: str, strict: Sequence[str] = (), origin: str = "") -> T:
    """The base's settings, a config dataclass.

    own:    the run's, which may repeat those of the base. usual: those of a run that says nothing.
    strict: names of settings that must be the base's even where they are the usual ones, which ``origin`` says.

    Raises InputError for one that is neither the usual one nor the base's.
    """
    kind = type(own)
    rows = zip(*(entries(kind, to_dict(each)) for each in (own, base, usual)), strict=True)
    for (name, free, value), (_, _, found), (_, _, default) in rows:
        if free or value == found or (value == default and name not in strict):
            continue
        value, found = (shown(tuple(each) if isinstance(each, list) else each) for each in (value, found))
        source = f" ({origin})" if origin and name in strict else ""
        raise InputError(
            f"{name} is {value}{source}, but the base {path} has {found}: leave it out, or give another base"
        )
    return base
