"""Single values: their types, and how they are read and written."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence

from .declaration import Leaf
from .errors import Fault, InputError

_NAMES = {int: ("an ", "integer"), float: ("a ", "number"), str: ("", "text"), bool: ("", "True or False")}
_PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "True or False"}
MAX_INTEGER = 2**63 - 1  # the largest that torch and numpy hold


def type_name(kind, article: bool = False) -> str:
    """The name of a type in messages and help: ``integer`` (with its article ``an integer``), ``comma-separated
    numbers``."""
    if kind in _NAMES:
        return "".join(_NAMES[kind]) if article else _NAMES[kind][1]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(args[0]) or args[:1]
        inner = next(part for part in parts if part is not types.NoneType)
        return f"comma-separated {_PLURALS[inner]}" + (" or none" if types.NoneType in parts else "")
    return " or ".join("none" if arg is types.NoneType else type_name(arg, article) for arg in args)


def _split_list(text: str) -> list[str]:
    """Split at commas outside braces, so that brace ranges stay whole; ``none`` is the empty list.

    A command, ``pipe:…`` or ``expand:pipe:…``, goes on to the next ``,pipe:`` or ``,expand:pipe:`` or to the end.
    """
    if text.lower() == "none":
        return []
    plain, *commands = re.split(r"(?:^|,)(?=(?:expand:)?pipe:)", text)
    return re.findall(r"(?:\{[^{}]*\}|[^,])+", plain) + commands


def _convert(value, kind, from_text: bool):
    """``value`` as ``kind``, or ValueError. Texts from the command line are parsed; YAML values must have the type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # optional
        if value in (None, "auto") or (from_text and value.lower() in ("none", "null", "")):
            return None
        return _convert(value, next(arg for arg in args if arg is not types.NoneType), from_text)
    if origin is tuple:
        items = _split_list(value) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            items = [items]
        return tuple(_convert(item, args[0], isinstance(value, str)) for item in items)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if from_text and value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
    elif kind is str:
        if isinstance(value, str) or (not from_text and type(value) in (int, float)):
            return str(value)
    elif isinstance(value, bool):
        pass
    elif kind is int:
        if from_text or isinstance(value, int):
            if not -MAX_INTEGER <= (number := int(value)) <= MAX_INTEGER:
                raise _OutOfRange("an integer between -(2^63 - 1) and 2^63 - 1")
            return number
    elif kind is float and (from_text or isinstance(value, (int, float))):
        if not math.isfinite(real := float(value)):
            raise _OutOfRange("a finite number")
        return real
    raise ValueError


def _unnested(value, kind, from_text: bool):
    """The texts of a setting in which lists may take the place of texts."""
    if from_text:
        return _split_expressions(value) if typing.get_origin(kind) is tuple else value
    if typing.get_origin(kind) is tuple:
        return [_json(item) for item in value] if isinstance(value, list) else value
    return _json(value)


def _json(value):
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, Mapping)) else value


def _split_expressions(text: str) -> list[str]:
    """Split at commas outside brackets and quotes; ``none`` is the empty list. A list of lists may stand in brackets,
    as in a file."""
    if text.lower() == "none":
        return []
    text = text.strip()
    if text.startswith("[[") and text.endswith("]]"):
        text = text[1:-1]
    parts, depth, quote = [""], 0, ""
    for before, character in zip(" " + text, text, strict=False):
        if quote:
            quote = "" if character == quote and before != "\\" else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not (depth or quote):
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


class _OutOfRange(ValueError):
    """A number that no setting can have; its message says which ones they can."""


class FlagText(str):
    """The text of a flag, to be parsed; other texts are values."""


def checked(leaf: Leaf, value, setting: str):
    """``value`` as the setting's type. Raises InputError, about ``setting``, for a value of another type."""
    from_text = isinstance(value, FlagText)
    if from_text and value in leaf.choices:  # "none", where it is optional or the default is the empty list
        if leaf.type != tuple[str, ...]:
            return str(value)
        if not leaf.default:
            return (str(value),)
    try:
        if leaf.nested:
            value = _unnested(value, leaf.type, from_text)
        return _convert(value, leaf.type, from_text)
    except _OutOfRange as error:
        raise InputError(Fault(setting, f"must be {error}", value)) from None
    except (ValueError, TypeError, OverflowError):  # the last: an integer too large for a float
        raise InputError(Fault(setting, f"must be {type_name(leaf.type, article=True)}", value)) from None


def checked_list(value, setting: str) -> Sequence:
    """``value``, if it can be a list of sections. Raises InputError if not."""
    if not isinstance(value, (list, tuple)):
        raise InputError(Fault(setting, "must be a list of sections", value))
    return value


def checked_mapping(value, setting: str) -> Mapping:
    """``value``, if it can be a section. Raises InputError if not."""
    if not isinstance(value, Mapping):
        raise InputError(Fault(setting or "the configuration", "must be a mapping of settings", value))
    return value


def shown(value) -> str:
    """A setting's value as a flag spells it."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(shown, value)) or "none"
    return "none" if value is None or value == "" else str(value)
