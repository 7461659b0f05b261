"""A contrastive batch in pieces (tasks/gradient_cache.py) against the same batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..batch import Batch, Conditioning
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.resample import ContrastiveConfig
from ..distributed.world import SINGLE, World
from ..models.layers import to_channels_last
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..randomness import Draw
from ..tasks.contrastive import ContrastiveTask

BATCH, PIECE, VOCABULARY = 256, 16, 1000
NETWORK = NoisedClipConfig(
    image_size=32, classifier_width=64, classifier_depth=1, classifier_channel_mult=(1, 2, 2), classifier_dropout=0.1,
    classifier_attention_resolutions=(16, 8), classifier_enc_attn_dim=128, classifier_enc_depth=2, text_length=24,
    dropout_text=0.1,
)  # fmt: skip


def _task() -> ContrastiveTask:
    torch.manual_seed(0)
    world = World(SINGLE, torch.device("cpu"))
    process = create_noise_process(NoiseConfig(noise_schedule="cosine"))
    return ContrastiveTask(to_channels_last(NoisedClip(NETWORK, VOCABULARY)), process, ContrastiveConfig(), world)


def _work(piece: int) -> tuple[ContrastiveTask, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, 32, 32, generator=generator) * 2 - 1
    tokens = torch.randint(VOCABULARY, (BATCH, NETWORK.text_length), generator=generator)
    batch = Batch(
        images, Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool)), torch.arange(BATCH)
    )
    pieces, task = [(part, Draw(0, part.index)) for part in batch.split(piece)], _task()

    def work():
        task.zero_grad(set_to_none=True)
        return task.backward(pieces, lambda batch, draw, sync: task(batch, draw), 1.0)

    return task, work


def at_once() -> Callable[[], object]:
    return _work(BATCH)[1]


def in_pieces() -> Callable[[], object]:
    return _work(PIECE)[1]


def gate() -> dict[str, tuple[float, float]]:
    """Largest relative difference of the losses, and of any parameter's gradient."""
    found = []
    for piece in (BATCH, PIECE):
        task, work = _work(piece)
        loss = torch.cat([values["loss"] for values in work()])
        found.append((loss, [parameter.grad for parameter in task.parameters()]))
    (loss, gradients), (other_loss, others) = found
    gradient = max(((a - b).norm() / b.norm()).item() for a, b in zip(others, gradients, strict=True) if b.norm() > 0)
    return {"losses": (((other_loss - loss).norm() / loss.norm()).item(), 1e-6), "gradients": (gradient, 1e-4)}
