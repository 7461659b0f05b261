"""Previews in training: images of fixed prompts by a generator, and what becomes of some images in stages B and C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch, Conditioning
from ..checkpoints.cascade import LatentSampling
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from ..images.grid import image_grid
from ..images.signal import Signal, to_uint8
from ..randomness import Draw
from ..tracking.tracker import Table
from ..training.task import Shown
from .latent import LatentTask


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


SEED = 20240212  # of the noise, the same at every preview
SAMPLED, AVERAGED, ORIGINAL = "sampled", "sampled with EMA", "original"
COLUMNS = (SAMPLED, AVERAGED, "control", ORIGINAL)  # of the table, after the captions; those that there are


@dataclass(frozen=True)
class LatentPreviews:
    """Called with a task, shows a column for each image: the original, its control if any, its latents decoded, noised
    and then predicted in one step, and a sample from its conditions; with averaged weights also one from those that
    are not. A table has the captions, samples, controls and originals.

    batch:      the images and their conditions; positions count.
    captions:   of the images, to show.
    signal:     of the latents, which decodes them.
    batch_size: images that are sampled at a time, as many as a training step's micro-batch.
    """

    batch: Batch
    captions: list[str]
    signal: Signal
    sampling: LatentSampling
    batch_size: int

    def __call__(self, task: LatentTask) -> dict[str, Shown]:
        parts = [self._rows(task, part.to(_device(task))) for part in self.batch.split(self.batch_size)]
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        grid = image_grid(np.concatenate([*rows.values()]), columns=len(self.batch))
        table = Table({"caption": self.captions, **{name: rows[name] for name in COLUMNS if name in rows}})
        return {"samples": np.asarray(grid), "samples_table": table}

    def _rows(self, task: LatentTask, batch: Batch) -> dict[str, np.ndarray]:
        """The rows of the grid by name, uint8 [N, H, W, 3] each."""
        process, draw = task.process, Draw(SEED, batch.index, batch.images.device)
        x_start, cond = task.latents(batch), task.condition(batch)
        t = (batch.index.to(x_start.device).double() + 0.5) / len(self.batch)
        t = t.float() if x_start.device.type == "mps" else t
        x_t = process.q_sample(x_start, t, draw.normal("noise", x_start.shape[1:]))
        output = task.denoiser(x_t, process.condition(process.log_snr(t)), cond=cond)
        predicted = process.undiffuse(x_t, t, output)[0]
        images = {ORIGINAL: batch.images, **task.pictures(batch, cond)}
        rows = {name: to_uint8(each).cpu().numpy() for name, each in images.items()}
        latents = {"decoded": x_start, "noised": x_t.to(x_start.dtype), "one step": predicted}
        rows |= {name: self.signal.to_pixels(each) for name, each in latents.items()}
        for name, weights in self._weights(task).items():
            with weights():
                rows[name] = self.signal.to_pixels(self._sample(task, batch, x_start.shape[2:]))
        return rows

    def _weights(self, task: LatentTask) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
        """Which weights are in place for each row of samples."""
        if task.unaveraged is None:
            return {SAMPLED: contextlib.nullcontext}
        return {AVERAGED: contextlib.nullcontext, SAMPLED: task.unaveraged}

    def _sample(self, task: LatentTask, batch: Batch, size: torch.Size) -> Tensor:
        cond, sampling = task.condition(batch), self.sampling
        guidance = sampling.guidance
        null = task.unconditional(cond) if cond.droppable else None
        if null is None:
            guidance = replace(guidance, guidance_scale=1.0)
        samples = SampleBatch(self.signal, (size[0], size[1]), batch.index.tolist(), cond, null)
        steps = task.process.steps(sampling.steps, sampling.shift)
        return sample_batch(task.denoiser, steps, samples, sampling.sampler_config, guidance)


def _device(task: LatentTask) -> torch.device:
    return next(task.model.parameters()).device
