"""Texts ↔ token ids: a byte-level byte-pair tokenizer with CLIP's conventions (Radford et al. 2021, section 2.4)."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import option
from ..errors import InputError
from .bpe import merge_word
from .cleaning import WORD_PATTERN, clean, split_words
from .vocabulary import BYTE_LETTERS, Vocabulary, byte_symbols, read_vocabulary

CACHED_WORDS = 2**15  # more than most caption sets have different words; some 10 MB when full
CACHED_LETTERS = 64  # longer words are encoded anew each time, so that the cache stays small whatever comes
PAD = 0


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer"""

    bpe_path: str = option(
        "",
        "byte-pair merge file, plain or .gz; empty takes the vocabulary that comes with the package, `clip` that of an"
        " installed open_clip or clip package",
    )


class Tokenizer:
    """Encodes texts as token ids and back.

    A text is cleaned (`clean`) and split into words (`split_words`), and the bytes of each word's UTF-8 form are joined
    into tokens by the vocabulary's merges. So there is no text that cannot be encoded, and ``decode(encode(text))`` is
    the words of ``clean(text)`` with one space between each two: "it's 42" comes back as "it 's 4 2", and nothing but
    white space and what cleaning changed differs. With CLIP's vocabulary the ids are CLIP's, save that the spelled-out
    names of its special tokens are ordinary text inside a caption.

    Token ids: the bytes, the bytes as ends of words, the merges in their order, start, end. The tokenizer can be
    pickled.
    """

    def __init__(self, vocabulary: Vocabulary):
        symbols = vocabulary.symbols()
        first_merge = len(symbols) - len(vocabulary.merges)
        digest = hashlib.sha256(repr((WORD_PATTERN, vocabulary.merges)).encode()).hexdigest()

        self.vocabulary = vocabulary
        self.start, self.end = len(symbols), len(symbols) + 1
        self.vocab_size = len(symbols) + 2
        self.identity = f"{vocabulary.name}-{self.vocab_size}:{digest[:12]}"

        ids = {symbol: i for i, symbol in enumerate(symbols)}
        pairs = [(ids[left], ids[right]) for left, right in vocabulary.merges]
        self._ids = ids
        self._merges = {pair: i for i, pair in enumerate(pairs, first_merge)}
        self._bytes = [bytes([byte]) for byte in BYTE_LETTERS]
        self._bytes += [byte + b" " for byte in self._bytes]
        for left, right in pairs:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._cached_word = functools.lru_cache(CACHED_WORDS)(self._encode_word)
        self._said_cut = False

    def __reduce__(self):
        return Tokenizer, (self.vocabulary,)

    def encode(self, text: str) -> list[int]:
        """All token ids of a text, from the start to the end token, however many."""
        ids = [self.start]
        for word in split_words(clean(text)):
            ids += self._cached_word(word) if len(word) <= CACHED_LETTERS else self._encode_word(word)
        return [*ids, self.end]

    def _encode_word(self, word: str) -> list[int]:
        return merge_word([self._ids[symbol] for symbol in byte_symbols(word)], self._merges)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, up to the first end token.

        Bytes that are no UTF-8, as when a cut went through a letter, become U+FFFD. Raises InputError for an id outside
        the vocabulary.
        """
        pieces = []
        for token in map(int, ids):
            if token == self.end:
                break
            if not 0 <= token < self.vocab_size:
                raise InputError(f"{token} is no token id of {self.identity}, whose ids are below {self.vocab_size}")
            if token != self.start:
                pieces.append(self._bytes[token])
        return b"".join(pieces).decode("utf-8", errors="replace").removesuffix(" ")

    def __call__(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """Token ids [N, length] int64, padded, and their mask [N, length] bool, True = a real token.

        A longer text is cut before its end token; the first one is warned of. An empty text shows its start token
        alone, as `Conditioning.drop` leaves it: that is the condition "no caption". Raises InputError when ``length``
        has no room for start and end.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of texts, not a single one")
        if length < 2:
            raise InputError(f"text_length is {length}, but must be at least 2: a text has a start and an end token")
        tokens = np.full((len(texts), length), PAD, dtype=np.int64)
        mask = np.zeros((len(texts), length), dtype=bool)
        for row, text in enumerate(texts):
            ids = self.encode(text)
            if len(ids) > length:
                self._say_cut(text, len(ids), length)
                ids = [*ids[: length - 1], self.end]
            tokens[row, : len(ids)] = ids
            mask[row, : len(ids) if len(ids) > 2 else 1] = True
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def _say_cut(self, text: str, count: int, length: int) -> None:
        if not self._said_cut:
            self._said_cut = True
            shown = text if len(text) <= 60 else text[:57] + "..."
            warnings.warn(
                f"texts of more than {length} tokens are cut; raise text_length to keep more."
                f" The first one has {count}: {shown!r}",
                stacklevel=3,
            )


def load_tokenizer(bpe_path: str = "") -> Tokenizer:
    """The tokenizer that ``TokenizerConfig.bpe_path`` names. Raises InputError as `read_vocabulary` does."""
    return Tokenizer(read_vocabulary(bpe_path))
