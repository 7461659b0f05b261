"""Whether samples are copies of training pictures."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import numpy as np

from ..evaluation.intervals import Fraction, wilson
from ..evaluation.nearest import most_similar, nearer
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
