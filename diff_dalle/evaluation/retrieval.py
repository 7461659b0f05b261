"""Retrieval: how often an image finds its caption, and a caption its image, among others; by noise level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from .report import line_plot, markdown_table

DIRECTIONS = ("image_to_text", "text_to_image")
DEPTHS = (1, 5)


def same_captions(tokens: Tensor, mask: Tensor) -> Tensor:
    """[N, N] bool: whether captions i and j, tokens and mask [N, L], are the same text."""
    real = torch.where(mask, tokens, -1)
    return (real[:, None] == real[None]).all(2)


def retrieval(images: Tensor, texts: Tensor, alike: Tensor) -> dict[str, Tensor]:
    """Whether sample i's own is among the best 1 and the best 5 of the N candidates, in both directions.

    images, texts: [N, D] features of length 1. alike: [N, N] bool, pairs whose captions are equal, so that either is
    right. Returns ``image_to_text_at_1``, … each [N] float32, 0 or 1.
    """
    found, similarity = {}, images @ texts.T
    for direction, rows in zip(DIRECTIONS, (similarity, similarity.T), strict=True):
        order = rows.argsort(dim=1, descending=True, stable=True)
        right = alike.gather(1, order)
        for depth in DEPTHS:
            found[f"{direction}_at_{depth}"] = right[:, :depth].any(1).float()
    return found


@dataclass(frozen=True)
class RetrievalTable:
    """Fractions found, by noising step and then by name (``image_to_text_at_1``, …), among ``candidates``."""

    found: Mapping[int, Mapping[str, float]]
    candidates: int

    @staticmethod
    def value_name(name: str, t: int) -> str:
        """What ``name`` at step t is logged as."""
        return f"retrieval.{name}_t{t:03d}"

    @classmethod
    def from_values(cls, values: Mapping[str, float], levels: Sequence[int], candidates: int) -> RetrievalTable:
        """From the means of all names at all levels, by ``value_name``."""
        names = [f"{direction}_at_{depth}" for direction in DIRECTIONS for depth in DEPTHS]
        return cls({t: {name: values[cls.value_name(name, t)] for name in names} for t in levels}, candidates)

    def text(self) -> str:
        """A Markdown table, with chance in its last line."""
        header = ["t", *(f"{direction.replace('_', ' ')} @{depth}" for direction in DIRECTIONS for depth in DEPTHS)]
        rows = [[t, *(f"{value:.3f}" for value in row.values())] for t, row in self.found.items()]
        chance = [f"{min(1.0, depth / self.candidates):.3f}" for _ in DIRECTIONS for depth in DEPTHS]
        return (
            f"Retrieval among {self.candidates} by noise level\n{markdown_table(header, [*rows, ['chance', *chance]])}"
        )

    def plot(self) -> Image.Image:
        """The four fractions over the noising step, and chance."""
        series = {}
        for direction in DIRECTIONS:
            for depth in DEPTHS:
                name = f"{direction}_at_{depth}"
                series[f"{direction.replace('_', ' ')} @{depth}"] = [(t, row[name]) for t, row in self.found.items()]
        ends = (min(self.found), max(self.found))
        series["chance @1"] = [(t, 1 / self.candidates) for t in ends]
        return line_plot(series, f"noising step t (among {self.candidates})")
