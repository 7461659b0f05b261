"""Training stage A: reconstruct images from latents, with a codebook and a discriminator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch
from ..config import Fault, named, option, section, settings
from ..evaluation.fidelity import PSNR_CAP, psnr_uint8, ssim
from ..images.grid import column_grid
from ..images.signal import to_uint8
from ..models.latent.discriminator import Discriminator, DiscriminatorConfig, adversarial_loss, discriminator_loss
from ..models.latent.stage_a import Reconstruction, StageA, one_vector
from ..randomness import Draw
from .semantic import Calibrating, calibration_rate, moments_text, sample_moments, usable

DISCRIMINATOR = "discriminator"  # the second part, with an optimizer of its own
SSIM_SIDE = 11  # pixels of the window of SSIM

Perceptual = Callable[[Tensor, Tensor], Tensor]


@settings
class AutoencodingConfig:
    """Autoencoding"""

    l1_weight: float = option(1.0, "weight of the mean absolute error", least=0)
    l2_weight: float = option(1.0, "weight of the mean squared error", least=0)
    lpips_weight: float = option(
        0.0, "weight of LPIPS (Zhang et al. 2018), whose weights must exist; 0 = none", least=0
    )
    lpips_net: str = option("vgg", "network of LPIPS", choices=("alex", "vgg", "squeeze"))
    lpips_path: str = option(
        "", "file with torchvision's weights of lpips_net; empty = torch's cache; nothing is downloaded", free=True
    )
    quantized_share: float = option(
        0.25, "fraction of the samples that are decoded from quantized latents", least=0, most=1
    )
    codebook_weight: float = option(1.0, "weight of the loss that moves the codebook toward the latents", least=0)
    commitment_weight: float = option(0.25, "weight of the loss that moves the latents toward the codebook", least=0)
    revival_interval: int = option(100, "updates between revivals of unused codebook entries; 0 = none", least=0)
    revival_usage: float = option(0.03, "usage below which entries are revived; 1 = that of the average entry", least=0)
    adversarial_weight: float = option(0.1, "weight of the adversarial loss; 0 = no discriminator", least=0)
    adversarial_start: int = option(50_000, "updates before the discriminator and the adversarial loss begin", least=0)
    discriminator_lr: float | None = option(None, "learning rate of the discriminator; none = lr", free=True, least=0)
    discriminator: DiscriminatorConfig = section(DiscriminatorConfig)

    def faults(self) -> Iterator[Fault]:
        if not (self.l1_weight or self.l2_weight):
            yield Fault.of(self, "l1_weight", f"must be above 0 where {named('l2_weight')} is 0")


class AutoencodingTask(Calibrating):
    """The losses of stage A and, in a part of its own, of a discriminator (Esser et al. 2021).

    discriminator: None with ``adversarial_weight`` 0.
    seed:          of the run, for revivals.
    perceptual:    LPIPS; None with ``lpips_weight`` 0.
    shown:         [M, 3, H, W], images whose reconstructions the previews show; None = no previews.

    What no gradient moves is updated between steps, by values of the whole batch: the statistics of the norm, the usage
    of the codebook and its revivals, and the scale factor, which follows the latents' standard deviation.
    """

    model: StageA
    observed = ("norm_moments", "counts", "candidates")

    def __init__(
        self,
        model: StageA,
        config: AutoencodingConfig,
        discriminator: Discriminator | None = None,
        seed: int = 0,
        perceptual: Perceptual | None = None,
        shown: Tensor | None = None,
    ):
        super().__init__()
        self.model, self.config, self.seed, self.perceptual, self.shown = model, config, seed, perceptual, shown
        self.discriminator = discriminator
        self.parts = ("",) if discriminator is None else ("", DISCRIMINATOR)

    def part_modules(self, part: str) -> Mapping[str, nn.Module]:
        if part == DISCRIMINATOR:
            return {DISCRIMINATOR: cast(nn.Module, self.discriminator)}
        return super().part_modules(part)

    def part_losses(self, part: str, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return self._discriminator_losses(batch, draw) if part == DISCRIMINATOR else self.losses(batch, draw)

    @property
    def _is_adversarial(self) -> bool:
        return self.discriminator is not None and self.updates >= self.config.adversarial_start

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        config, moments = self.config, []  # type: ignore[var-annotated]
        found = self.model(batch.images, self._quantized(draw), moments)
        named = self._errors(found.images, batch.images)
        named |= {"codebook": found.codebook_loss, "commitment": found.commitment}
        loss = named["loss"] + config.codebook_weight * found.codebook_loss
        loss = loss + config.commitment_weight * found.commitment
        if self.discriminator is not None:
            named["adversarial"] = torch.full_like(loss.detach(), torch.nan)  # until it begins
        if self._is_adversarial:
            named["adversarial"] = adversarial_loss(cast(Discriminator, self.discriminator)(found.images))
            loss = loss + config.adversarial_weight * named["adversarial"]
        return {**named, "loss": loss, **self._observations(found, moments, draw)}

    def _quantized(self, draw: Draw) -> Tensor:
        return draw.uniform("quantization") < self.config.quantized_share

    def _errors(self, images: Tensor, originals: Tensor) -> dict[str, Tensor]:
        """The errors of reconstructions, and their weighted sum as "loss"."""
        config, error = self.config, images - originals
        named = {"l1": error.abs().flatten(1).mean(1), "l2": error.square().flatten(1).mean(1)}
        loss = config.l1_weight * named["l1"] + config.l2_weight * named["l2"]
        if self.perceptual is not None:
            named["lpips"] = self.perceptual(originals, images)
            loss = loss + config.lpips_weight * named["lpips"]
        return {**named, "loss": loss}

    def _observations(self, found: Reconstruction, moments: list[Tensor], draw: Draw) -> dict[str, Tensor]:
        z = found.z.detach()
        return {
            "norm_moments": torch.cat(moments, 1),
            "counts": self.model.quantizer.counts(found.indices),
            "candidates": one_vector(z, draw.uniform("revival")),
        }

    def _discriminator_losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        network = cast(Discriminator, self.discriminator)
        if not self._is_adversarial:  # a gradient of 0: data parallelism expects one
            return {"loss": sum(p.sum() for p in network.parameters()) * 0 * batch.images.new_ones(len(batch))}
        with torch.no_grad():
            images = self.model(batch.images, self._quantized(draw)).images
        return {"loss": discriminator_loss(network(batch.images), network(images))}

    @torch.no_grad()
    def observe(self, values: Mapping[str, Tensor]) -> None:
        config, quantizer = self.config, self.model.quantizer
        if self._is_adversarial:
            cast(Discriminator, self.discriminator).iterate()
        self.updates += 1
        self.model.norm.update(values["norm_moments"])
        quantizer.observe(values["counts"])
        if config.revival_interval and self.updates % config.revival_interval == 0:
            candidates = values["candidates"].nan_to_num()
            quantizer.revive(candidates, config.revival_usage, self.seed, self.updates)
        mean, variance = self.model.norm.of_outputs(values["norm_moments"])
        std = (variance + (mean - mean.mean()).square()).mean().sqrt() / self.model.scale_factor  # over all channels
        _, std = usable(mean.mean(), std)
        self.model.calibrate(1 + calibration_rate(self.updates) * (std - 1))

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """Errors, PSNR (dB) and SSIM of reconstructions, PSNR of those from quantized latents, the fraction of the
        codebook in use, and the latents' mean and mean square."""
        images = batch.images
        plain = self.model(images)
        everything = torch.ones(len(batch), dtype=torch.bool, device=images.device)
        named = self._errors(plain.images, images)
        real, ours = _pixels(images), _pixels(plain.images)
        measured = {"psnr": _psnr(real, ours)}
        measured["quantized_psnr"] = _psnr(real, _pixels(self.model(images, everything).images))
        if min(images.shape[2:]) >= SSIM_SIDE:
            measured["ssim"] = ssim(real, ours)
        named |= {name: torch.from_numpy(values).float().to(images.device) for name, values in measured.items()}
        in_use = (self.model.quantizer.usage >= self.config.revival_usage).float().mean()
        mean, square = sample_moments(plain.z / self.model.scale_factor).unbind(1)
        return {**named, "codebook_use": in_use.expand(len(batch)), "latent_mean": mean, "latent_square": square}

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        similar = f", SSIM {values['ssim']:.3f}" if "ssim" in values else ""
        return (
            f"reconstructions: PSNR {values['psnr']:.2f} dB{similar}, quantized {values['quantized_psnr']:.2f} dB; "
            f"{values['codebook_use']:.1%} of the codebook in use; {moments_text(values)}",
            {},
        )

    def previews(self) -> dict[str, np.ndarray]:
        """Originals above reconstructions, and those from quantized latents below."""
        if self.shown is None:
            return {}
        columns = []
        for image in self.shown.split(1):
            quantized = torch.ones(1, dtype=torch.bool, device=image.device)
            found = image, self.model(image).images, self.model(image, quantized).images
            columns.append(np.concatenate([_pixels(each) for each in found]))
        return {"reconstructions": column_grid(columns)}


def _pixels(images: Tensor) -> np.ndarray:
    return to_uint8(images).cpu().numpy()


def _psnr(real: np.ndarray, ours: np.ndarray) -> np.ndarray:
    return np.minimum(psnr_uint8(real, ours), PSNR_CAP)
