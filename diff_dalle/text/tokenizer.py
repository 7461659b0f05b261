"""Texts ↔ token ids: a byte-level byte-pair tokenizer with CLIP's conventions (Radford et al. 2021, section 2.4)."""

from __future__ import annotations

import functools
import hashlib
import heapq
import html
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..config import Fault, InputError, option, settings
from .vocabulary import BYTE_LETTERS, Vocabulary, byte_symbols, read_vocabulary

# Contractions, runs of letters, single digits, runs of anything else. Matched case-insensitively although the text is
# lower-case, because the long s (U+017F) is a lower-case letter that matches "s" only case-insensitively.
WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

# GPT-2's (Radford et al. 2019): runs of digits are words, and words keep the space before them.
SPACED_WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def clean(text: str) -> str:
    """Fix broken Unicode, resolve HTML entities (also doubly escaped), collapse whitespace, convert to lower case."""
    import ftfy  # imported here, like regex below: together they would add 0.2 s to every --help

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


@functools.cache
def _word(spaced: bool):
    import regex

    return regex.compile(SPACED_WORD_PATTERN) if spaced else regex.compile(WORD_PATTERN, regex.IGNORECASE)


def split_words(text: str, spaced: bool = False) -> list[str]:
    """The words of a clean text, which are encoded one by one. Together they contain all of it except whitespace, or
    with it if ``spaced``, as in GPT-2."""
    return _word(spaced).findall(text)


REMOVED = -1  # in place of the right token of a merge


