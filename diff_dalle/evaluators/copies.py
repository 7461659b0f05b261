"""Whether samples are copies of training pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..evaluation.intervals import Share
from ..evaluation.nearest import most_similar
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..images.grid import image_grid
from .context import Context

EXPLANATION = """
*Distance*: RMS, in levels of 255, to the most similar training picture. *Near*: the share of samples that are nearer to
one than all but {near} % of the real pictures are, with its 95 % Wilson interval; without copies, about .{near:02d}.
Real pictures: those of `data_dir`{left_out}.
"""
NEAR = 5  # percent
EXAMPLES = 24


def copies(context: Context) -> Report:
    real = context.captioned
    samples = context.sample(real.captions, context.default_guidance)[0]
    pictures = np.concatenate([samples, real.images])
    closest, distances = most_similar(pictures, context.training_pictures())
    own, usual = np.split(distances, [len(samples)])
    unseen = usual[usual > 0]
    scores: dict[str, Any] = {"distance": float(np.median(own)), "unseen": len(unseen)}
    rows: list[list[object]] = [["samples", f"{scores['distance']:.1f}", f"{own.min():.1f}", "–"]]
    if len(unseen):
        near = Share(int((own < np.percentile(unseen, NEAR)).sum()), len(own))
        scores |= {"unseen_distance": float(np.median(unseen)), "near": near.to_dict()}
        rows[0][-1] = near
        rows.append(["real pictures", f"{scores['unseen_distance']:.1f}", f"{unseen.min():.1f}", f".{NEAR:02d}"])
    seen = len(usual) - len(unseen)
    left_out = f", except {seen} of {len(usual)} that are training pictures" if seen else ""
    table = Table(["", "median distance", "lowest", "near"], rows)
    text = EXPLANATION.format(near=NEAR, left_out=left_out)
    order = np.argsort(own)[:EXAMPLES]
    cells = np.stack([samples, closest[: len(samples)]], 1)[order].reshape(-1, *samples.shape[1:])
    labels = [label for i in order for label in (real.captions[i] or "sample", f"training, {own[i]:.1f}")]
    figure = Figure("copies.png", image_grid(cells, labels, 12))
    parts: list[Part] = [text, table, "The samples nearest to a training picture, with it and their distance:", figure]
    return Report([Section("Copies of training pictures", parts)], {"copies": scores}, [table])
