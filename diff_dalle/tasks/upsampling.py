"""Training an up-sampler: denoise an image with its own small version beside it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch, Conditioning
from ..diffusion.augmentation import BLUR_FRACTION, BLUR_SIGMAS, AugmentationConfig, augment, downsample
from ..diffusion.gaussian_diffusion import GaussianDiffusion
from ..diffusion.parametrization import ModelMeanType
from ..evaluation.fidelity import PSNR_CAP
from ..randomness import Draw
from .denoising import DenoisingConfig, DenoisingTask


class UpsamplingTask(DenoisingTask):
    """The task of ``denoising.py`` for a network that enlarges ``factor`` times (Ho et al. 2022, section 2.2).

    The small images are made from the batch's own, by the area filter, and degraded as ``augmentation`` says.
    """

    def __init__(self, model: nn.Module, process: GaussianDiffusion, config: DenoisingConfig, factor: int,
                 augmentation: AugmentationConfig, num_classes: int = 0, preview=None):  # fmt: skip
        super().__init__(model, process, config, num_classes, preview)
        self.factor, self.augmentation = factor, augmentation

    def condition(self, batch: Batch, draw: Draw) -> Conditioning:
        low_res = downsample(batch.images, self.factor)
        sigma = level = torch.zeros(len(batch), device=low_res.device)
        if self.augmentation.gaussian_blur:
            least, most = BLUR_SIGMAS
            blurred = draw.uniform("low-resolution blur") < BLUR_FRACTION
            sigma = torch.where(blurred, least + (most - least) * draw.uniform("low-resolution sigma"), 0.0).float()
        if self.augmentation.noise_augmentation:
            level = (self.augmentation.noise_augmentation * draw.uniform("low-resolution level")).float()
        noise = draw.normal("low-resolution noise", low_res.shape[1:])
        return replace(batch.cond, low_res=augment(low_res, sigma, level, noise), low_res_level=level,
                       low_res_blur=sigma)  # fmt: skip

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """Further, in dB, of the image that is expected at the last step, from noise and the undegraded small image:
        PSNR, that of torch's bicubic enlargement, and that of its own small version (``consistency_psnr``). Not with
        eps-prediction, from which no image follows where there is nothing but noise."""
        named, none = super().held_out(batch, draw), torch.zeros(len(batch), device=batch.images.device)
        if self.process.model_mean_type is ModelMeanType.EPSILON:
            return named
        low_res = downsample(batch.images, self.factor)
        cond = replace(batch.cond, low_res=low_res, low_res_level=none, low_res_blur=none)
        last = self.process.num_timesteps - 1
        x = draw.normal("noise", batch.images.shape[1:])
        expected = self.process.denoiser(self.model, model_kwargs={"cond": cond})(x, last).x_start
        bicubic = F.interpolate(low_res, batch.images.shape[2:], mode="bicubic", align_corners=False).clamp(-1, 1)
        return named | {
            "psnr": psnr(expected, batch.images),
            "bicubic_psnr": psnr(bicubic, batch.images),
            "consistency_psnr": psnr(downsample(expected, self.factor), low_res),
        }


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """[N] dB, of images in [-1, 1]; at most ``PSNR_CAP``, so that flat pictures do not decide a mean."""
    mse = (images.float() - others).square().flatten(1).mean(1)
    return (10 * torch.log10(4 / mse)).clamp(max=PSNR_CAP)
