"""Merge files: which pairs of symbols are joined into tokens, and in which order.

The format is that of CLIP's ``bpe_simple_vocab_16e6.txt``: a header line, then one merge a line as ``left right``. A
symbol is written in letters that stand for bytes, and ends in ``</w>`` where it ends a word.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import storage
from ..errors import InputError

Pair = tuple[str, str]

WORD_END = "</w>"
OWN_FILE = str(Path(__file__).with_name("vocabulary.txt"))  # learnt by scripts/train_tokenizer.py
OWN_HEADER = "#diff_dalle byte pairs: wordnet"
CLIP_HEADER = '"bpe_simple_vocab_16e6.txt#version: 0.2'
CLIP_MERGES = 49_152 - 256 - 2  # CLIP uses only the head of its file: so many merges make its 49 408 tokens
CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_PACKAGES = ("open_clip", "clip")  # import names of open_clip_torch and of clip-anytorch
NAMES = {OWN_HEADER: "wordnet", CLIP_HEADER: "clip"}  # a file with another header is called "bpe"
MAX_BYTES = 64 * 2**20  # twenty times CLIP's file unpacked


def _byte_letters() -> dict[int, str]:
    """One visible letter for each byte, in the order of the first 256 token ids (Radford et al. 2019, GPT-2).

    Bytes that are visible in Latin-1 come first and stand for themselves; the others take the letters from U+0100 on.
    """
    visible = [byte for byte in range(ord("!"), 256) if chr(byte).isprintable()]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


BYTE_LETTERS = _byte_letters()


def byte_symbols(word: str) -> list[str]:
    """A word before any merge: the letter of each byte of its UTF-8 form, the last one marked as the word's end."""
    symbols = [BYTE_LETTERS[byte] for byte in word.encode("utf-8")]
    symbols[-1] += WORD_END
    return symbols


@dataclass(frozen=True)
class Vocabulary:
    """Merges in the order in which they were learnt, and where they come from: wordnet (ours), clip, bpe (others)."""

    name: str
    merges: tuple[Pair, ...]

    def symbols(self) -> list[str]:
        """Every symbol in the order of its token id: the bytes, the bytes as ends of words, the merges."""
        letters = list(BYTE_LETTERS.values())
        return letters + [letter + WORD_END for letter in letters] + [left + right for left, right in self.merges]


def write_merge_file(path: str, header: str, merges: Sequence[Pair]) -> None:
    """Write a merge file, as plain text: the bytes of a gzip file would depend on the version of zlib as well."""
    lines = [header, *(f"{left} {right}" for left, right in merges)]
    storage.write_bytes(path, ("\n".join(lines) + "\n").encode("utf-8"))


def find_vocabulary(bpe_path: str) -> str:
    """The file that the setting ``bpe_path`` means: "" is ours, ``clip`` an installed package's, else the path itself.

    The packages are not imported: they would load torchvision. Raises InputError when ``clip`` is asked for and
    neither is there.
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
    raise InputError(
        f"bpe_path clip needs {CLIP_FILE} from the package open_clip_torch or clip-anytorch, and neither is installed:"
        " run `pip install --no-deps open_clip_torch`, or give the file itself as bpe_path"
    )


def read_vocabulary(bpe_path: str = "") -> Vocabulary:
    """Read and check a merge file, plain or gzip-compressed, local or remote; ``bpe_path`` as in `find_vocabulary`.

    Raises InputError for a file that is missing, damaged or too large, and for a line that is no merge, naming it.
    """
    path = find_vocabulary(bpe_path)
    where = f"bpe_path: {path}"
    header, *lines = _read_text(path).splitlines() or [""]
    if "#" not in header:
        raise InputError(f"{where} is no merge file: its first line must be a header with a # in it")
    if header == CLIP_HEADER:
        lines = lines[:CLIP_MERGES]
        if len(lines) < CLIP_MERGES:
            raise InputError(f"{where} is incomplete: it has {len(lines)} of CLIP's {CLIP_MERGES} merges")
    known = set(Vocabulary("", ()).symbols())
    merges = []
    for number, line in enumerate(lines, start=2):
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise InputError(f"{where} line {number} is {line[:60]!r}, but a merge is two symbols and a space between")
        for symbol in pair:
            if symbol not in known:
                raise InputError(f"{where} line {number} joins {symbol[:60]!r}, which no earlier line makes")
        joined = pair[0] + pair[1]
        if joined in known:
            raise InputError(f"{where} line {number} makes {joined[:60]!r} a second time")
        known.add(joined)
        merges.append(pair)
    return Vocabulary(NAMES.get(header, "bpe"), tuple(merges))


def _read_text(path: str) -> str:
    """The text of a plain or compressed file, unpacked no further than MAX_BYTES."""
    try:
        with storage.open_read(path) as file:
            data = file.read(MAX_BYTES + 1)
        if data.startswith(b"\x1f\x8b") and len(data) <= MAX_BYTES:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path} holds more than {MAX_BYTES // 2**20} MiB, so it is no merge file")
        return data.decode("utf-8")
    except InputError as error:
        raise InputError(f"bpe_path: {error}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"bpe_path: {path} is damaged, or no merge file: {error}") from None
