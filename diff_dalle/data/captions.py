"""Captions: which member holds them, according to ``--caption_field``, and how they are read.

A caption in another encoding than UTF-8 is a broken sample, never a guess. Where a field of the json holds a list of
texts, they are captions of the same image.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

from .. import storage
from ..config import ABSENT, Fault, InputError, nearest, option
from ..images.decode import BrokenSample

Chance = Callable[[], float]  # a number in [0, 1)
NOT_UTF8 = "its caption is not UTF-8"
EMPTY = "its caption is empty"
NUL = "its caption holds a NUL character"
OLD_CAPTION_CHANCE = 0.05  # of the original caption, where a new one has replaced it


def _text(data: bytes, record: dict | None, chance: Chance | None) -> str:
    try:
        return storage.decode_text(data)
    except UnicodeDecodeError:
        raise BrokenSample(NOT_UTF8) from None


def _old_caption(data: bytes, record: dict | None, chance: Chance | None) -> object:
    """``caption``, or sometimes the ``og_caption`` in the json text under ``old_caption``, if there is one."""
    record = record or read_record(data)
    if chance is not None and isinstance(record.get("old_caption"), str) and chance() < OLD_CAPTION_CHANCE:
        with contextlib.suppress(BrokenSample):
            original = read_record(record["old_caption"].encode()).get("og_caption")
            if isinstance(original, str) and original.strip():
                return original
    return record.get("caption")


def _one_of_captions(data: bytes, record: dict | None, chance: Chance | None) -> object:
    """One of the texts in the list ``captions``, each equally often; the first one where it is always the same."""
    texts = (record or read_record(data)).get("captions")
    if not isinstance(texts, list) or not texts:
        raise BrokenSample("its json has no list of texts under 'captions'")
    return _one_of(texts, chance)


def _one_of(texts: list, chance: Chance | None) -> object:
    return texts[0 if chance is None else int(chance() * len(texts))]


#: Named ways to get a caption from a member's bytes, or from its json object if that has been read already.
GETTERS: dict[str, Callable[[bytes, dict | None, Chance | None], object]] = {
    "identity": _text,
    "captions": _one_of_captions,
    "old_caption": _old_caption,
}
ALIASES = {"captions_getter": "old_caption"}


def caption_option() -> Any:
    """The setting ``caption_field`` of every command that reads captions from shards."""
    return option(
        "txt",
        "location of captions in shards: extension of a text member, json:FIELD, or a pair of an extension and a "
        f'getter, such as ["json", "old_caption"]: {", ".join(GETTERS)}',
        nested=True,
        needs=("data_dir",),
    )


@functools.lru_cache(maxsize=64)
def _parsed(field: str) -> tuple[str, str, str]:
    """The kind of member that holds captions, the name of the json field, and that of the getter; "" for none."""
    if field.lstrip().startswith("["):
        try:
            pair = json.loads(field)
        except (ValueError, RecursionError):
            pair = None
        match pair:
            case [str() as kind, str() as name] if kind:
                name = ALIASES.get(name, name)
                if name not in GETTERS:
                    raise _fault(
                        f"has the name {name!r}, but must have one of {', '.join(GETTERS)}"
                        f"{nearest(name, [*GETTERS, *ALIASES])} (a field of the json is written json:FIELD)"
                    )
                if name != "identity" and kind.lower() != "json":
                    raise _fault(f"reads {name} from {kind!r}, which is made from json")
                return kind.lower(), "", name
        raise _fault("must be a pair [EXTENSION, NAME]", field)
    kind, colon, name = field.partition(":")
    if not kind or (colon and (kind != "json" or not name)) or (kind == "json" and not colon):
        raise _fault("must be the extension of a text member (txt), json:FIELD or [EXTENSION, NAME]", field)
    return kind.lower(), name, "" if colon else "identity"


def _fault(rule: str, value: object = ABSENT) -> InputError:
    return InputError(Fault("caption_field", rule, value))


def caption_kind(field: str) -> str:
    """The kind of member that holds captions: "txt" for ``txt``, "json" for ``json:caption``."""
    return _parsed(field)[0]


def read_caption(data: bytes, field: str, record: dict | None = None, chance: Chance | None = None) -> str:
    """The caption in a member's bytes. Raises BrokenSample when there is none.

    record: the sample's json object, if ``read_record`` has read it already.
    chance: draws the number by which a random one of several captions is chosen; None = always the usual one.
    """
    _, name, getter = _parsed(field)
    text = GETTERS[getter](data, record, chance) if getter else (record or read_record(data)).get(name)
    if isinstance(text, list) and text:
        text = _one_of(text, chance)
    if not isinstance(text, str):
        raise BrokenSample(f"its json has no text under {name or 'caption'!r}")
    return usable_caption(text)


def is_drawn(data: bytes, field: str) -> bool:
    """Whether the caption in a member's bytes is one of several, drawn anew each time the sample comes."""
    draws: list[float] = []

    def chance() -> float:
        draws.append(0.0)
        return draws[-1]

    with contextlib.suppress(BrokenSample):
        read_caption(data, field, chance=chance)
    return bool(draws)


def usable_caption(text: str) -> str:
    """A caption without the whitespace around it. Raises BrokenSample for an empty one and for one that is no text."""
    text = text.removeprefix("\ufeff").strip()  # a byte order mark within a json
    if not text:
        raise BrokenSample(EMPTY)
    if "\0" in text:  # as in UTF-16 without a mark
        raise BrokenSample(NUL)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise BrokenSample(NOT_UTF8) from None
    return text


def read_record(data: bytes) -> dict:
    """The object in a json member's bytes. Raises BrokenSample for anything else."""
    try:
        record = json.loads(storage.decode_text(data))
    except UnicodeDecodeError:
        raise BrokenSample("its json is not UTF-8") from None
    except (ValueError, RecursionError):
        raise BrokenSample("its json is not valid") from None
    if not isinstance(record, dict):
        raise BrokenSample("its json is not an object")
    return record
