"""A training step of the preset transformer_256 at an eighth of its width against one of torch's own layers.

These have as many FLOPs and fewer passes over the tokens: they have no positions, timestep, and norms of queries and
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.commands.sources import read_preset
from diff_dalle.distributed.devices import reuse_freed_memory
from diff_dalle.models.transformer import DenoiserConfig

from . import gpu_steps
from .gpu_subjects import Pixels, flops_per_image

WIDTH, BATCH_SIZE = 128, 8
CPU = torch.device("cpu")
PRESET = read_preset("transformer_256").settings["model"]
FULL = DenoiserConfig(**{name: value for name, value in PRESET.items() if name in DenoiserConfig.__dataclass_fields__})
NETWORK = replace(FULL, num_channels=WIDTH, patch_channels=FULL.patch_channels * WIDTH // FULL.num_channels)
SUBJECT = Pixels("transformer", BATCH_SIZE, NETWORK)


def ours(backend: str = "") -> Callable[[], object]:
    """The loop's own update. backend: torch.compile's; empty = eager."""
    reuse_freed_memory()
    return gpu_steps.ours(SUBJECT, CPU, BATCH_SIZE, "fp32", backend=backend)


def torchs() -> Callable[[], object]:
    """AdamW with torch's defaults."""
    return gpu_steps.transformer(SUBJECT, CPU, BATCH_SIZE, WIDTH, "fp32")


def gate() -> Mapping[str, tuple[float, float]]:
    """How far the FLOPs of both passes are apart, relative to ours."""
    with torch.device("meta"):
        network, images = gpu_steps.Transformer(SUBJECT, WIDTH), SUBJECT.batch(1).images
    with FlopCounterMode(display=False) as counter:
        network(images, None, None).sum().backward()
    theirs, own = counter.get_total_flops(), flops_per_image(SUBJECT)
    return {"FLOPs": (abs(theirs - own) / own, 0.02)}
