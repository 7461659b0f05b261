"""Whether samples are copies of training pictures."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from ..evaluation.intervals import Fraction, wilson
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..images.grid import image_grid
from .context import Context

EXPLANATION = """
*Distance*: RMS, in levels of 255, to the most similar training picture. *Near*: the share of samples that are nearer to
one than all but {near} % of the real pictures are, with its 95 % Wilson interval; without copies, about .{near:02d}.
Real pictures: those of `data_dir`, except {seen} of {count} that are training pictures.
"""
NEAR = 5  # percent
EXAMPLES = 24

Found = tuple[np.ndarray, np.ndarray]  # pictures, uint8 [N, H, W, 3], and their distances [N]


def copies(context: Context) -> Report:
    real, world = context.captioned, context.world
    samples = context.sample(real.captions, context.default_guidance)[0]
    pictures = np.concatenate([samples, context.as_generated(real.images)])
    shares = world.gather(world.together(lambda: most_similar(pictures, context.training_pictures())))
    closest, distances = functools.reduce(nearer, shares)
    own, usual = np.split(distances, [len(samples)])
    unseen = usual[usual > 0]
    scores: dict[str, Any] = {"distance": float(np.median(own)), "unseen": len(unseen)}
    near = None
    if len(unseen):
        count = int((own < np.percentile(unseen, NEAR)).sum())
        near = Fraction(count / len(own), *wilson(count, len(own)), len(own))
        scores |= {"unseen_distance": float(np.median(unseen)), "near": asdict(near)}
    rows = [["samples", *_distances(own), near.text(2) if near else "–"]]
    rows += [["real pictures", *_distances(unseen), f".{NEAR:02d}"]] if near else []
    table = Table(["", "median distance", "lowest", "near"], rows)
    text = EXPLANATION.format(near=NEAR, seen=len(usual) - len(unseen), count=len(usual))
    order = np.argsort(own)[:EXAMPLES]
    cells = np.stack([samples[order], closest[order]], 1).reshape(-1, *samples.shape[1:])
    labels = [label for i in order for label in (real.captions[i] or "sample", f"training, {own[i]:.1f}")]
    figure = Figure("copies.png", image_grid(cells, labels, 12))
    parts: list[Part] = [text, table, "The samples nearest to a training picture, with it and their distance:", figure]
    return Report([Section("Copies of training pictures", parts)], {"copies": scores}, [table])


def _distances(found: np.ndarray) -> list[str]:
    return [f"{each:.1f}" for each in (np.median(found), found.min())]


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
