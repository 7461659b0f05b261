"""Bytes → text: UTF-8, or what a byte order mark says (The Unicode Standard 16.0, section 23.8, table 23-7)."""

from __future__ import annotations

import codecs

# UTF-32 first: its little-endian mark begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode_text(data: bytes, errors: str = "strict") -> str:
    """The text, without its byte order mark. errors: what ``bytes.decode`` does with other bytes.

    Raises UnicodeDecodeError, a ValueError, for bytes in any other encoding: which one is never guessed.
    """
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors)
