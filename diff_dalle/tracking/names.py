"""Names of saved files with placeholders, such as ``best_{step:06d}.pth``."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from ..config import nearest
from ..errors import InputError

EXAMPLES: dict[str, Any] = {"epoch": 1, "step": 1, "sample": 1, "samples_seen": 1, "unet": "0", "val_loss": 0.5}
_FORMAT = re.compile(r"0?[1-9]?\dd?|\.\d{1,2}f")  # {step:06d} and {val_loss:.4f}


def check_name(name: str, setting: str, relative: bool) -> None:
    """InputError unless ``fill_name`` can fill every placeholder of a file's name.

    setting:  what to call it in messages.
    relative: whether it must stay inside a folder, as names in a repository do.
    """
    filled = fill_name(name, EXAMPLES, setting)
    if not filled.strip() or filled.endswith(("/", "\\")) or not filled.isprintable():
        raise InputError(f"{setting} is {name!r}, but must be the path of a file")
    if relative:
        check_relative(name, setting)


def check_relative(path: str, setting: str) -> None:
    """InputError unless a path stays inside the folder that it is relative to."""
    parts = path.split("/")
    if "\\" in path or ":" in parts[0] or not {"", ".", ".."}.isdisjoint(parts):
        raise InputError(f"{setting} is {path!r}, but must be relative, in the form folder/name")


def fill_name(name: str, values: Mapping[str, Any], setting: str = "the name") -> str:
    """``name`` with the values of its placeholders; {{ and }} stand for braces. No other part of the syntax of
    str.format is accepted: it would read attributes of the values."""
    text = ""
    try:
        parts = list(string.Formatter().parse(name))
    except ValueError as error:
        raise InputError(f"{setting} is {name!r}, which has a placeholder that does not end: {error}") from None
    for literal, field, form, conversion in parts:
        text += literal
        if field is None:
            continue
        if field not in EXAMPLES:
            known = ", ".join(f"{{{each}}}" for each in EXAMPLES)
            hint = nearest(field, EXAMPLES)
            raise InputError(f"{setting} has {{{field[:40]}}}, but the placeholders are {known}{hint}")
        if conversion:
            raise InputError(f"{setting} has {{{field}!{conversion}}}: leave !{conversion} out")
        text += _shown(values[field], form or "", f"{setting} has {{{field}:{form}}}")
    return text


def _shown(value: Any, form: str, what: str) -> str:
    if value is None:
        return "none"
    if form:
        kind = float if form.startswith(".") else int
        if not _FORMAT.fullmatch(form) or type(value) is not kind:
            example = "{val_loss:.4f}" if type(value) is float else "{step:06d}"
            raise InputError(f"{what}, but a format must be like that of {example}")
        return format(value, form)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
