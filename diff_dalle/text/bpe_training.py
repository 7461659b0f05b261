"""Learning a byte-pair vocabulary from text (Sennrich et al. 2016, on bytes as Radford et al. 2019).

The result is a pure function of the text: words are counted, and each merge joins the most frequent pair of adjacent
symbols; of equally frequent pairs, the first one when (left, right) are compared by code point.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from tqdm import tqdm

from ..config import Fault, InputError, named, quantity
from .tokenizer import clean, split_words
from .vocabulary import Pair, byte_symbols

MIN_COUNT = 2  # a pair that occurs once says nothing about words

# Captions name colors, shapes, positions and kinds of images far more often than a dictionary (which has "cyan" once).
# Each of these words gets this much added to its count, well above the 13 of the last merge, and so becomes one token.
# British spellings are included, because captions use them.
CAPTION_WORD_COUNT = 100
CAPTION_WORDS = (
    "red green blue yellow purple orange white black gray grey pink brown cyan magenta turquoise beige golden silver "
    "circle square triangle cross star ring diamond heart hexagon pentagon rectangle oval "
    "circles squares triangles crosses stars rings diamonds hearts hexagons pentagons rectangles ovals "
    "left right top bottom middle center centre corner above below under over beside behind front between inside next "
    "small large big tiny huge one two three four five six colored coloured striped dotted plain bright dark "
    "photo photograph picture image drawing painting illustration background shape object scene"
)


def wordnet_glosses(folder: str) -> Iterator[str]:
    """Definitions and example sentences from WordNet's ``data.*`` files: the text after the bar on each line.

    Raises InputError when the folder has no such file.
    """
    paths = sorted(Path(folder).glob("data.*"))
    if not paths:
        remedy = "install Debian's package wordnet-base, or name another folder"
        raise InputError(Fault("wordnet_dir", f"{folder} has no data.* files: {remedy}"))
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("  "):  # the license at the top is indented
                yield line.partition("|")[2]


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Number of occurrences of each word in the cleaned texts."""
    return Counter(word for text in texts for word in split_words(clean(text)))


def add_caption_words(counts: Counter[str]) -> Counter[str]:
    """Counts of a dictionary's words, plus CAPTION_WORD_COUNT for each of CAPTION_WORDS."""
    return counts + Counter(dict.fromkeys(CAPTION_WORDS.split(), CAPTION_WORD_COUNT))


class _Words:
    """Distinct words as symbols, with up-to-date counts and occurrences of every pair of adjacent symbols."""

    def __init__(self, counts: Mapping[str, int]):
        self.counts = list(counts.values())
        self.symbols = [byte_symbols(word) for word in counts]
        self.pair_counts: Counter[Pair] = Counter()
        self.words_with: dict[Pair, set[int]] = defaultdict(set)  # pair → words that contain it, or once did
        for i in range(len(self.symbols)):
            self._add(i, +1)
            for pair in pairwise(self.symbols[i]):
                self.words_with[pair].add(i)

    def _add(self, i: int, sign: int) -> list[Pair]:
        pairs = list(pairwise(self.symbols[i]))
        for pair in pairs:
            self.pair_counts[pair] += sign * self.counts[i]
        return pairs

    def merge(self, pair: Pair) -> set[Pair]:
        """Merge every occurrence of the pair. Returns the pairs whose count has changed."""
        changed = set()
        for i in self.words_with.pop(pair):
            changed.update(self._add(i, -1))
            self.symbols[i] = _merged(self.symbols[i], pair)
            for new in self._add(i, +1):
                changed.add(new)
                self.words_with[new].add(i)
        return changed


def _merged(symbols: list[str], pair: Pair) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def learn_merges(counts: Mapping[str, int], num_merges: int) -> list[Pair]:
    """The first ``num_merges`` merges, in order, with a progress bar.

    Raises InputError when too few pairs occur twice.
    """
    words = _Words(counts)
    queue = [(-count, pair) for pair, count in words.pair_counts.items()]
    heapq.heapify(queue)
    merges: list[Pair] = []
    with tqdm(total=num_merges, desc="learning merges", unit="merge", disable=None) as bar:
        while len(merges) < num_merges:
            if not queue or -queue[0][0] < MIN_COUNT:
                found = quantity(len(merges), "merge")
                raise InputError(
                    f"the text gives only {found}: use more text, or lower {named('num_merges')} ({num_merges})"
                )
            count, pair = heapq.heappop(queue)
            if -count != words.pair_counts[pair]:  # outdated: the pair was queued again when its count changed
                continue
            merges.append(pair)
            bar.update()
            for changed in words.merge(pair):
                heapq.heappush(queue, (-words.pair_counts[changed], changed))
    return merges
