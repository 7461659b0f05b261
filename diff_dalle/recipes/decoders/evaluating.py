"""Images that a decoder in training makes of held-out conditions, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...batch import Batch
from ...config import Fault, InputError, named
from ...data.loader import Loader
from ...diffusion.augmentation import area_resize
from ...diffusion.sampling import SampleBatch, sample_batch
from ...distributed.world import World
from ...embeddings.clip import is_local_file, load_clip
from ...embeddings.contract import Clip
from ...evaluation.generated import Chunk, GeneratedMetrics
from ...images.signal import PixelSignal
from ...randomness import Draw
from ...tasks.decoding import DecodingTask
from .materials import Materials

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
            process = stage.sampler.process(stage.diffusion)
            size = (stage.image_size, stage.image_size)
            job = SampleBatch(PixelSignal(stage.unet.channels), size, batch.index.tolist(), cond, null, stage=i)
            guidance = replace(stage.guidance, guidance_scale=self.scales[i])
            made = sample_batch(task.model, process, job, stage.sampler, guidance).clamp(-1, 1)
        assert made is not None
        return area_resize(batch.images, size), made


def compared(scales: Sequence[Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """The guidance scales of the U-Nets for each evaluation, by what the names of its values end with; nothing for a
    single one.

    scales: of each U-Net, either one or as many as there are evaluations.
    """
    count = max(map(len, scales))
    columns = [tuple(own[i if len(own) > 1 else 0] for own in scales) for i in range(count)]
    varied = [own for own in scales if len(own) > 1]
    labels = [f" (cond_scale {', '.join(f'{own[i]:g}' for own in varied)})" if varied else "" for i in range(count)]
    return dict(zip(labels, columns, strict=True))


class DecoderMetrics:
    """Measures what ``DecoderSampler`` make of the first samples of held-out data; every rank calls it.

    metrics:  of as many images of all processes together as its config says, at most those of ``data``.
    samplers: by what the names of their values end with. size: images at a time.
    """

    def __init__(
        self, metrics: GeneratedMetrics, samplers: Mapping[str, DecoderSampler], data: Loader, size: int, world: World
    ):
        self.metrics, self.samplers, self.data, self.size, self.world = metrics, samplers, data, size, world
        self.count = metrics.config.n_evaluation_samples

    def __call__(self) -> dict[str, float]:
        """The values by name. InputError, on all ranks, for what one of them cannot read or measure."""
        found: dict[str, float] = {}
        for label, sampler in self.samplers.items():
            values = self.metrics.measure(self._chunks(sampler), self.count)
            found |= {name + label: value for name, value in values.items()}
        return found

    def _chunks(self, sampler: DecoderSampler) -> Iterator[Chunk]:
        for positions in self._blocks():
            yield *sampler(self.data.batch_at(positions).to(self.world.device)), positions

    def _blocks(self) -> Iterator[range]:
        """This rank's positions. A rank for which no block is left repeats the last one: every rank executes as many
        forwards, and what is added twice counts once."""
        world, blocks = self.world, -(-self.count // self.size)
        for number in range(world.rank, -(-blocks // world.size) * world.size, world.size):
            first = min(number, blocks - 1) * self.size
            yield range(first, min(first + self.size, self.count))


def metrics_clip(materials: Materials, world: World) -> Clip:
    """The CLIP of the embeddings, opened if it is only known by name. InputError if it is not there, or another."""
    known, clip = materials.made_by, materials.clip
    if clip is not None:
        return clip
    setting, other = named("decoder.clip"), "or choose another feature"
    if known is None:
        raise _no_clip(f"it is not recorded which CLIP made the embeddings: name it as {setting}, {other}")
    # A location in a record may also be a command or a URL, which nobody here has asked for.
    if known.identity and known.make == "diff_dalle" and not is_local_file(known.model):
        raise _no_clip(f"the CLIP of the embeddings is not at {known.model}: name its place as {setting}, {other}")
    clip = load_clip(known.make, known.model, world.device, outputs=known.outputs)
    if known.identity not in ("", clip.identity):
        found = f"the embeddings are by {known}, and {clip.name} is now {clip.identity}"
        raise _no_clip(f"{found}: name the former as {setting}, {other}")
    return clip


def _no_clip(why: str) -> InputError:
    return InputError(Fault("evaluate", f"has the feature clip, but {why}"))
