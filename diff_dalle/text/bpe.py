"""Byte-pair encoding of one word."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

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
