"""From settings and seeds to images, where it is not the sampler's or the guidance's doing."""

import numpy as np
import torch
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig, sample_images, seeds_draw
from diff_dalle.images.pixels import from_uint8, to_uint8


class Half(nn.Conv2d):
    """Expects half of what it sees."""

    def __init__(self):
        super().__init__(3, 3, 1)

    def encode_text(self, cond):
        return cond

    def forward(self, x, t, cond):
        return 0.5 * x


def test_each_stage_of_a_cascade_has_noise_of_its_own():
    config, nothing = DiffusionConfig(100, prediction="x_start"), Conditioning()

    def images(**options):
        return sample_images(Half(), config, nothing, nothing, (4, 6), [3, 2**63 - 1, -1],
                             SamplerConfig(timestep_respacing="3"), GuidanceConfig(), **options)  # fmt: skip

    assert images().shape == (3, 4, 6, 3) and (images() == images(stage=0)).all()
    assert (images() != images(stage=1)).mean() > 0.9
    first, second = (seeds_draw([3, 4], stage, "cpu").normal("x", (1000,)) for stage in (0, 1))
    assert torch.corrcoef(torch.cat([first, second])).fill_diagonal_(0).abs().max() < 0.13  # four standard errors


def test_pictures_there_and_back():
    pictures = np.arange(256, dtype=np.uint8).reshape(1, 8, 32, 1).repeat(3, axis=3)
    images = from_uint8(pictures)
    assert images.shape == (1, 3, 8, 32) and images.min() == -1 and images.max() == 1
    assert (to_uint8(images).numpy() == pictures).all()
