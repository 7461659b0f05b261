"""Tables of parts, such as samplers and losses, to which modules of one's own and installed packages add theirs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .errors import InputError, cut
from .names import nearest

T = TypeVar("T")
Part = TypeVar("Part")


class Registry(dict[str, T]):
    """Parts by name: the built-in ones, those that modules register, and those that installed packages name as entry
    points of ``group``, which are imported at their first use. No other module is imported because of a name.

    ``register`` above a function or class adds it as MODULE.NAME, so that what names it, such as a checkpoint, says
    which module it needs. Iteration leaves out what is not imported; ``names`` has all.
    """

    def __init__(self, group: str, parts: Mapping[str, T] | None = None):
        super().__init__(parts or {})
        self.group = group

    def register(self, part: Part) -> Part:
        """Add a function or class. InputError when its name is taken, except by an earlier one of a notebook."""
        name = _name_of(part)
        is_redefined = "." not in name and getattr(self.get(name), "__module__", "") == "__main__"
        if name in self and not is_redefined:
            raise InputError(f"{name} is in {self.group} already: give yours another name")
        super().__setitem__(name, part)  # type: ignore[assignment]
        return part

    def __setitem__(self, name: str, part: T) -> NoReturn:
        raise InputError(f"{name} cannot be put into {self.group}: write @….register above its definition")

    def __bool__(self) -> bool:
        return True  # also before anything is registered

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in installed(self.group)

    def __missing__(self, name: str) -> T:
        return loaded(installed(self.group)[name])

    def names(self) -> list[str]:
        """All names, also of what installed packages have."""
        return list(dict.fromkeys([*self, *installed(self.group)]))

    def rule(self, name: str) -> str:
        """What is wrong with a name that is not here, as the rule of a fault."""
        module, known = name.rpartition(".")[0], self.names()
        if (
            module
            and all(map(str.isidentifier, name.split(".")))
            and module not in {_module_of(each) for each in known}
        ):
            return f"{cut(module)} is not imported: start with --import {cut(module)}, or import it in Python"
        listed = f"one of {', '.join(known)}, or " if known else ""
        return f"must be {listed}MODULE.NAME of your own{nearest(name, known)}"


def _name_of(part: object) -> str:
    """MODULE.NAME; of the script that runs, the module is its file, and what a notebook defines has none."""
    module, name = part.__module__, part.__name__  # type: ignore[attr-defined]
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return f"{module}.{name}" if module else name


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name."""
    return {each.name: each for each in entry_points(group=group)}


def loaded(plugin: EntryPoint) -> Any:
    """What an entry point stands for. InputError for one that cannot be imported."""
    try:
        return plugin.load()
    except InputError:
        raise
    except Exception as error:  # a package that is broken, or lacks one that it needs, may raise anything
        reason = str(error).partition("\n")[0]
        raise InputError(f"{plugin.value} cannot be imported: {type(error).__name__}: {reason}") from error
