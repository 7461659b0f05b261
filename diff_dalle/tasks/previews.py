"""Previews: images of fixed prompts during training of a generator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from ..batch import Conditioning
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from ..images.grid import image_grid
from ..images.signal import Signal
from ..tracking.tracker import Table
from ..training.task import Shown


@dataclass(frozen=True)
class Previews:
    """Called with a generator, samples a grid of images: always of the same conditions, from the same noise.

    cond:     the conditions, of one sample per caption.
    captions: to show below the images.
    size:     height and width of the images, in the generator's signal.
    batch_size: images that are sampled at a time, as many as a training step's micro-batch.
    inputs, originals: uint8 [N, H, W, 3] each, to show to the left and right of the images: the upsampled inputs of an
              upsampler, and the images that the conditions are of; None = not shown.
    scales:   guidance scales whose images are shown side by side; empty = that of ``guidance``.
    """

    sampler: SamplerConfig
    guidance: GuidanceConfig
    diffusion: DiffusionConfig
    signal: Signal
    cond: Conditioning
    captions: list[str]
    size: tuple[int, int]
    batch_size: int
    num_classes: int = 0
    inputs: np.ndarray | None = None
    originals: np.ndarray | None = None
    scales: tuple[float, ...] = ()

    def __call__(self, generator: nn.Module) -> dict[str, Shown]:
        """The grid by its name, and the same as a table. In the grid each image has its caption below it, and with
        several scales its scale too."""
        shown = {f"scale {scale:g}": replace(self.guidance, guidance_scale=scale) for scale in self.scales}
        panels = {name: self._sample(generator, each) for name, each in (shown or {"": self.guidance}).items()}
        if len(panels) == 1:
            panels = {"": next(iter(panels.values()))}
        captions = [[f"{caption} {name}".strip() for name in panels] for caption in self.captions]
        pictures = {name or "sampled": images for name, images in panels.items()}
        if self.inputs is not None:
            pictures, captions = {"input": self.inputs, **pictures}, [["input", *row] for row in captions]
        if self.originals is not None:
            pictures, captions = {**pictures, "original": self.originals}, [[*row, "original"] for row in captions]
        count, width = len(self.captions), len(pictures)
        columns = None if width == 1 else width * min(count, 2 if width <= 3 else 1)
        images = np.stack([*pictures.values()], 1)
        grid = image_grid(images.reshape(-1, *images.shape[2:]), [text for row in captions for text in row], columns)
        return {"samples": np.asarray(grid), "samples_table": Table({"caption": self.captions, **pictures})}

    def _sample(self, generator: nn.Module, guidance: GuidanceConfig) -> np.ndarray:
        """The images, uint8 [N, H, W, 3]."""
        count = len(self.captions)
        null = self.cond.drop(torch.ones(count, dtype=torch.bool), self.num_classes) if self.cond.droppable else None
        process = self.sampler.process(self.diffusion)
        parts = []
        for first in range(0, count, self.batch_size):
            part = slice(first, first + self.batch_size)
            given = self.cond.select(part), None if null is None else null.select(part)
            batch = SampleBatch(self.signal, self.size, range(count)[part], *given)
            parts.append(self.signal.to_pixels(sample_batch(generator, process, batch, self.sampler, guidance)))
        return np.concatenate(parts)
