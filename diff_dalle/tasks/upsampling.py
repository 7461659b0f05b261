"""Training an upsampler: denoise images conditioned on their low-resolution versions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch, Conditioning
from ..diffusion.augmentation import Degradation, area_downsample
from ..diffusion.diffusion_config import TrainingProcess
from ..diffusion.parametrization import ModelMeanType
from ..diffusion.resample import DenoisingConfig
from ..evaluation.fidelity import PSNR_CAP
from ..randomness import Draw
from .denoising import DenoisingTask


class UpsamplingTask(DenoisingTask):
    """Denoising conditioned on a low-resolution image, ``factor`` times smaller (Ho et al. 2022, section 2.2).

    Low-resolution images are the batch's images after an area filter, degraded as ``degradation`` says.
    """

    def __init__(
        self,
        model: nn.Module,
        process: TrainingProcess,
        config: DenoisingConfig,
        factor: int,
        degradation: Degradation,
        num_classes: int = 0,
        preview=None,
    ):
        super().__init__(model, process, config, num_classes, preview)
        self.factor, self.degradation = factor, degradation

    def condition(self, batch: Batch, draw: Draw) -> Conditioning:
        low_res = area_downsample(batch.images, self.factor)
        return replace(super().condition(batch, draw), **self.degradation.draw(low_res, draw))

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """As for a base generator, and in dB the PSNR of the x_start predicted at the last timestep from noise and the
        undegraded low-resolution image (``psnr``), that of bicubic interpolation (``bicubic_psnr``), and that of the
        downsampled prediction with its input (``consistency_psnr``). Not for eps-prediction, which does not determine
        x_start at the last timestep."""
        named, none = super().held_out(batch, draw), torch.zeros(len(batch), device=batch.images.device)
        process = self.process.noisiest
        if process.model_mean_type is ModelMeanType.EPSILON:
            return named
        low_res = area_downsample(batch.images, self.factor)
        cond = replace(batch.cond, low_res=low_res, low_res_level=none, low_res_blur=none)
        last = process.num_timesteps - 1
        x = draw.normal("noise", batch.images.shape[1:])
        expected = process.denoiser(self.model, model_kwargs={"cond": cond})(x, last).x_start
        bicubic = F.interpolate(low_res, batch.images.shape[2:], mode="bicubic", align_corners=False).clamp(-1, 1)
        return named | {
            "psnr": signal_psnr(expected, batch.images),
            "bicubic_psnr": signal_psnr(bicubic, batch.images),
            "consistency_psnr": signal_psnr(area_downsample(expected, self.factor), low_res),
        }


def signal_psnr(images: Tensor, references: Tensor) -> Tensor:
    """PSNR in dB, [N], of images in [-1, 1]; at most ``PSNR_CAP``, so that flat images do not dominate a mean."""
    mse = (images.float() - references).square().flatten(1).mean(1)
    return (10 * torch.log10(4 / mse)).clamp(max=PSNR_CAP)
