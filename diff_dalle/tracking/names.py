"""What the settings of loaders and savers name: files, with placeholders such as ``best_{step:06d}.pth``, and runs."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from .. import storage
from ..config import Fault, InputError, named, nearest

EXAMPLES: dict[str, Any] = {"epoch": 1, "step": 1, "sample": 1, "samples_seen": 1, "unet": "0", "val_loss": 0.5}
_FORMAT = re.compile(r"0?[1-9]?\dd?|\.\d{1,2}f")  # {step:06d} and {val_loss:.4f}


def check_name(name: str, setting: str, relative: bool) -> None:
    """InputError unless ``fill_name`` can fill every placeholder of a file's name.

    setting:  what to call it in messages.
    relative: whether it must stay inside a folder, as names in a repository do.
    """
    filled = fill_name(name, EXAMPLES, setting)
    if not filled.strip() or filled.endswith(("/", "\\")) or not filled.isprintable():
        raise InputError(Fault(setting, "must be the path of a file", name))
    if relative:
        check_relative(name, setting)


def check_relative(path: str, setting: str) -> None:
    """InputError unless a path stays inside the folder that it is relative to."""
    if not storage.stays_inside(path):
        raise InputError(Fault(setting, "must be relative, in the form folder/name", path))


def fill_name(name: str, values: Mapping[str, Any], setting: str = "the name") -> str:
    """``name`` with the values of its placeholders; {{ and }} stand for braces. No other part of the syntax of
    str.format is accepted: it would read attributes of the values."""
    text = ""
    try:
        parts = list(string.Formatter().parse(name))
    except ValueError as error:
        raise InputError(Fault(setting, f"has a placeholder that does not end: {error}", name)) from None
    for literal, field, form, conversion in parts:
        text += literal
        if field is None:
            continue
        if field not in EXAMPLES:
            known = ", ".join(f"{{{each}}}" for each in EXAMPLES)
            hint = nearest(field, EXAMPLES)
            raise InputError(Fault(setting, f"has {{{field[:40]}}}, but the placeholders are {known}{hint}"))
        if conversion:
            raise InputError(Fault(setting, f"has {{{field}!{conversion}}}: leave !{conversion} out"))
        value = values[field]
        if form and value is not None and not _fits(form, value):
            example = "{val_loss:.4f}" if type(value) is float else "{step:06d}"
            rule = f"has {{{field}:{form}}}, but a format must be like that of {example}"
            raise InputError(Fault(setting, rule))
        text += _shown(value, form or "")
    return text


def _fits(form: str, value: Any) -> bool:
    return bool(_FORMAT.fullmatch(form)) and type(value) is (float if form.startswith(".") else int)


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "none"
    return format(value, form or (".4g" if isinstance(value, float) else ""))


Keys = Mapping[str, Mapping[str, bool]]  # by kind: its settings beside those that all kinds have; True = required


def wrong_keys(config: object, setting: str, table: Keys) -> Iterator[Fault]:
    """The settings that the kind in ``setting`` lacks, and those of other kinds."""
    kind = getattr(config, setting)
    own = table.get(kind, {})
    for name in dict.fromkeys(name for names in table.values() for name in names):
        given = getattr(config, name) not in (None, "")
        if own.get(name) and not given:
            yield Fault(name, f"is missing, but {named(setting)} {kind} needs it")
        elif given and name not in own:
            owners = " or ".join(each for each, names in table.items() if name in names)
            yield Fault(name, f"has no effect with {named(setting)} {kind or 'null'}: it is for {owners}")


def check_run_path(path: str) -> None:
    """InputError unless ``path`` can name a run of wandb."""
    parts = path.split("/")
    if len(parts) != 3 or not all(parts):
        raise InputError(Fault("wandb_run_path", "must have the form entity/project/id", path))
