"""Training a semantic encoder with its previewer: small pictures from the latents."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..config import option, settings
from ..diffusion.augmentation import area_resize
from ..evaluation.fidelity import PSNR_CAP, psnr_uint8
from ..images.grid import column_grid
from ..images.signal import to_uint8
from ..models.latent.semantic import SemanticAutoencoder
from ..randomness import Draw
from .calibration import Calibrating, calibration_rate, moments_text, sample_moments, usable

OBSERVED = ("norm_moments",)


@settings
class SemanticTaskConfig:
    """Semantic autoencoding"""

    latent_noise: float = option(
        0.0,
        "standard deviation of noise on the previewer's input latents in training, relative to theirs: above 0, the "
        "encoder spends less variance on what many positions repeat, and stage C learns captions sooner",
        least=0,
    )


def autoencoding_losses(
    model: SemanticAutoencoder, images: Tensor, frozen: bool = False, noise: Tensor | None = None
) -> dict[str, Tensor]:
    """The error of the previews as "loss", and what ``follow`` takes.

    frozen: without gradient for the encoder. noise: added to the latents that are decoded, of their shape; None = 0.
    """
    moments: list[Tensor] = []
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
        latents = model.encode(images, moments)
    loss = preview_error(model.preview(latents if noise is None else latents + noise), images)
    return {"loss": loss, "norm_moments": torch.cat(moments, 1)}


def preview_error(previews: Tensor, images: Tensor) -> Tensor:
    """Mean squared error [N] of previews to the images, area-downsampled to the previews' size."""
    return (previews - _small(images, previews)).square().flatten(1).mean(1)


@torch.no_grad()
def follow(model: SemanticAutoencoder, values: Mapping[str, Tensor], updates: int) -> None:
    """Let the statistics of the norm, and mean and standard deviation of the latents, follow a whole batch. values:
    those of ``OBSERVED``; updates: how many there have been, this one included."""
    model.norm.update(values["norm_moments"])
    mean, variance = model.norm.of_outputs(values["norm_moments"])
    mean, std = usable((mean - model.latent_mean) / model.latent_std, variance.sqrt() / model.latent_std)
    rate = calibration_rate(updates)
    model.calibrate(rate * mean, 1 + rate * (std - 1))


class SemanticTask(Calibrating):
    """The mean squared error of previews to the images, area-downsampled to the previews' size.

    shown: [M, 3, H, W], images whose previews are shown; None = no previews.

    The statistics of the norm, and mean and standard deviation of the latents, follow the whole batch between steps.
    """

    model: SemanticAutoencoder
    observed = OBSERVED

    def __init__(self, model: SemanticAutoencoder, config: SemanticTaskConfig, shown: Tensor | None = None):
        super().__init__()
        self.model, self.config, self.shown = model, config, shown

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return autoencoding_losses(self.model, batch.images, noise=self._noise(batch.images, draw))

    def _noise(self, images: Tensor, draw: Draw) -> Tensor | None:
        if not self.config.latent_noise:
            return None
        c = self.model.config
        shape = (c.semantic_channels, images.shape[2] // c.stride, images.shape[3] // c.stride)
        return self.config.latent_noise * draw.normal("latent noise", shape)

    def observe(self, values: Mapping[str, Tensor]) -> None:
        self.updates += 1
        follow(self.model, values, self.updates)

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """The loss, PSNR (dB) of the previews, and the latents' mean and mean square."""
        latents = self.model.encode(batch.images)
        previews = self.model.preview(latents)
        real, ours = (to_uint8(each).cpu().numpy() for each in (_small(batch.images, previews), previews))
        psnr = torch.from_numpy(np.minimum(psnr_uint8(real, ours), PSNR_CAP)).float().to(latents.device)
        mean, square = sample_moments(latents).unbind(1)
        loss = preview_error(previews, batch.images)
        return {"loss": loss, "psnr": psnr, "latent_mean": mean, "latent_square": square}

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        return f"previews: PSNR {values['psnr']:.2f} dB; {moments_text(values)}", {}

    def previews(self) -> dict[str, np.ndarray]:
        """Small originals above their previews."""
        if self.shown is None:
            return {}
        columns = []
        for image in self.shown.split(1):
            preview = self.model(image)
            columns.append(to_uint8(torch.cat([_small(image, preview), preview])).cpu().numpy())
        return {"previews": column_grid(columns)}


def _small(images: Tensor, previews: Tensor) -> Tensor:
    return area_resize(images, (previews.shape[2], previews.shape[3]))
