"""Training stages B and C: denoise latents that frozen networks make of the images of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch, Conditioning
from ..config import Fault, option, settings
from ..diffusion.log_snr import LogSnrProcess
from ..embeddings.contract import Clip
from ..evaluation.plots import OptionalPlot
from ..models.latent.blocks import resized_to
from ..models.latent.config import LatentUnetConfig
from ..models.latent.semantic import SemanticAutoencoder
from ..models.latent.stage_a import StageA
from ..models.latent.unet import LatentUnet
from ..randomness import Draw, random_uniform
from ..training.meter import Meter
from ..training.task import Shown, Task
from .bins import QUARTILES, by_log_snr, by_quartile, plot_by_log_snr
from .imitation import Imitation

# Names of companions.
STAGE_A, SEMANTIC, TEXT_CLIP, IMAGE_CLIP = "stage_a", "semantic", "text_clip", "image_clip"


@settings
class LatentConfig:
    """Denoising of latents"""

    text_dropout: float = option(0.05, "probability of an empty caption in place of the sample's", least=0, most=1)


class LatentTask(Task):
    """The weighted loss of a denoiser of latents in a process in log-SNR.

    The companions ``TEXT_CLIP`` and ``IMAGE_CLIP`` encode texts and images where the network has no text encoder of its
    own, and for image embeddings.

    preview: task → named previews; None = no previews.

    The unweighted losses of training are collected by log-SNR for a plot, from one preview to the next; a resumed run
    begins anew.
    """

    model: LatentUnet
    observed: tuple[str, ...] = ("log_snr", "observed_mse")
    recorded = ("log_snr",)
    trains_conditions = False  # whether the loss has a gradient for what makes the conditions
    imitation: Imitation | None = None  # of a LoRA's base

    def __init__(self, model: LatentUnet, process: LogSnrProcess, config: LatentConfig, preview=None):
        super().__init__()
        self.model, self.process, self.config, self.preview = model, process, config, preview
        self.collected: Meter | None = None  # losses of training by log-SNR
        self.plot = OptionalPlot()

    # ----------------------------------------------------------------------------------------- what a stage consists of

    @property
    def denoiser(self) -> nn.Module:
        """What the losses are of: ``model``, or a network that contains it."""
        return self.model

    def latents(self, images: Tensor) -> Tensor:
        """What is denoised: [N, channels, h, w] float32."""
        raise NotImplementedError

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        """The conditions of the samples; in training, with a ``draw``, some of them dropped. Text that a CLIP encodes
        is encoded."""
        return self._text(batch.cond, draw)

    def unconditional(self, cond: Conditioning) -> Conditioning:
        """``cond`` without what guidance can drop: empty captions, zeros."""
        first = next(iter(cond.present().values()))
        everywhere = torch.ones(len(first), dtype=torch.bool, device=first.device)
        clip = self._clip(TEXT_CLIP)
        if clip is None:
            return cond.drop(everywhere) if cond.droppable else cond
        pooled, states, mask = (each.expand(len(everywhere), *each.shape[1:]) for each in clip.encode_text([""]))
        cond = cond.drop_embedding(everywhere).drop_semantic(everywhere)
        cond = cond if cond.text_pooled is None else replace(cond, text_pooled=pooled)
        return cond if cond.text_states is None else replace(cond, text_states=states, mask=mask)

    # ------------------------------------------------------------------------------------------------------------- text

    def _text(self, given: Conditioning, draw: Draw | None) -> Conditioning:
        """Captions, some empty with a ``draw``; encoded where a CLIP does so."""
        shape = cast(LatentUnetConfig, self.denoiser.config)
        if not (shape.states_width or shape.vector_width):
            return Conditioning()
        tokens, mask = given.caption
        cond = Conditioning(tokens=tokens, mask=mask)
        dropped = None
        if draw is not None and self.config.text_dropout:
            dropped = draw.uniform("text dropout") < self.config.text_dropout
        clip = self._clip(TEXT_CLIP)
        if clip is None:
            return cond if dropped is None else cond.drop_text(dropped)
        if dropped is not None:
            empty_tokens, empty_mask = (each.to(tokens.device) for each in clip.tokenize([""], clip.text_length))
            tokens = torch.where(dropped[:, None], empty_tokens, tokens)
            mask = torch.where(dropped[:, None], empty_mask, mask)
        pooled, states = clip.encode_tokens(tokens, mask)
        cond = Conditioning(text_pooled=pooled if shape.vector_width else None)
        return replace(cond, text_states=states, mask=clip.states_mask(mask)) if shape.states_width else cond

    def _clip(self, name: str) -> Clip | None:
        return cast("Clip | None", self.companions.get(name))

    # ----------------------------------------------------------------------------------------------------------- losses

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        with torch.no_grad():
            x_start = self.latents(batch.images)
        with torch.set_grad_enabled(self.trains_conditions and torch.is_grad_enabled()):
            cond = self.condition(batch, draw)
        torch.clear_autocast_cache()  # in older versions it keeps weights cast without gradient
        t = self.process.training_times(draw.uniform("timestep"))
        cond = replace(cond, dropout_keys=draw.keys("dropout"))
        terms = self._terms(x_start, cond, t, draw)
        mse = terms["mse"].detach()
        named = {**terms, "mse": mse, "log_snr": self.process.log_snr(t).float()} | _by_quartile("mse", mse, t)
        return {**named, "observed_mse": mse}

    def _terms(self, x_start: Tensor, cond: Conditioning, t: Tensor, draw: Draw) -> dict[str, Tensor]:
        noise, target = self.process.noise(draw.normal, x_start.shape[1:]), None
        if self.imitation and self.training:
            target = self.imitation.target(self.process, x_start, t, cond, noise, draw)
        return self.process.training_losses(self.denoiser, x_start, t, {"cond": cond}, noise, target)

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """The unweighted loss, which does not depend on what is adaptive: overall, by quarter of the time and in bins
        of log-SNR; and by how much it grows with other conditions than the sample's own."""
        x_start, cond = self.latents(batch.images), self.condition(batch)
        t = self.process.training_times(draw.uniform("timestep"))
        log_snr, mse = self.process.log_snr(t), self._terms(x_start, cond, t, draw)["mse"]
        named = {"loss": mse} | _by_quartile("loss", mse, t) | by_log_snr(log_snr, mse)
        for name, other in self.other_conditions(cond, batch).items():
            named[f"{name}_gap"] = self._terms(x_start, other, t, draw)["mse"] - mse
        return named

    def other_conditions(self, cond: Conditioning, batch: Batch) -> dict[str, Conditioning]:
        """By the name of each kind of condition whose use is measured: the conditions without it, or with another
        sample's."""
        if cond.tokens is None and cond.text_states is None and cond.text_pooled is None:
            return {}
        names = ("tokens", "mask", "text_states", "text_pooled")
        given = {name: getattr(cond, name) for name in names}
        swapped = {name: value.roll(1, 0) for name, value in given.items() if value is not None}
        return {"caption_swap": replace(cond, **swapped)}

    def pictures(self, batch: Batch, cond: Conditioning) -> dict[str, Tensor]:
        """What previews show of the conditions, by name: images [N, 3, H, W] in [-1, 1]."""
        return {}

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        """A plot of the held-out loss over log-SNR, with the weights of training."""
        return self.plot("loss_by_log_snr", lambda: plot_by_log_snr(values, self.process.loss_weight))

    def training_findings(self) -> tuple[str, dict[str, np.ndarray]]:
        """The same plot of the loss of training."""
        means = self.collected.read() if self.collected else {}
        return self.plot("training_loss_by_log_snr", lambda: plot_by_log_snr(means, self.process.loss_weight))

    def observe(self, values: Mapping[str, Tensor]) -> None:
        log_snr, mse = values["log_snr"], values["observed_mse"]
        if self.process.observes:
            self.process.observe(log_snr, mse)
        self.collected = self.collected or Meter(mse.device)
        self.collected.add(by_log_snr(log_snr, torch.where(mse.isfinite(), mse, torch.nan)))

    def extra_state(self) -> dict[str, Tensor]:
        return self.process.state_dict()

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.process.load_state_dict(state)

    def previews(self) -> dict[str, Shown]:
        return self.preview(self) if self.preview else {}


