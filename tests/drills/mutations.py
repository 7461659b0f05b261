"""Damage to bytes and to nested values, from a seeded random generator: what makes hostile files, and what
reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

EXTREMES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)
INTEGERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64, 10**30, -(10**30))
TEXTS = (
    "",
    "\0",
    "..",
    "../../../etc/passwd",
    "/etc/passwd",
    "pipe:touch /tmp/drilled",
    "http://127.0.0.1:9/x",
    "\ud800",
    "\u2028",
    "NaN",
    "1:30",
    "x" * 10_000,
    "%s%n{0}",
)
VALUES: tuple[Any, ...] = (
    *INTEGERS,
    *TEXTS,
    None,
    True,
    [],
    {},
    [[]],
    {"": None},
    float("nan"),
    float("inf"),
    -0.0,
    1e308,
    [0] * 1000,
)
TOKENS = (
    b"\0" * 512,
    b"\xff" * 64,
    b"[" * 2000,
    b"{" * 2000,
    b'{"a":' * 500,
    b"- " * 1000,
    b"&a [*a]",
    b"*a",
    b"!!python/object/apply:os.system [true]",
    b"!!binary x",
    b"? ",
    b"<<: ",
    b"1e999",
    b"9" * 5000,
    b"-1",
    b"NaN",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"2026-99-99",
    b"999999999999 path=x\n",
    b"30 size=99999999999999999999\n",
    b"\r\n",
    b'"',
    b": ",
)

Change = Callable[[bytearray, random.Random], None]


def _flip_bit(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set_byte(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] = chance.choice(EXTREMES)


def _set_word(data: bytearray, chance: random.Random) -> None:
    width = chance.choice((2, 4, 8))
    at = chance.randrange(len(data))
    value = chance.choice(INTEGERS) % 2 ** (8 * width)
    data[at : at + width] = value.to_bytes(width, chance.choice(("little", "big")))


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _remove(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.randint(1, 64)]


def _repeat(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    part = data[at : at + chance.randint(1, 512)]
    data[at:at] = part * chance.choice((1, 2, 50))


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.choice(TOKENS)


def _overwrite(data: bytearray, chance: random.Random) -> None:
    at, token = chance.randrange(len(data)), chance.choice(TOKENS)
    data[at : at + len(token)] = token


def _noise(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at : at + 16] = chance.randbytes(16)


CHANGES: tuple[Change, ...] = (
    _flip_bit,
    _set_byte,
    _set_word,
    _cut,
    _remove,
    _repeat,
    _insert,
    _overwrite,
    _noise,
)


def damaged(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds with one to four changes, or two seeds spliced together."""
    data = bytearray(chance.choice(seeds))
    if chance.random() < 0.1:
        other = chance.choice(seeds)
        data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.randint(1, 4)):
        if data:
            chance.choice(CHANGES)(data, chance)
    return bytes(data)


def distorted(value: Any, chance: random.Random) -> Any:
    """A nested value of dicts and lists in which one part is removed, renamed or replaced by a strange one."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        changed, key = dict(value), chance.choice(list(value))
        way = chance.random()
        if way < 0.1:
            del changed[key]
        elif way < 0.2:
            changed[chance.choice(TEXTS)] = changed.pop(key)
        else:
            changed[key] = distorted(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.9:
        items, at = list(value), chance.randrange(len(value))
        items[at] = distorted(items[at], chance)
        return items
    return chance.choice(VALUES)


def as_json(value: Any) -> bytes:
    """JSON text, with lone surrogates as such."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


# ------------------------------------------------------------------------------------------------------- hostile files


Case = Callable[[random.Random], bytes]
# (folder) → (a function that makes a hostile file, a function that reads it)
Make = Callable[[Path], tuple[Case, Callable[[bytes], Any]]]


def from_file(path: Path, read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    """A reader of bytes that go through a file."""

    def reader(data: bytes) -> Any:
        path.unlink(missing_ok=True)  # another file each time: an earlier one may still be mapped into memory
        path.write_bytes(data)
        return read(str(path))

    return reader


def mixed(*cases: Case) -> Case:
    return lambda chance: chance.choice(cases)(chance)


def json_cases(seeds: Sequence[bytes], *values: Any) -> Case:
    """Damaged texts, and distorted values."""
    return mixed(partial(damaged, seeds), lambda chance: as_json(distorted(chance.choice(values), chance)))
