"""The most similar of many pictures, by their pixels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def most_similar(pictures: np.ndarray, known: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The most similar known picture to each picture, uint8 [N, H, W, 3], and its RMS distance [N] in levels of 255.

    pictures: uint8 [N, H, W, 3]. known: batches of them, [M, H, W, 3] each, of which one at a time is held.
    """
    flat = _rows(pictures)
    found, least = np.zeros_like(pictures), np.full(len(pictures), np.inf)
    for batch in known:
        others = _rows(batch)
        squares = (flat**2).sum(1)[:, None] - 2 * flat @ others.T + (others**2).sum(1)
        index = squares.argmin(1)
        distance = ((flat - others[index]) ** 2).mean(1)
        nearer = distance < least
        found[nearer] = batch[index[nearer]]
        least[nearer] = distance[nearer]
    return found, np.sqrt(least)


def _rows(pictures: np.ndarray) -> np.ndarray:
    return pictures.reshape(len(pictures), -1).astype(np.float32)