def merge_word(ids: Sequence[int], merges: Mapping[tuple[int, int], int]) -> list[int]:
    """The tokens of a word.

    ids:    token ids of the word's bytes.
    merges: pair of token ids → id of the merged token. Merges learned earlier have smaller ids.

    While any two neighbors can be merged, the merge learned first is applied wherever it occurs, from left to right
    (Sennrich et al. 2016). A heap of positions makes this O(n log n), so that very long words stay fast; a merge
    removes its right token, and the linked lists ``before`` and ``after`` skip removed tokens.
    """
    tokens = list(ids)
    end = len(tokens)
    before, after = list(range(-1, end - 1)), list(range(1, end + 1))
    heap = [(merges[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in merges]
    heapq.heapify(heap)
    while heap:
        merged = heap[0][0]
        positions = []
        while heap and heap[0][0] == merged:
            positions.append(heapq.heappop(heap)[1])
        for left in positions:
            right = after[left]
            if right == end or merges.get((tokens[left], tokens[right])) != merged:
                continue  # one of the two has been merged with its other neighbor since
            tokens[left], tokens[right] = merged, REMOVED
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < end and (tokens[first], tokens[second]) in merges:
                    heapq.heappush(heap, (merges[tokens[first], tokens[second]], first))
    return [token for token in tokens if token != REMOVED]


if TYPE_CHECKING:  # settings and texts need no torch
    from torch import Tensor

CACHED_WORDS = 2**15  # more than the distinct words of most caption sets; about 10 MB when full
CACHED_CHARACTERS = 64  # longer words are not cached, which bounds the memory of the cache
PAD = 0


@settings
class TokenizerConfig:
    """Tokenizer"""

    bpe_path: str = option(
        "",
        "byte-pair merge file, plain or .gz; empty = the built-in vocabulary, clip = that of an installed open_clip or"
        " clip package; GPT-2's vocab.bpe works too",
        free=True,  # the tokenizer's identity is compared instead
    )


@dataclass(frozen=True)
class _Tables:
    """What all tokenizers of a vocabulary look up; none of them changes it.

    ids:     symbol → id.
    merges:  pair of ids → id of the merged symbol.
    spelled: bytes by id; an end of a word is a space.
    """

    digest: str
    ids: Mapping[str, int]
    merges: Mapping[tuple[int, int], int]
    spelled: Sequence[bytes]


@functools.lru_cache(4)
def _tables(vocabulary: Vocabulary) -> _Tables:
    symbols = vocabulary.symbols()
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    pairs = [(ids[left], ids[right]) for left, right in vocabulary.merges]
    pattern = WORD_PATTERN if vocabulary.ends_words else SPACED_WORD_PATTERN
    digest = hashlib.sha256(repr((pattern, vocabulary.merges)).encode()).hexdigest()
    spelled = [bytes([byte]) for byte in BYTE_LETTERS]
    spelled += [byte + b" " for byte in spelled] if vocabulary.ends_words else []
    for left, right in pairs:
        spelled.append(spelled[left] + spelled[right])
    merges = {pair: i for i, pair in enumerate(pairs, len(symbols) - len(pairs))}
    return _Tables(digest, ids, merges, spelled)


class Tokenizer:
    """Encodes texts as token ids and back.

    A text is cleaned (`clean`) and split into words (`split_words`), and the UTF-8 bytes of each word are merged into
    tokens. Any text can be encoded, and ``decode(encode(text))`` is the words of ``clean(text)``, separated by single
    spaces: "it's 42" becomes "it 's 4 2". With CLIP's vocabulary the ids are CLIP's, except that the names of its
    special tokens, spelled out in a caption, are ordinary text.

    Token ids: the bytes, the bytes at the end of a word, the merges in order, start, end, and the tokens that were
    added, which are found in the text before all others. The tokenizer can be pickled.

    With GPT-2's vocabulary the ids are GPT-2's: words keep the space before them, and texts have no end token. Its only
    special token, <|endoftext|>, is the start token here.
    """

    def __init__(self, vocabulary: Vocabulary):
        tables = _tables(vocabulary)
        self.vocabulary = vocabulary
        self.start = len(tables.ids)
        self.end = self.start + vocabulary.ends_words
        self._closing = [self.end] if vocabulary.ends_words else []  # of each text
        self.vocab_size = self.end + 1 + len(vocabulary.added)
        self.base_identity = f"{vocabulary.name}-{self.end + 1}:{tables.digest[:12]}"  # without added tokens
        self.identity = "+".join([self.base_identity, *vocabulary.added])

        self._ids, self._merges, self._bytes = tables.ids, tables.merges, tables.spelled
        self._added = {text: i for i, text in enumerate(vocabulary.added, self.end + 1)}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._find_added = re.compile(f"({'|'.join(longest_first)})").split if self._added else None
        self._cached_word = functools.lru_cache(CACHED_WORDS)(self._encode_word)
        self._warned = False

    def __reduce__(self):
        return Tokenizer, (self.vocabulary,)

    def extended(self, added: Sequence[str]) -> Tokenizer:
        """The tokenizer with further tokens, whose ids follow the others. InputError for tokens that it has."""
        for text in added:
            if text in self._added:
                raise InputError(f"the token {text} exists already in {self.identity}: choose another name")
        return Tokenizer(replace(self.vocabulary, added=(*self.vocabulary.added, *added))) if added else self

    def without(self, removed: Sequence[str]) -> Tokenizer:
        """The tokenizer without some of the tokens that were added."""
        return Tokenizer(replace(self.vocabulary, added=tuple(text for text in self.added if text not in removed)))

    @property
    def added(self) -> Sequence[str]:
        """The tokens that were added."""
        return self.vocabulary.added

    def symbols(self) -> list[str]:
        """All other tokens but start and end, in the order of their ids: see ``Vocabulary.symbols``."""
        return self.vocabulary.symbols()

    def token_id(self, added: str) -> int:
        """The id of an added token."""
        return self._added[added]

    def encode(self, text: str) -> list[int]:
        """All token ids of a text, from the start to the end token, not truncated."""
        ids, text = [self.start], clean(text)
        for part in self._find_added(text) if self._find_added else (text,):
            ids += [self._added[part]] if part in self._added else self._encode_plain(part)
        return [*ids, *self._closing]

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a clean text without added tokens."""
        ids: list[int] = []
        for word in split_words(text, spaced=not self.vocabulary.ends_words):
            ids += self._cached_word(word) if len(word) <= CACHED_CHARACTERS else self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        symbols = byte_symbols(word, self.vocabulary.ends_words)
        return merge_word([self._ids[symbol] for symbol in symbols], self._merges)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, up to the first end token.

        Bytes that are not valid UTF-8, e.g. of a truncated character, become U+FFFD. Raises InputError for an id
        outside the vocabulary.
        """
        pieces = []
        for token in map(int, ids):
            if token == self.start:
                continue
            if token == self.end:
                break
            if not 0 <= token < self.vocab_size:
                raise InputError(f"{token} is not a token id of {self.identity}: ids are 0 to {self.vocab_size - 1}")
            if token > self.end:
                pieces.append(f"{self.vocabulary.added[token - self.end - 1]} ".encode())
            else:
                pieces.append(self._bytes[token])
        return b"".join(pieces).decode("utf-8", errors="replace").removesuffix(" ")

    def __call__(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """Token ids [N, length] int64, padded, and their mask [N, length] bool, True = a real token.

        Longer texts are truncated before the end token, with a warning for the first one. The mask of an empty text
        covers the start token only, like a caption dropped by `Conditioning.drop`: the condition "no caption". Raises
        InputError when ``length`` is too small for start and end.
        """
        import numpy as np
        import torch

        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of strings, not a single string")
        if length < 2:
            raise InputError(Fault("text_length", "must be at least 2, for the start and the end token", length))
        tokens = np.full((len(texts), length), PAD, dtype=np.int64)
        mask = np.zeros((len(texts), length), dtype=bool)
        for row, text in enumerate(texts):
            ids = self.encode(text)
            if len(ids) > length:
                self._warn_truncated(text, len(ids), length)
                ids = [*ids[: length - len(self._closing)], *self._closing]
            tokens[row, : len(ids)] = ids
            mask[row, : len(ids) if len(ids) > 1 + len(self._closing) else 1] = True
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def _warn_truncated(self, text: str, count: int, length: int) -> None:
        if not self._warned:
            self._warned = True
            excerpt = text if len(text) <= 60 else text[:57] + "..."
            warnings.warn(
                f"captions longer than {length} tokens are truncated: raise text_length to keep more; the first one has"
                f" {count}: {excerpt!r}",
                stacklevel=3,
            )


def load_tokenizer(bpe_path: str = "") -> Tokenizer:
    """The tokenizer for a ``TokenizerConfig.bpe_path``. Raises InputError as `read_vocabulary` does."""
    return Tokenizer(read_vocabulary(bpe_path))
