"""Merge files: the merges of a byte-pair vocabulary, in order.

The format is that of CLIP's ``bpe_simple_vocab_16e6.txt``: a header line, then one merge per line as ``left right``. In
a symbol each letter stands for a byte; ``</w>`` marks the end of a word. Lines at the end such as ``[star]`` are tokens
that were added later. GPT-2's ``vocab.bpe`` has the same format, but no ends of words: a word begins with a space.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import storage
from ..config import Fault, InputError, named

Pair = tuple[str, str]

WORD_END = "</w>"
OWN_FILE = str(Path(__file__).with_name("vocabulary.txt"))  # learned by scripts/train_tokenizer.py
OWN_HEADER = "#diff_dalle byte pairs: wordnet"
CAPTIONS_HEADER = "#diff_dalle byte pairs: captions"
CLIP_HEADER = '"bpe_simple_vocab_16e6.txt#version: 0.2'
GPT2_HEADER = "#version: 0.2"  # also of other files, in which words have ends
CLIP_MERGES = 49_152 - 256 - 2  # CLIP uses only the first merges of its file, which give 49,408 tokens
CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
BUILT_IN = ("", "clip")  # values of bpe_path that name no file
CLIP_PACKAGES = ("open_clip", "clip")  # import names of open_clip_torch and of clip-anytorch
NAMES = {
    OWN_HEADER: "wordnet",
    CAPTIONS_HEADER: "captions",
    CLIP_HEADER: "clip",
    GPT2_HEADER: "gpt2",
}  # files with other headers are called "bpe"
HEADERS = {name: header for header, name in NAMES.items()}
ADDED = re.compile(r"\[\S+\]|<\S+>")  # a line of a merge file that adds a token; merges have a space
MAX_BYTES = 8 * 2**20  # more than twice the size of CLIP's file, unpacked


def _byte_letters() -> dict[int, str]:
    """One printable letter per byte, in the order of the first 256 token ids (Radford et al. 2019, GPT-2).

    Bytes that are printable in Latin-1 come first and represent themselves; the others get the letters from U+0100 on.
    """
    printable = [byte for byte in range(ord("!"), 256) if chr(byte).isprintable()]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


def byte_symbols(word: str, ends: bool = True) -> list[str]:
    """A word before any merge: the letters of its UTF-8 bytes, the last one marked as the end of the word if words have
    ``ends``."""
    symbols = [BYTE_LETTERS[byte] for byte in word.encode("utf-8")]
    if ends:
        symbols[-1] += WORD_END
    return symbols


@dataclass(frozen=True)
class Vocabulary:
    """Merges in the order in which they were learned, and their origin: wordnet (ours), captions, clip, gpt2, or bpe
    (others).

    added: further tokens, texts without spaces that are found in captions as they are, such as "[star]".
    """

    name: str
    merges: tuple[Pair, ...]
    added: tuple[str, ...] = ()

    @property
    def ends_words(self) -> bool:
        """Whether the last byte of a word is marked, instead of a space before the word."""
        return self.name != "gpt2"

    def symbols(self) -> list[str]:
        """All symbols in the order of their token ids: the bytes, the bytes at the end of a word, the merges."""
        letters = list(BYTE_LETTERS.values())
        ends = [letter + WORD_END for letter in letters] if self.ends_words else []
        return letters + ends + [left + right for left, right in self.merges]

    def text(self) -> str:
        """The merge file that ``parse_vocabulary`` reads back."""
        return merge_file_text(HEADERS.get(self.name, "#"), self.merges) + "".join(f"{text}\n" for text in self.added)


def merge_file_text(header: str, merges: Sequence[Pair]) -> str:
    return "\n".join([header, *(f"{left} {right}" for left, right in merges)]) + "\n"


def write_merge_file(path: str, header: str, merges: Sequence[Pair]) -> None:
    """Write a merge file as plain text; the bytes of a gzip file would depend on the version of zlib."""
    storage.write_bytes(path, merge_file_text(header, merges).encode("utf-8"))


def find_vocabulary(bpe_path: str) -> str:
    """The merge file for ``bpe_path``: "" = the built-in one, ``clip`` = that of an installed package, else the path.

    The packages are not imported, since they would load torchvision. Raises InputError for ``clip`` when neither is
    installed.
    """
    if bpe_path == "":
        return OWN_FILE
    if bpe_path != "clip":
        return bpe_path
    for package in CLIP_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / CLIP_FILE).is_file():
                return str(path)
    missing = f"clip needs {CLIP_FILE} from the package open_clip_torch or clip-anytorch, but neither is installed"
    remedy = "run `pip install --no-deps open_clip_torch`, or name the file itself"
    raise InputError(Fault("bpe_path", f"{missing}: {remedy}"))


def read_vocabulary(bpe_path: str = "") -> Vocabulary:
    """Read and validate a merge file, plain or gzip-compressed, local or remote; ``bpe_path`` as in `find_vocabulary`.

    Raises InputError for a file that is missing, damaged or too large, and for an invalid line.
    """
    path = find_vocabulary(bpe_path)
    return parse_vocabulary(_read_text(path), f"{named('bpe_path')}: {path}")


@functools.lru_cache(4)
def parse_vocabulary(text: str, where: str) -> Vocabulary:
    """The vocabulary in the text of a merge file, which messages call ``where``. InputError for an invalid line."""
    header, *lines = text.splitlines() or [""]
    if "#" not in header:
        raise InputError(f"{where} is not a merge file: its first line must be a header that contains #")
    added: list[str] = []
    while lines and ADDED.fullmatch(lines[-1]):
        added.insert(0, lines.pop())
    if len(set(added)) < len(added):
        raise InputError(f"{where} adds a token twice: {', '.join(added)[:60]}")
    if header == CLIP_HEADER:
        lines = lines[:CLIP_MERGES]
        if len(lines) < CLIP_MERGES:
            raise InputError(f"{where} is incomplete: it has {len(lines)} of CLIP's {CLIP_MERGES} merges")
    known = set(Vocabulary("", ()).symbols())
    merges = []
    for number, line in enumerate(lines, start=2):
        parts = line.split(" ")
        if len(parts) != 2:
            raise InputError(f"{where} line {number} is {line[:60]!r}, but a merge is two symbols separated by a space")
        left, right = parts
        for symbol in parts:
            if symbol not in known:
                raise InputError(f"{where} line {number} joins {symbol[:60]!r}, which no earlier line produces")
        merged = left + right
        if merged in known:
            raise InputError(f"{where} line {number} produces {merged[:60]!r} a second time")
        known.add(merged)
        merges.append((left, right))
    name = NAMES.get(header, "bpe")
    if name == "gpt2" and any(WORD_END in right for _, right in merges):
        name = "bpe"
    return Vocabulary(name, tuple(merges), tuple(added))


def _read_text(path: str) -> str:
    """The text of a plain or compressed file, unpacked up to MAX_BYTES."""
    try:
        with storage.open_read(path) as file:
            data = file.read(MAX_BYTES + 1)
        if data.startswith(b"\x1f\x8b") and len(data) <= MAX_BYTES:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path} holds more than {MAX_BYTES // 2**20} MiB, so it is not a merge file")
        return data.decode("utf-8")
    except InputError as error:
        raise InputError(Fault("bpe_path", f": {error}")) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(Fault("bpe_path", f": {path} is damaged or not a merge file: {error}")) from None
