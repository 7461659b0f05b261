"""The peer of time_to_quality.py: a text-to-image model trained as in diffusers' example, of diffusers' own parts.

Network, noise schedule, EMA, warm-up and solver are diffusers'; text encoder, tokenizer and data are ours. Settings are
those of its example for text-to-image training (train_text_to_image.py), with the EMA's warm-up of the example for
unconditional training. Captions are not dropped there, so sampling is without guidance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from diff_dalle.distributed.world import World
from diff_dalle.models.precision import autocast
from diff_dalle.models.text_encoder import TextEncoder
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.text.tokenizer import Tokenizer

BATCH_SIZE, LR, BETAS, WEIGHT_DECAY, GRAD_CLIP = 16, 1e-4, (0.9, 0.999), 1e-2, 1.0
WARMUP_STEPS, SAMPLING_STEPS = 500, 20
# Of the network's levels; one residual block each. With these it has about as many parameters as our first recipe.
WIDTHS = (32, 64, 128)
# Channels of an attention head: 40 in the default network's first level, the nearest divisor here. Its default number
# of heads, 8, would give heads of 4 channels, and steps that take 2.6 times as long.
HEAD_CHANNELS = 32


class Peer:
    """Network and text encoder, trained jointly on the data of ``run``; a ``Side``."""

    name, finished = "diffusers", False

    def __init__(self, run: GeneratorRun, world: World, precision: str, widths: Sequence[int] = WIDTHS):
        from diffusers import DDPMScheduler, UNet2DConditionModel
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import EMAModel

        training = replace(run.training, batch_size=BATCH_SIZE)
        session = replace(run, training=training).recipe().open(world)
        self.tokenizer = tokenizer = cast("Tokenizer", session.tokenizer)
        self.run, self.device, self.precision = run, world.device, precision
        self.batch_size = BATCH_SIZE
        self.batches = session.both_loaders[0].batches(0)
        torch.manual_seed(run.training.seed)
        others = len(widths) - 1  # all levels but the lowest resolution have attention, as by default
        self.unet = UNet2DConditionModel(
            sample_size=run.image_size,
            in_channels=run.model.channels,
            out_channels=run.model.channels,
            down_block_types=("CrossAttnDownBlock2D",) * others + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * others,
            block_out_channels=tuple(widths),
            layers_per_block=1,
            cross_attention_dim=run.model.text.enc_attn_dim,
            # diffusers' name for the number of heads
            attention_head_dim=tuple(max(1, width // HEAD_CHANNELS) for width in widths),
        )
        self.text_encoder = TextEncoder(run.model.text, tokenizer.vocab_size)
        self.weights = [*self.unet.parameters(), *self.text_encoder.parameters()]
        self.parameters = sum(p.numel() for p in self.weights)
        self.generator = torch.Generator().manual_seed(run.training.seed)
        self.process = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
        self.optimizer = torch.optim.AdamW(self.weights, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.schedule = get_scheduler("constant_with_warmup", self.optimizer, num_warmup_steps=WARMUP_STEPS)
        self.ema = EMAModel(self.weights, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)

    def _predict(self, x: Tensor, t: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        with autocast(self.precision, self.device):
            states, _ = self.text_encoder(tokens, mask)
            return self.unet(x, t, states, encoder_attention_mask=mask).sample.float()

    def step(self) -> None:
        batch = next(self.batches)
        noise = torch.randn(batch.images.shape, generator=self.generator)
        t = torch.randint(self.process.config.num_train_timesteps, (len(noise),), generator=self.generator)
        x = self.process.add_noise(batch.images, noise, t)
        F.mse_loss(self._predict(x, t, *batch.cond.caption), noise).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, GRAD_CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.ema.step(self.weights)

    @torch.no_grad()
    def sample(self, captions: Sequence[str], seed: int) -> np.ndarray:
        """Without guidance."""
        from diffusers import DPMSolverMultistepScheduler

        solver = DPMSolverMultistepScheduler.from_config(self.process.config)
        solver.set_timesteps(SAMPLING_STEPS)
        tokens, mask = self.tokenizer(list(captions), self.run.model.text.text_length)
        shape = len(captions), self.run.model.channels, self.run.image_size, self.run.image_size
        x = solver.init_noise_sigma * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.ema.store(self.weights)
        self.ema.copy_to(self.weights)
        for t in solver.timesteps:
            x = solver.step(self._predict(solver.scale_model_input(x, t), t, tokens, mask), t, x).prev_sample
        self.ema.restore(self.weights)
        return self.run.signal.to_pixels(x)


def faster_precision(build: Callable[[str], Peer], steps: int = 5) -> str:
    """fp32 or bf16, by the median CPU seconds of alternating steps."""
    peers = {precision: build(precision) for precision in ("fp32", "bf16")}
    seconds: dict[str, list[float]] = {precision: [] for precision in peers}
    for _ in range(steps):
        for precision, peer in peers.items():
            start = time.process_time()
            peer.step()
            seconds[precision].append(time.process_time() - start)
    return min(seconds, key=lambda precision: statistics.median(seconds[precision]))
