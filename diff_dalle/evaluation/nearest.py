"""The most similar of many pictures, by their pixels."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

Found = tuple[np.ndarray, np.ndarray]  # pictures, uint8 [N, H, W, 3], and their distances [N]


def most_similar(pictures: np.ndarray, known: Iterable[np.ndarray]) -> Found:
    """The most similar known picture to each picture, uint8 [N, H, W, 3], and its RMS distance in levels of 255.

    known: batches, uint8 [M, H, W, 3] each, of which one at a time is held; without any, distances are infinite.
    """
    flat = _rows(pictures)
    none = np.zeros_like(pictures), np.full(len(pictures), np.inf)
    return functools.reduce(nearer, (_in_batch(flat, batch) for batch in known), none)


def nearer(one: Found, other: Found) -> Found:
    """Of each picture, the one with the smaller distance."""
    is_nearer = other[1] < one[1]
    return np.where(is_nearer[:, None, None, None], other[0], one[0]), np.minimum(one[1], other[1])


def _in_batch(flat: np.ndarray, batch: np.ndarray) -> Found:
    others = _rows(batch)
    index = ((others**2).sum(1) - 2 * flat @ others.T).argmin(1)  # |a - b|² without |a|²
    return batch[index], np.sqrt(((flat - others[index]) ** 2).mean(1))


def _rows(pictures: np.ndarray) -> np.ndarray:
    return pictures.reshape(len(pictures), -1).astype(np.float32)
