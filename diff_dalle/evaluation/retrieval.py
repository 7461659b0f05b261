"""Retrieval: how often an image retrieves its caption, and a caption its image, among N candidates; by noise level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from .plots import line_plot
from .report import markdown_table

DIRECTIONS = ("image_to_text", "text_to_image")
DEPTHS = (1, 5)
CANDIDATES = 64  # among which a query finds its own, wherever nothing else is said


def same_captions(tokens: Tensor, mask: Tensor) -> Tensor:
    """[N, N] bool: whether captions i and j, tokens and mask [N, L], are the same text."""
    text = torch.where(mask, tokens, -1)
    return (text[:, None] == text[None]).all(2)


def retrieval(images: Tensor, texts: Tensor, same: Tensor) -> dict[str, Tensor]:
    """Whether a correct candidate is among the best 1 and the best 5 of N, for every query, in both directions.

    images, texts: [N, D] features of length 1, row i of the same sample. same: [N, N] bool, pairs with equal captions,
    all of which are correct. Returns ``image_to_text_at_1``, … each [N] float32, 0 or 1.
    """
    hits, similarity = {}, images @ texts.T
    for direction, rows in zip(DIRECTIONS, (similarity, similarity.T), strict=True):
        order = rows.argsort(dim=1, descending=True, stable=True)
        correct = same.gather(1, order)
        for depth in DEPTHS:
            hits[f"{direction}_at_{depth}"] = correct[:, :depth].any(1).float()
    return hits


def column_name(direction: str, depth: int) -> str:
    """The column of a table or legend: "image to text R@1", … with R@k the recall at k."""
    return f"{direction.replace('_', ' ')} R@{depth}"


@dataclass(frozen=True)
class RetrievalTable:
    """Recall by noising step t, then by name (``image_to_text_at_1``, …), among ``candidates``."""

    recall: Mapping[int, Mapping[str, float]]
    candidates: int

    @staticmethod
    def value_name(name: str, t: int) -> str:
        """The name under which ``name`` at step t is logged."""
        return f"retrieval.{name}_t{t:03d}"

    @classmethod
    def from_values(cls, values: Mapping[str, float], levels: Sequence[int], candidates: int) -> RetrievalTable:
        """From the means of all names at all levels, by ``value_name``."""
        names = [f"{direction}_at_{depth}" for direction in DIRECTIONS for depth in DEPTHS]
        return cls({t: {name: values[cls.value_name(name, t)] for name in names} for t in levels}, candidates)

    def text(self) -> str:
        """A Markdown table; its last row is the chance level."""
        header = ["t", *(column_name(direction, depth) for direction in DIRECTIONS for depth in DEPTHS)]
        rows = [[t, *(f"{value:.3f}" for value in row.values())] for t, row in self.recall.items()]
        chance = [f"{min(1.0, depth / self.candidates):.3f}" for _ in DIRECTIONS for depth in DEPTHS]
        table = markdown_table(header, [*rows, ["chance", *chance]])
        return f"Retrieval among {self.candidates} by noise level\n{table}"

    def plot(self) -> Image.Image:
        """The four recalls over the noising step, and the chance level of R@1. Raises MissingMatplotlib."""
        series = {
            column_name(direction, depth): [(t, row[f"{direction}_at_{depth}"]) for t, row in self.recall.items()]
            for direction in DIRECTIONS
            for depth in DEPTHS
        }
        chance = {"chance R@1": 1 / self.candidates}
        return line_plot(series, "noising step t", f"recall among {self.candidates} candidates", references=chance)
