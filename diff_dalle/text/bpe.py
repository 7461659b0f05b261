"""Byte-pair encoding of one word: joining neighbours in the order in which the merges were learnt."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise


def merge_word(ids: Sequence[int], merges: Mapping[tuple[int, int], int]) -> list[int]:
    """The tokens of a word.

    ids:    token ids of the word's bytes.
    merges: pair of token ids → id of the token that joins them. Merges learnt earlier have smaller ids.

    As long as some pair of neighbours can be joined, the pair with the earliest merge is, wherever it occurs, from
    left to right (Sennrich et al. 2016). A heap of places makes that O(n log n), so that a word of a million letters
    is no trap; a joined neighbour leaves a gap, which the links ``before`` and ``after`` step over.
    """
    ids: list[int | None] = list(ids)
    end = len(ids)
    before, after = list(range(-1, end - 1)), list(range(1, end + 1))
    heap = [(merges[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in merges]
    heapq.heapify(heap)
    while heap:
        joined = heap[0][0]
        places = []
        while heap and heap[0][0] == joined:
            places.append(heapq.heappop(heap)[1])
        for left in places:
            right = after[left]
            if right == end or merges.get((ids[left], ids[right])) != joined:
                continue  # one of the two has been joined to another neighbour since
            ids[left], ids[right] = joined, None
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < end and (ids[first], ids[second]) in merges:
                    heapq.heappush(heap, (merges[ids[first], ids[second]], first))
    return [token for token in ids if token is not None]