@settings
class StageBTaskConfig(LatentConfig):
    """Denoising of stage A's latents"""

    semantic_dropout: float = option(0.1, "probability of dropping the semantic map", least=0, most=1)
    semantic_scale: tuple[float, ...] = option(
        (0.5, 1.0),
        "the semantic map is that of the image scaled by a random factor, LOW,HIGH, its sides rounded down to "
        "multiples of the encoder's stride",
    )

    def faults(self) -> Iterator[Fault]:
        if len(self.semantic_scale) != 2 or not 0 < self.semantic_scale[0] <= self.semantic_scale[1] <= 2:
            yield Fault.of(self, "semantic_scale", "must be LOW,HIGH with 0 < LOW <= HIGH <= 2")


class StageBTask(LatentTask):
    """Stage B: latents of the companion ``STAGE_A``, given the map of the companion ``SEMANTIC`` of the same image at a
    lower resolution, which is whole in evaluation."""

    config: StageBTaskConfig

    @property
    def encoder(self) -> SemanticAutoencoder:
        """What makes the semantic maps."""
        return cast(SemanticAutoencoder, self.companions[SEMANTIC])

    def latents(self, images: Tensor) -> Tensor:
        return cast(StageA, self.companions[STAGE_A]).encode(images)

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        cond = super().condition(batch, draw)
        if draw is None:
            return replace(cond, semantic=self.encoder.encode(batch.images))
        cond = replace(cond, semantic=self._scaled(self.encoder, batch.images, draw))
        if not self.config.semantic_dropout:
            return cond
        return cond.drop_semantic(draw.uniform("semantic dropout") < self.config.semantic_dropout)

    def _scaled(self, encoder: SemanticAutoencoder, images: Tensor, draw: Draw) -> Tensor:
        """The maps of the images, each scaled by its own factor, as the network would resize them."""
        (low, high), stride = self.config.semantic_scale, encoder.config.stride
        factors = low + (high - low) * random_uniform(draw.seed, "semantic scale", draw.index.numpy())
        height, width = images.shape[2:]
        sides = np.stack([height * factors, width * factors], 1).astype(np.int64) // stride
        sizes = [tuple(size) for size in (np.maximum(sides, 1) * stride).tolist()]
        grid = self._grid(height, width)
        maps = images.new_empty(len(images), encoder.config.semantic_channels, *grid)
        for size in dict.fromkeys(sizes):  # one pass for all images of a size
            here = torch.tensor([i for i, each in enumerate(sizes) if each == size], device=images.device)
            found = encoder.encode(F.interpolate(images[here], size, mode="nearest"))
            maps[here] = resized_to(found, grid)
        return maps

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Positions of the network's first level for images of this size."""
        factor = cast(StageA, self.companions[STAGE_A]).config.stride * self.model.config.patch_size
        return height // factor, width // factor

    def other_conditions(self, cond: Conditioning, batch: Batch) -> dict[str, Conditioning]:
        dropped = torch.ones(len(batch), dtype=torch.bool, device=batch.images.device)
        return {"semantic_drop": cond.drop_semantic(dropped), **super().other_conditions(cond, batch)}


@settings
class StageCTaskConfig(LatentConfig):
    """Denoising of semantic latents"""

    image_dropout: float = option(
        0.9, "probability of dropping the image embedding, independent of the text's", least=0, most=1
    )


class StageCTask(LatentTask):
    """Stage C: latents of the companion ``SEMANTIC``, given text, and sometimes the embedding of the same image by the
    companion ``IMAGE_CLIP``, which evaluation leaves out."""

    config: StageCTaskConfig

    def latents(self, images: Tensor) -> Tensor:
        return cast(SemanticAutoencoder, self.companions[SEMANTIC]).encode(images)

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        cond, clip = super().condition(batch, draw), self._clip(IMAGE_CLIP)
        if clip is None or draw is None:
            return cond
        cond = replace(cond, image_embedding=clip.encode_images(batch.images))
        return cond.drop_embedding(draw.uniform("image dropout") < self.config.image_dropout)


def _by_quartile(name: str, values: Tensor, t: Tensor) -> dict[str, Tensor]:
    return by_quartile(name, values, (QUARTILES * t).long().clamp(max=QUARTILES - 1))
