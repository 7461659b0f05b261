"""The emoji that Unicode recommends, with their names, and who, what and which skin tone each shows.

Names are the short names of Unicode's CLDR, as the package ``emoji`` has them, such as "woman astronaut medium skin
tone"; captions add the package's other names, and what people write. Parts are read from the code points (Unicode
Technical Standard 51), not from the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from ...config import InputError

TONES = ("light", "medium-light", "medium", "medium-dark", "dark")  # by modifier, U+1F3FB and following
WHO = ("person", "woman", "man")

ADULT = "\U0001f9d1"  # what an emoji of a person, woman or man shows who does nothing special

_MODIFIERS = {chr(0x1F3FB + i): tone for i, tone in enumerate(TONES)}
_ADULTS = {ADULT: "person", "\U0001f469": "woman", "\U0001f468": "man"}
_SIGNS = {"\u2640": "woman", "\u2642": "man"}  # after a joiner: the gender of the emoji before
_JOINER, _PICTURE = "\u200d", "\ufe0f"  # zero-width joiner; variation selector 16, "show as a picture"
_FLAG = "\U0001f3f4"  # before the tags of a region
_REGIONS = range(0x1F1E6, 0x1F200)  # regional indicators: letters of a country's code
_NO_ARTICLE = {"people", "men", "women", "children", "flag"}  # beside plurals in -s, as words of a name


@dataclass(frozen=True)
class Emoji:
    """One emoji.

    sequence: its code points.
    name:     CLDR's short name.
    who:      of WHO, if it shows one adult in a role that others have too; else empty.
    what:     its code points without those of who and skin tone: equal for "man astronaut" and "woman astronaut dark
              skin tone".
    tones:    the skin tones, of TONES: none if it has none or the font's yellow, two for two persons.
    captions: what it may be called, its name first.
    """

    sequence: str
    name: str
    who: str
    what: str
    tones: tuple[str, ...]
    captions: tuple[str, ...] = ()

    @classmethod
    def parse(cls, record: Mapping[str, object]) -> Emoji:
        """An emoji from a file. Raises ValueError unless the record has just these fields, of these types."""
        texts = {name: record.get(name) for name in ("sequence", "name", "who", "what")}
        lists = {name: record.get(name) for name in ("tones", "captions")}
        if record.keys() != {*texts, *lists} or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("not the parts of an emoji")
        tones, captions = (_strings(each) for each in lists.values())
        if not set(tones) <= set(TONES):
            raise ValueError("not the parts of an emoji")
        return cls(**cast(dict[str, str], texts), tones=tones, captions=captions)


def _strings(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ValueError("not the parts of an emoji")
    return tuple(values)


def recommended() -> list[Emoji]:
    """The fully qualified emoji, ordered by code points. InputError without the package ``emoji``."""
    try:
        import emoji
    except ModuleNotFoundError as error:
        raise InputError("the emoji world needs the package emoji: pip install 'diff_dalle[emoji]'") from error
    known = emoji.EMOJI_DATA.items()
    qualified = {key: entry for key, entry in known if entry["status"] == emoji.STATUS["fully_qualified"]}
    names = {key: [entry["en"], *entry.get("alias", ())] for key, entry in sorted(qualified.items())}
    return list(_described(names))


def names_version() -> str:
    """Of the package that has the names."""
    return metadata.version("emoji")


def _described(names: Mapping[str, Sequence[str]]) -> Iterator[Emoji]:
    """From the names of the package, such as ":woman_astronaut:", by sequence: the first is CLDR's."""
    parts = {sequence: _parts(sequence) for sequence in names}
    gendered = {what for who, what, _ in parts.values() if who in ("woman", "man")}
    for sequence, codes in names.items():
        who, what, tones = parts[sequence]
        name, *others = (code.strip(":").replace("_", " ") for code in codes)
        if sequence.startswith(_FLAG + "\U000e0067") or ord(sequence[0]) in _REGIONS:
            name = f"flag: {name}"
        captions = _captions(name, others)
        yield Emoji(sequence, name, (who or "person") if what in gendered else "", what, tones, captions)


def _captions(name: str, others: Sequence[str]) -> tuple[str, ...]:
    """The name, what else it is called, and the name with an article and without hyphens, where that is English."""
    found = [name, *others]
    words = re.split(r" (?:with|without|in|on|of) ", name.replace(":", ""))[0].split()
    if not any(word in _NO_ARTICLE or (word.endswith("s") and not word.endswith("ss")) for word in words):
        found.append(f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}")
    found += [text.replace("-", " ") for text in found if "skin tone" not in text]
    different: dict[str, str] = {}
    for text in found:
        different.setdefault(text.lower(), text)
    return tuple(different.values())


def _parts(sequence: str) -> tuple[str, str, tuple[str, ...]]:
    """Who, what and tones of a sequence. Who is empty where no code point says it, and where several do."""
    tones = tuple(_MODIFIERS[each] for each in sequence if each in _MODIFIERS)
    plain = "".join(each for each in sequence if each not in _MODIFIERS and each != _PICTURE)
    said = [each for each in plain.split(_JOINER) if each in _ADULTS or each in _SIGNS]
    if len(said) != 1:
        return "", plain, tones
    (sign,) = said
    if sign in _SIGNS:
        return _SIGNS[sign], plain.replace(_JOINER + sign, ""), tones
    return _ADULTS[sign], plain.replace(sign, ADULT), tones
