"""``--import MODULE`` of every command: modules with samplers, losses, tasks, filters or worlds of one's own."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from ..config import InputError
from .sources import values_on

FLAG = "--import"
HELP = "module with parts of your own, in the current folder or on PYTHONPATH; may be repeated"


def import_parts(argv: Sequence[str]) -> None:
    """Import the modules that a command line names. InputError for one that cannot be imported."""
    for name in values_on(argv, (FLAG,)):
        if not all(map(str.isidentifier, name.split("."))):
            raise InputError(f"{FLAG} is {name!r}, but must be a module's name, such as my_parts for ./my_parts.py")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the last, so that nothing here takes the place of a package
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise InputError(f"{FLAG} {name}: it requires the package {error.name}") from error
            raise InputError(f"{FLAG} {name}: there is no such module in {os.getcwd()} or on PYTHONPATH") from None
        except InputError as error:
            raise InputError(f"{FLAG} {name}: {error}") from None
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}, line {getattr(error, 'lineno', None) or last.lineno}"
            raise InputError(f"{FLAG} {name}: {type(error).__name__}: {error} ({where})") from error
