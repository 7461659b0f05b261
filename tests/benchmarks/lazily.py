"""The modules of this package, each imported when one of its functions is called: ``--help`` needs none of them."""

from functools import partial
from importlib import import_module
from typing import Any


class _Module:
    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, function: str) -> Any:
        return partial(_call, self.name, function)


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module(f"{__package__}.{module}"), function)(*args, **kwargs)


def __getattr__(name: str) -> _Module:
    return _Module(name)
