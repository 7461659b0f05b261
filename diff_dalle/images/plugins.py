"""Functions and classes of other packages, which name them in their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..config import nearest
from ..errors import InputError


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name."""
    return {each.name: each for each in entry_points(group=group)}


def load_plugin(group: str, name: str, setting: str, otherwise: str = "") -> Any:
    """What the entry point ``name`` of a group stands for; without a name the only one. InputError, which names the
    setting, for one that is not installed or cannot be imported. otherwise: what can be done instead."""
    found = installed(group)
    if not name and len(found) == 1:
        (name,) = found
    if name not in found:
        known = f"installed are {', '.join(sorted(found))}{nearest(name, found)}" if found else "none is installed"
        given, named = (repr(name), f"with {name}") if name else ("not set", "that has one")
        instead = f", or {otherwise}" if otherwise else ""
        raise InputError(
            f"{setting} is {given}, but must name an entry point of the group {group} of a package, of which {known}: "
            f"install a package {named}{instead}"
        )
    try:
        return found[name].load()
    except Exception as error:  # a package that is broken, or lacks one that it needs, may raise anything
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{setting} is {name!r} ({found[name].value}), which cannot be imported: {type(error).__name__}: {reason}"
        ) from error
