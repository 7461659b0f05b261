"""Merge files: which pairs of symbols are joined into tokens, and in which order.

The format is that of CLIP's ``bpe_simple_vocab_16e6.txt``: a header line, then one merge a line as ``left right``. A symbol
is written in letters that stand for bytes, the last symbol of a word ends in ``</w>``.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from ..errors import InputError

Pair = tuple[str, str]

WORD_END = "</w>"
OWN_FILE = Path(__file__).with_name("vocabulary.txt")  # learnt by scripts/train_tokenizer.py
OWN_HEADER = "#diff_dalle byte pairs: wordnet"
CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_PACKAGES = {"open_clip": "open_clip_torch", "clip": "clip-anytorch"}  # import name → name to install
CLIP_HEADER = '"bpe_simple_vocab_16e6.txt#version: 0.2'
CLIP_MERGES = 49_152 - 256 - 2  # CLIP uses the head of its file only: this many make its 49 408 tokens
MAX_BYTES = 64 * 2**20  # twenty times CLIP's file, unpacked


def byte_letters() -> dict[int, str]:
    """One visible letter for each byte, in the order of the first 256 token ids (Radford et al. 2019, GPT-2).

    Bytes that are visible in Latin-1 come first and stand for themselves; the others take the letters from U+0100 on.
    """
    visible = [byte for byte in range(ord("!"), 256) if chr(byte).isprintable()]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


LETTERS = byte_letters()


def base_symbols(word: str) -> list[str]:
    """A word before any merge: a letter for each byte of its UTF-8 form, the last one marked as the word's end."""
    symbols = [LETTERS[byte] for byte in word.encode("utf-8")]
    symbols[-1] += WORD_END
    return symbols


@dataclass(frozen=True)
class Vocabulary:
    """The merges of a file in order, and what the file is called: wordnet (ours), clip, or bpe (any other)."""

    name: str
    merges: tuple[Pair, ...]

    def symbols(self) -> list[str]:
        """Every symbol in the order of its token id: bytes, bytes that end a word, merges."""
        letters = list(LETTERS.values())
        return letters + [letter + WORD_END for letter in letters] + [left + right for left, right in self.merges]


def merge_file_text(header: str, merges: Iterable[Pair]) -> str:
    """The text of a merge file."""
    return "\n".join([header, *(f"{left} {right}" for left, right in merges), ""])
