"""Flags of a command that reads its settings from a checkpoint: accepted, and compared with the checkpoint's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from .declaration import leaves, option
from .values import shown


def expectations(config_class, title: str, leave_out: Sequence[str] = ()) -> Any:
    """A flat config class with the settings of another, each optional and None by default; title: its title in
    ``--help``."""
    fields = []
    for leaf in leaves(config_class):
        if leaf.name not in leave_out and leaf.has_flag:
            text = f"if given, must be the checkpoint's; {leaf.help}"
            fields.append((leaf.name, leaf.type | None, option(None, text, leaf.choices, True, leaf.earlier_names)))
    namespace = {"__doc__": title, "is_expectation": True}
    return dataclasses.make_dataclass(f"Expected{config_class.__name__}", fields, frozen=True, namespace=namespace)


def disagreements(expected, config) -> list[str]:
    """``name (… given, … in the checkpoint)`` for every setting that ``expected`` has and ``config`` has otherwise."""
    found = []
    for leaf in leaves(type(config)):
        given = getattr(expected, leaf.name, None)
        actual = functools.reduce(getattr, leaf.path, config)
        if given is not None and given != actual:
            found.append(f"{leaf.name} ({shown(given)} given, {shown(actual)} in the checkpoint)")
    return found
