"""Previews of stages B and C: what becomes of some images, from the originals to samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..checkpoints.cascade import LatentSampling
from ..diffusion.sampling import SampleBatch, sample_batch
from ..images.grid import image_grid
from ..images.pixels import to_uint8
from ..images.signal import Signal
from ..randomness import Draw
from .latent import LatentTask

SEED = 20240212  # of the noise, the same at every preview


@dataclass(frozen=True)
class LatentPreviews:
    """Called with a task, shows a column for each image: the original, its control if any, its latents decoded, noised
    and then predicted in one step, and a sample from its conditions; with averaged weights also one from those that
    are not.

    batch:      the images and their captions; positions count.
    signal:     of the latents, which decodes them.
    batch_size: images that are sampled at a time, as many as a training step's micro-batch.
    """

    batch: Batch
    signal: Signal
    sampling: LatentSampling
    batch_size: int

    def __call__(self, task: LatentTask) -> dict[str, np.ndarray]:
        rows: list[list[np.ndarray]] = []
        for part in self.batch.split(self.batch_size):
            found = list(self._rows(task, part.to(_device(task))))
            rows = [[*row, each] for row, each in zip(rows, found, strict=True)] if rows else [[each] for each in found]
        images = np.concatenate([np.concatenate(row) for row in rows])
        return {"samples": np.asarray(image_grid(images, columns=len(self.batch)))}

    def _rows(self, task: LatentTask, batch: Batch) -> Iterator[np.ndarray]:
        process, draw = task.process, Draw(SEED, batch.index, batch.images.device)
        x_start, cond = task.latents(batch.images), task.condition(batch)
        t = (batch.index.to(x_start.device).double() + 0.5) / len(self.batch)
        t = t.float() if x_start.device.type == "mps" else t
        x_t = process.q_sample(x_start, t, draw.normal("noise", x_start.shape[1:]))
        output = task.denoiser(x_t, process.condition(process.log_snr(t)), cond=cond)
        predicted = process.undiffuse(x_t, t, output)[0]
        for images in (batch.images, *task.pictures(batch, cond)):
            yield to_uint8(images).cpu().numpy()
        for latents in (x_start, x_t.to(x_start.dtype), predicted):
            yield self.signal.to_pixels(latents)
        for weights in self._weights(task):
            with weights():
                yield self.signal.to_pixels(self._sample(task, batch, x_start.shape[2:]))

    def _weights(self, task: LatentTask) -> list[Callable[[], contextlib.AbstractContextManager]]:
        """Which weights are in place for each row of samples."""
        return [contextlib.nullcontext, *([task.unaveraged] if task.unaveraged else [])]

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
