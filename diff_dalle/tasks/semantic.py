"""Training a semantic encoder with its previewer, small pictures from the latents: alone, or together with the stage B
that reads the latents, as in Würstchen (Pernias et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch
from ..config import option, settings
from ..diffusion.augmentation import area_resize
from ..diffusion.log_snr import LogSnrProcess
from ..evaluation.fidelity import PSNR_CAP, psnr_uint8
from ..images.grid import column_grid
from ..images.signal import to_uint8
from ..models.latent.semantic import SemanticAutoencoder
from ..models.latent.unet import LatentUnet
from ..randomness import Draw
from ..training.task import Task
from .latent import SEMANTIC, StageBTask, StageBTaskConfig

LEAST_RATE = 0.01  # of a step, after the first ones, which count evenly


def sample_moments(latents: Tensor) -> Tensor:
    """Mean and mean square of each sample: [N, …] → [N, 2] float32, without gradient."""
    latents = latents.detach().float().flatten(1)
    return torch.stack([latents.mean(1), latents.square().mean(1)], 1)


def usable(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with 0 and 1 where one of them is not finite, or there is no deviation."""
    good = mean.isfinite() & std.isfinite() & (std > 0)
    return torch.where(good, mean, 0.0), torch.where(good, std, 1.0)


def calibration_rate(updates: int) -> float:
    """How far the ``updates``-th step moves what is calibrated; the first one all the way."""
    return max(1 / updates, LEAST_RATE)


class Calibrating(Task):
    """A task that counts its updates."""

    updates = 0

    def extra_state(self) -> dict[str, Tensor]:
        return {**super().extra_state(), "updates": torch.tensor(self.updates)}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        rest = dict(state)
        self.updates = int(rest.pop("updates"))
        super().load_extra_state(rest)


def moments_text(values: Mapping[str, float]) -> str:
    """The latents' mean and standard deviation, of the means of ``sample_moments``."""
    mean, square = values["latent_mean"], values["latent_square"]
    return f"latents: mean {mean:.3f}, standard deviation {max(0.0, square - mean**2) ** 0.5:.3f}"


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


class JointStageBTask(Calibrating, StageBTask):
    """Stage B and its semantic encoder under one optimizer: the encoder learns what helps stage B. Its previewer learns
    small pictures from the latents, which it does not change.

    semantic: no companion, but trained, and saved with the optimizer's state.
    """

    trains_conditions = True

    def __init__(
        self, model: LatentUnet, process: LogSnrProcess, config: StageBTaskConfig, semantic: SemanticAutoencoder
    ):
        super().__init__(model, process, config)
        self.semantic = semantic.thaw().train()
        self.observed = (*self.observed, *OBSERVED)

    def part_modules(self, part: str) -> Mapping[str, nn.Module]:
        return {**super().part_modules(part), SEMANTIC: self.semantic}

    @property
    def encoder(self) -> SemanticAutoencoder:
        return self.semantic

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        named, preview = super().losses(batch, draw), autoencoding_losses(self.semantic, batch.images, frozen=True)
        error = preview.pop("loss")
        return {**named, **preview, "loss": named["loss"] + error, "preview": error.detach()}

    def observe(self, values: Mapping[str, Tensor]) -> None:
        super().observe(values)
        self.updates += 1
        follow(self.semantic, values, self.updates)
