"""Imported first by every script: answers ``--help`` in a fraction of a second.

Settings are declared beside what they configure, so parsing a command line imports torch, which takes longer than all
the rest. Help, and the completion of flags in a shell, need the declarations only. When one of them is asked for, this
puts something without content in the place of torch, as documentation builders do; the script then prints it and ends.
"""

import os
import sys
import types
from collections.abc import MutableSequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

ABSENT = ("torch", "torchvision")


class Absent(types.ModuleType):
    """Stands for a module and everything in it: as a base class nothing, as a decorator without effect."""

    __path__: MutableSequence[str] = []  # noqa: RUF012, a module has one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **settings: Any) -> Any:
        decorated = len(args) == 1 and not settings and isinstance(args[0], (type, types.FunctionType))
        return args[0] if decorated else self

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class AbsentFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> Absent:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It has no content."""


if {"-h", "--help", "--help_all"} & set(sys.argv[1:]) or "_ARGCOMPLETE" in os.environ:
    sys.meta_path.insert(0, AbsentFinder())
