"""The gradient of a contrastive batch in micro-batches (tasks/contrastive.py) against the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion.diffusion_config import NoiseConfig, create_noise_process
from diff_dalle.diffusion.resample import ContrastiveConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.contrastive import ContrastiveTask

from .regression import Differences, gradients, same_step

BATCH_SIZE, MICROBATCH, VOCABULARY = 256, 16, 1000
NETWORK = NoisedClipConfig(
    image_size=32,
    classifier_width=64,
    classifier_depth=1,
    classifier_channel_mult=(1, 2, 2),
    classifier_dropout=0.1,
    classifier_attention_resolutions=(16, 8),
    classifier_enc_attn_dim=128,
    classifier_enc_depth=2,
    text_length=24,
    dropout_text=0.1,
)


def _task() -> ContrastiveTask:
    torch.manual_seed(0)
    process = create_noise_process(NoiseConfig(noise_schedule="cosine"))
    return ContrastiveTask(to_channels_last(NoisedClip(NETWORK, VOCABULARY)), process, ContrastiveConfig(), ALONE)


def _work(size: int) -> tuple[ContrastiveTask, Callable[[], list[dict[str, Tensor]]]]:
    """A task, and a function that computes its gradient in micro-batches of ``size`` and returns their losses."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH_SIZE, 3, 32, 32, generator=generator) * 2 - 1
    tokens = torch.randint(VOCABULARY, (BATCH_SIZE, NETWORK.text_length), generator=generator)
    cond = Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    batch = Batch(images, cond, torch.arange(BATCH_SIZE))
    micro_batches, task = [(part, Draw(0, part.index)) for part in batch.split(size)], _task()

    def work():
        task.zero_grad(set_to_none=True)
        return task.backward(micro_batches, lambda batch, draw, sync: task(batch, draw), 1.0)

    return task, work


def at_once() -> Callable[[], object]:
    return _work(BATCH_SIZE)[1]


def in_micro_batches() -> Callable[[], object]:
    return _work(MICROBATCH)[1]


def gate() -> Differences:
    tasks, works = zip(*map(_work, (BATCH_SIZE, MICROBATCH)), strict=True)
    losses = [torch.cat([values["loss"] for values in work()]) for work in works]
    return same_step(losses, [*map(gradients, tasks)], most=1e-4)
