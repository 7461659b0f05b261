"""Pictures of fixed prompts, to watch a generator learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..batch import Conditioning
from ..config import option, section
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig, sample_images
from ..errors import InputError
from ..images.grid import image_grid


@dataclass(frozen=True)
class PreviewConfig:
    """Preview grids"""

    sample_interval: int = option(5000, "steps between preview grids; 0 = none", free=True)
    preview_samples: int = option(16, "pictures in a preview grid, with the first captions of val_data_dir, or else of "
                                      "data_dir", free=True)  # fmt: skip
    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GuidanceConfig = section(GuidanceConfig)

    def __post_init__(self):
        if self.sample_interval < 0:
            raise InputError(f"sample_interval is {self.sample_interval}, but must not be negative")
        if self.preview_samples < 1:
            raise InputError(f"preview_samples is {self.preview_samples}, but must be at least 1 (--sample_interval 0 "
                             "switches previews off)")  # fmt: skip


@dataclass(frozen=True)
class Previews:
    """Makes a grid of the same conditions from the same noise whenever it is called with a generator.

    cond: the conditions. captions: what to write below the pictures. size: their height and width.
    beside: an up-sampler's inputs, enlarged, and the original pictures, uint8 [N, H, W, 3] each, to be shown on the
            left and on the right of what it makes.
    """

    config: PreviewConfig
    diffusion: DiffusionConfig
    cond: Conditioning
    captions: list[str]
    size: tuple[int, int]
    num_classes: int = 0
    beside: tuple[np.ndarray, ...] = ()

    def __call__(self, generator: nn.Module) -> dict[str, np.ndarray]:
        count = len(self.captions)
        null = self.cond
        if null.droppable:
            null = null.drop(torch.ones(count, dtype=torch.bool), self.num_classes)
        images = sample_images(generator, self.diffusion, self.cond, null, self.size, range(count), self.config.sampler,
                               self.config.guidance)  # fmt: skip
        scale, captions, columns = max(1, 96 // self.size[0]), self.captions, None
        if self.beside:
            inputs, originals = self.beside
            images = np.stack([inputs, images, originals], 1).reshape(-1, *images.shape[1:])
            captions = [text for caption in captions for text in ("input", caption, "original")]
            columns = 6 if count > 1 else 3
        return {"samples": np.asarray(image_grid(images, captions, columns, scale))}
