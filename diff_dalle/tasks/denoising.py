"""Training a generator: denoise images at random timesteps; an upsampler given their low-resolution versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch, Conditioning
from ..diffusion.augmentation import Degradation, area_downsample
from ..diffusion.diffusion_config import TrainingProcess
from ..diffusion.editing import known_part
from ..diffusion.parametrization import ModelMeanType
from ..diffusion.resample import DenoisingConfig, UniformSampler
from ..evaluation.fidelity import PSNR_CAP
from ..images.control_filters.inpainting import box_or_stroke_masks
from ..randomness import Draw
from ..training.task import Shown
from .alignment import ENCODER, PROJECTOR, Alignment
from .imitation import Imitation
from .perceptual import Perceptual
from .timesteps import QUARTILES, TimestepTask, by_quartile

UNKNOWN_SHARE = 0.1  # of the samples of which an inpainting network sees nothing, so that it generates without them too


class DenoisingTask(TimestepTask):
    """The training losses of a diffusion model (Ho et al. 2020) with caption dropout (Ho & Salimans 2022).

    model:   network called as ``model(x_t, t, cond=...)``.
    process: the full (not respaced) process.

    ``preview``, set by whoever makes the task, makes named preview images of the denoiser; None = no previews.
    ``alignment``, with the companion ``ENCODER``, and ``perceptual`` add their losses in training.
    """

    config: DenoisingConfig
    imitation: Imitation | None = None  # of a LoRA's base
    routes = False  # whether image tokens skip blocks of the network in training
    routed_until: int | None = None  # the position in the data from which on none does; None = never
    preview: Callable[[nn.Module], Mapping[str, Shown]] | None = None
    inpaints = False  # whether the network sees the known part of an image

    def __init__(self, model: nn.Module, process: TrainingProcess, config: DenoisingConfig, num_classes: int = 0):
        super().__init__(model, process, config)
        self.num_classes = num_classes
        self.alignment: Alignment | None = None
        self.perceptual: Perceptual | None = None

    def part_modules(self, part: str) -> Mapping[str, nn.Module]:
        found = super().part_modules(part)
        return found if self.alignment is None else {**found, PROJECTOR: self.alignment.projector}

    @property
    def denoiser(self) -> nn.Module:
        """What the losses are of: ``model``, or a network that contains it."""
        return self.model

    def condition(self, batch: Batch, draw: Draw) -> Conditioning:
        """The conditions of the samples, before caption dropout. For an inpainting network random boxes and strokes of
        an image are unknown, and in ``UNKNOWN_SHARE`` of the samples all of it."""
        if not self.inpaints:
            return batch.cond
        masks = box_or_stroke_masks(batch.images.shape[2:], draw)
        whole = draw.uniform("nothing known") < UNKNOWN_SHARE
        return replace(batch.cond, known=known_part(batch.images, masks | whole[:, None, None, None]))

    def drop(self, cond: Conditioning, draw: Draw) -> Conditioning:
        """The conditions in training, some of them dropped."""
        if self.config.caption_dropout > 0 and cond.droppable:
            dropped = draw.uniform("caption dropout") < self.config.caption_dropout
            cond = cond.drop(dropped, self.num_classes)
        return cond

    def swapped(self, cond: Conditioning) -> dict[str, tuple[Conditioning, Tensor]]:
        """For each kind of condition whose use is measured: the conditions with another sample's of that kind, and
        whether it differs from the sample's own [N]."""
        if cond.tokens is None:
            return {}
        tokens, mask = cond.caption
        others = tokens.roll(1, 0)
        return {"caption": (replace(cond, tokens=others, mask=mask.roll(1, 0)), torch.ne(others, tokens).any(1))}

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        cond = replace(self.condition(batch, draw), dropout_keys=draw.keys("dropout"))
        cond = self.drop(cond, draw)
        if self.routes and (self.routed_until is None or draw.index.numpy().min() < self.routed_until):
            cond = replace(cond, routing_keys=draw.keys("routing"))
        t, weights = self.schedule_sampler.sample_at(draw.uniform("timestep"))
        terms = self._terms(batch, cond, t, draw)
        loss = terms["loss"]
        if self.alignment is not None:
            terms["alignment"] = self.alignment.loss(self.companions[ENCODER], batch.images, draw)
            loss = loss + self.alignment.weight * terms["alignment"]
        if self.perceptual is not None:
            terms["perceptual"] = self.perceptual.loss(batch.images, t)
            loss = loss + self.perceptual.weight * terms["perceptual"]
        named = {**terms, "loss": loss * weights, "t": t}
        named |= self._by_quartile("loss", terms["loss"], t)
        if self.observed:
            named["unweighted_loss"] = terms["loss"].detach()
        return named

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """Loss overall and by quartile of the timesteps, and the caption-swap gap.

        The gap is the loss with another sample's caption minus the loss with the sample's own, at the same noise. It is
        0 when the model ignores text, and positive when it uses it. NaN where the two captions are equal. Likewise for
        other kinds of conditions (``swapped``).
        """
        t, _ = UniformSampler(self.process).sample_at(draw.uniform("timestep"))
        cond = self.condition(batch, draw)
        loss = self._terms(batch, cond, t, draw)["loss"]
        named = {"loss": loss} | self._by_quartile("loss", loss, t)
        for kind, (swapped, differs) in self.swapped(cond).items():
            gap = torch.where(differs, self._terms(batch, swapped, t, draw)["loss"] - loss, torch.nan)
            named |= {f"{kind}_swap_gap": gap} | self._by_quartile(f"{kind}_swap_gap", gap, t)
        return named

    def _terms(self, batch: Batch, cond: Conditioning, t: Tensor, draw: Draw) -> dict[str, Tensor]:
        noise, target = draw.normal("noise", batch.images.shape[1:]), None
        if self.imitation and self.training:
            target = self.imitation.target(self.process, batch.images, t, cond, noise, draw)
        return self.process.training_losses(self.denoiser, batch.images, t, {"cond": cond}, noise, target)

    def _by_quartile(self, name: str, values: Tensor, t: Tensor) -> dict[str, Tensor]:
        """``values`` by quarter of the process: quartile 0 has the least noise."""
        return by_quartile(name, values, (QUARTILES * t / self.process.duration).long().clamp(max=QUARTILES - 1))

    def previews(self) -> Mapping[str, Shown]:
        return self.preview(self.denoiser) if self.preview else {}


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
    ):
        super().__init__(model, process, config, num_classes)
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
