"""Other packages: those of extras, which are imported when they are asked for, and plug-ins by their entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points, version
from types import ModuleType
from typing import Any

from ..config import Fault, InputError, nearest


def import_package(module: str, extra: str, purpose: str) -> ModuleType:
    """A module of a package of an extra, which works with torchvision. InputError that says what to install."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise InputError(f"{purpose} cannot be had: {package} requires the package {error.name}") from error
        install = f"pip install 'diff_dalle[{extra}]'"
        raise InputError(f"{purpose} requires the package {package.replace('_', '-')}: {install}") from None
    except Exception as error:  # torchvision raises RuntimeError, of operators that torch does not have
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{package} cannot be imported ({reason}), which {purpose} requires: torchvision must be built for the "
            f"installed torch {version('torch')}; install both from one index, such as "
            "https://download.pytorch.org/whl/cpu"
        ) from error


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
        given, which = (repr(name), f"with {name}") if name else ("not set", "that has one")
        instead = f", or {otherwise}" if otherwise else ""
        rule = f"must name an entry point of the group {group} of a package, of which {known}"
        raise InputError(Fault(setting, f"is {given}, but {rule}: install a package {which}{instead}"))
    try:
        return found[name].load()
    except Exception as error:  # a package that is broken, or lacks one that it needs, may raise anything
        reason = str(error).partition("\n")[0]
        rule = f"is {name!r} ({found[name].value}), which cannot be imported: {type(error).__name__}: {reason}"
        raise InputError(Fault(setting, rule)) from error
