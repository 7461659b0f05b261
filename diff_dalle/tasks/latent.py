"""Training stages B and C: denoise latents that frozen networks make of the images of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from ..training.task import Meter, Shown, Task
from .imitation import Imitation
from .timesteps import QUARTILES, by_log_snr, by_quartile, plot_by_log_snr

# Names of companions.
STAGE_A, SEMANTIC, TEXT_CLIP, IMAGE_CLIP = "stage_a", "semantic", "text_clip", "image_clip"
POOLED = "text_embedding"  # in ``Conditioning.extra`` of a batch: pooled text of a CLIP
SCALES = 4  # of the images whose semantic maps stage B learns from


@settings
class LatentConfig:
    """Denoising of latents"""

    text_dropout: float = option(0.05, "probability of replacing the caption by an empty one", least=0, most=1)


class LatentTask(Task):
    """The weighted loss of a denoiser of latents in a process in log-SNR.

    The companions ``TEXT_CLIP`` and ``IMAGE_CLIP`` encode texts and images where the network has no text encoder of its
    own, and for image embeddings. What a batch has of what they and ``autoencoder`` would make (``stored_map``,
    ``text_states`` and ``extra["text_embedding"]`` in place of tokens, ``image_embedding``) is taken as it is.

    autoencoder: name of the companion whose latents are denoised.

    ``preview``, set by whoever makes the task, makes named previews of it; None = no previews.

    The unweighted losses of training are collected by log-SNR for a plot, from one preview to the next; a resumed run
    begins anew.
    """

    model: LatentUnet
    autoencoder: str
    observed: tuple[str, ...] = ("log_snr", "observed_mse")
    recorded = ("log_snr",)
    trains_conditions = False  # whether the loss has a gradient for what makes the conditions
    imitation: Imitation | None = None  # of a LoRA's base
    preview: Callable[[LatentTask], dict[str, Shown]] | None = None

    def __init__(self, model: LatentUnet, process: LogSnrProcess, config: LatentConfig):
        super().__init__()
        self.model, self.process, self.config = model, process, config
        self.collected: Meter | None = None  # losses of training by log-SNR
        self.plot = OptionalPlot()
        self.empty: list[Tensor] | None = None  # a caption's tokens and mask, on the device
        self._empty: tuple[Tensor, Tensor, Tensor] | None = None  # the empty caption, as a CLIP encodes it

    # ----------------------------------------------------------------------------------------- what a stage consists of

    @property
    def denoiser(self) -> nn.Module:
        """What the losses are of: ``model``, or a network that contains it."""
        return self.model

    def latents(self, batch: Batch) -> Tensor:
        """What is denoised: [N, channels, h, w] float32."""
        stored = stored_map(batch, self.autoencoder)
        network: StageA | SemanticAutoencoder = self.companions[self.autoencoder]
        return network.encode(batch.images) if stored is None else stored

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
        return self._emptied(cond.drop_embedding(everywhere).drop_semantic(everywhere), everywhere, clip)

    # ------------------------------------------------------------------------------------------------------------- text

    def _text(self, given: Conditioning, draw: Draw | None) -> Conditioning:
        """Captions, some empty with a ``draw``; encoded where a CLIP does so."""
        shape = cast(LatentUnetConfig, self.denoiser.config)
        if not (shape.states_width or shape.vector_width):
            return Conditioning()
        dropped, clip = None, self._clip(TEXT_CLIP)
        if draw is not None and self.config.text_dropout:
            dropped = draw.uniform("text dropout") < self.config.text_dropout
        if clip is not None and given.tokens is None:
            pooled = given.extra.get(POOLED) if shape.vector_width else None
            encoded = Conditioning(text_pooled=pooled, text_states=given.text_states, mask=given.mask)
            return encoded if dropped is None else self._emptied(encoded, dropped, clip)
        tokens, mask = given.caption
        cond = Conditioning(tokens=tokens, mask=mask)
        if clip is None:
            return cond if dropped is None else cond.drop_text(dropped)
        if dropped is not None:
            if self.empty is None:
                self.empty = [each.to(tokens.device) for each in clip.tokenize([""], clip.text_length)]
            empty_tokens, empty_mask = self.empty
            tokens = torch.where(dropped[:, None], empty_tokens, tokens)
            mask = torch.where(dropped[:, None], empty_mask, mask)
        pooled, states = clip.encode_tokens(tokens, mask)
        cond = Conditioning(text_pooled=pooled if shape.vector_width else None)
        return replace(cond, text_states=states, mask=clip.states_mask(mask)) if shape.states_width else cond

    def _emptied(self, cond: Conditioning, where: Tensor, clip: Clip) -> Conditioning:
        """``cond`` with the encoded empty caption where ``where`` [N] bool is True."""
        if self._empty is None:
            self._empty = clip.encode_text([""])
        pooled, states, mask = self._empty
        if cond.text_pooled is not None:
            cond = replace(cond, text_pooled=torch.where(where[:, None], pooled, cond.text_pooled))
        if cond.text_states is None or cond.mask is None:
            return cond
        kept = torch.where(where[:, None], mask, cond.mask)
        return replace(cond, text_states=torch.where(where[:, None, None], states, cond.text_states), mask=kept)

    def _clip(self, name: str) -> Clip | None:
        return self.companions.get(name)

    # ----------------------------------------------------------------------------------------------------------- losses

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        with torch.no_grad():
            x_start = self.latents(batch)
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
        x_start, cond = self.latents(batch), self.condition(batch)
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
        "random scale of the image for its semantic map, one of four evenly spaced in LOW,HIGH, with sides rounded "
        "down to multiples of the encoder's stride",
    )

    def faults(self) -> Iterator[Fault]:
        if len(self.semantic_scale) != 2 or not 0 < self.semantic_scale[0] <= self.semantic_scale[1] <= 2:
            yield Fault.of(self, "semantic_scale", "must be LOW,HIGH with 0 < LOW <= HIGH <= 2")


class StageBTask(LatentTask):
    """Stage B: latents of the companion ``STAGE_A``, given the map of the companion ``SEMANTIC`` of the same image at a
    lower resolution, which is whole in evaluation."""

    config: StageBTaskConfig
    autoencoder = STAGE_A

    @property
    def encoder(self) -> SemanticAutoencoder:
        """What makes the semantic maps."""
        return self.companions[SEMANTIC]

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        cond = super().condition(batch, draw)
        if draw is None:
            return replace(cond, semantic=self.encoder.encode(batch.images))
        stored = stored_map(batch, SEMANTIC)
        semantic = self._scaled(batch, draw) if stored is None else resized_to(stored, self._grid(batch))
        cond = replace(cond, semantic=semantic)
        if not self.config.semantic_dropout:
            return cond
        return cond.drop_semantic(draw.uniform("semantic dropout") < self.config.semantic_dropout)

    def _scaled(self, batch: Batch, draw: Draw) -> Tensor:
        """The maps of the images, each scaled by its own factor, as the network would resize them.

        One pass for all images of a size. On CUDA, where kernels are chosen anew for each shape, a pass is filled up to
        one of a few numbers of images.
        """
        images, encoder, grid = batch.images, self.encoder, self._grid(batch)
        (low, high), stride = self.config.semantic_scale, encoder.config.stride
        places = np.floor(SCALES * random_uniform(draw.seed, "semantic scale", draw.index.numpy())).astype(np.int64)
        here = draw.moved(torch.from_numpy(np.argsort(places, kind="stable")))
        around, step = torch.cat([here, here]), -(-len(images) // SCALES) if images.is_cuda else 1
        maps, end = [], 0
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            factor = low + (high - low) * (place + 0.5) / SCALES
            size = [max(1, int(length * factor) // stride) * stride for length in images.shape[2:]]
            start, end = end, end + int(count)
            rows = around[start : start + -(-int(count) // step) * step]
            found = encoder.encode(F.interpolate(images[rows], size, mode="nearest"))
            maps.append(resized_to(found[: end - start], grid))
        return torch.cat(maps)[here.argsort()]

    def _grid(self, batch: Batch) -> tuple[int, int]:
        """Positions of the network's first level."""
        stored, factor = stored_map(batch, STAGE_A), self.model.config.patch_size
        if stored is None:
            factor *= self.companions[STAGE_A].config.stride
        height, width = (batch.images if stored is None else stored).shape[2:]
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
    autoencoder = SEMANTIC

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        cond, clip = super().condition(batch, draw), self._clip(IMAGE_CLIP)
        if clip is None or draw is None:
            return cond
        stored = batch.cond.image_embedding
        cond = replace(cond, image_embedding=clip.encode_images(batch.images) if stored is None else stored)
        return cond.drop_embedding(draw.uniform("image dropout") < self.config.image_dropout)


def stored_map(batch: Batch, name: str) -> Tensor | None:
    """What the companion of this name made of the images before training: [N, channels, h, w]; None = not stored."""
    return batch.cond.extra.get(f"{name}_map")


def _by_quartile(name: str, values: Tensor, t: Tensor) -> dict[str, Tensor]:
    return by_quartile(name, values, (QUARTILES * t).long().clamp(max=QUARTILES - 1))
