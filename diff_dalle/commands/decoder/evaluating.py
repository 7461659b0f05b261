"""Images that a decoder in training makes of held-out conditions, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from ...batch import Batch
from ...data.loader import Loader
from ...diffusion.augmentation import area_resize
from ...diffusion.diffusion_config import create_gaussian_diffusion
from ...diffusion.sampling import SampleBatch, sample_batch
from ...distributed.world import World
from ...errors import InputError
from ...evaluation.generated import GeneratedMetrics
from ...images.signal import PixelSignal
from ...randomness import Draw
from ...tasks.decoding import DecodingTask

SEED = 20220413  # the same noise in every evaluation, so that its numbers are comparable


class DecoderSampler:
    """The U-Nets that a run has, in training or kept, as one cascade: up to the last that is trained, and down to the
    first or the one above a gap, whose low-resolution images are then the originals'.

    tasks:  by number of the U-Net. last: number of the last one that is trained.
    scales: the guidance scale of each U-Net.
    """

    def __init__(self, tasks: Mapping[int, DecodingTask], last: int, scales: Sequence[float]):
        first = last
        while first - 1 in tasks:
            first -= 1
        self.tasks, self.scales = {i: tasks[i] for i in range(first, last + 1)}, scales

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Originals and samples of their conditions, [N, C, H, W] in [-1, 1] each."""
        made: Tensor | None = None
        for i, task in self.tasks.items():
            stage = task.stage
            draw = Draw(SEED + i, batch.index, batch.images.device)
            cond, _ = task.given_conditions(batch, draw, made)
            everything = torch.ones(len(batch), dtype=torch.bool, device=batch.images.device)
            null = cond.drop(everything) if cond.droppable else None
            process = create_gaussian_diffusion(stage.diffusion, stage.sampler.timestep_respacing)
            size = (stage.image_size, stage.image_size)
            job = SampleBatch(PixelSignal(stage.unet.channels), size, batch.index.tolist(), cond, null, stage=i)
            guidance = replace(stage.guidance, guidance_scale=self.scales[i])
            made = sample_batch(task.model, process, job, stage.sampler, guidance).clamp(-1, 1)
        assert made is not None
        return area_resize(batch.images, size), made


class DecoderMetrics:
    """Measures what a ``DecoderSampler`` makes of the first samples of held-out data; every rank calls it.

    count: images of all processes together. size: images at a time.
    """

    def __init__(
        self, metrics: GeneratedMetrics, sampler: DecoderSampler, data: Loader, count: int, size: int, world: World
    ):
        self.metrics, self.sampler, self.data, self.world = metrics, sampler, data, world
        self.count, self.size = min(count, data.samples), size

    def __call__(self) -> dict[str, float]:
        """The values by name. InputError, on all ranks, for what one of them cannot read or measure."""
        problem = ""
        with tqdm(
            total=self.count, desc="Evaluating", unit="image", disable=None if self.world.is_main else True
        ) as bar:
            try:
                for positions in self._blocks():
                    real, made = self.sampler(self.data.batch_at(positions).to(self.world.device))
                    self.metrics.add(real, made, positions)
                    bar.update(min(len(positions) * self.world.size, self.count - bar.n))
            except InputError as error:  # the others are told, so that none waits for this rank
                problem = str(error)
        if problems := list(filter(None, self.world.gather(problem))):
            raise InputError(problems[0])
        return self.metrics.compute()

    def _blocks(self) -> Iterator[range]:
        """This rank's positions. A rank for which no block is left repeats the last one: every rank executes as many
        forwards, and what is added twice counts once."""
        world, blocks = self.world, -(-self.count // self.size)
        for number in range(world.rank, -(-blocks // world.size) * world.size, world.size):
            first = min(number, blocks - 1) * self.size
            yield range(first, min(first + self.size, self.count))
