"""Training one U-Net of a decoder: denoise pictures given their image embeddings, or the smaller pictures before it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch import SELF_COND, Batch, Conditioning
from ..checkpoints.decoder_stage import DecoderStage
from ..config import InputError
from ..diffusion.augmentation import area_resize
from ..diffusion.diffusion_config import create_gaussian_diffusion
from ..diffusion.gaussian_diffusion import SpacedDiffusion
from ..diffusion.guidance import thresholding
from ..diffusion.resample import DenoisingConfig
from ..embeddings.contract import Clip
from ..images.signal import PixelSignal
from ..models.decoder.unet import DecoderUnet
from ..randomness import Draw
from .denoising import DenoisingTask

CLIP = "clip"  # name of the companion that makes embeddings: an ``embeddings.clip.Clip``
SELF_COND_FRACTION = 0.5  # of the training samples see a prediction (Chen et al. 2022, section 3.2)


class DecodingTask(DenoisingTask):
    """The training losses of a U-Net of a decoder, on batches that all U-Nets share.

    Its own pictures are the batch's after an area filter, or crops of them; the low-resolution images of an upsampler
    are the same, degraded. Image embedding and text are dropped independently. Embeddings and text encodings come with
    the batch, or else from the companion ``CLIP``: embeddings of the whole pictures of the batch, text of its tokens.

    model: the U-Net of ``stage``.
    """

    model: DecoderUnet
    process: SpacedDiffusion

    def __init__(self, model: DecoderUnet, stage: DecoderStage):
        process = create_gaussian_diffusion(stage.diffusion)
        super().__init__(model, process, DenoisingConfig(caption_dropout=0.0))
        self.stage = stage
        self.limit = thresholding(stage.guidance, PixelSignal.value_range)

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return super().losses(self.own_batch(batch, draw, self.stage.crop_size), draw)

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """On whole pictures, without dropping; with the gaps of image embedding and text."""
        return super().held_out(self.own_batch(batch, draw), draw)

    def own_batch(self, batch: Batch, draw: Draw, crop: int = 0) -> Batch:
        """What this U-Net sees of a batch. crop: width and height of a random crop; 0 = all.

        Raises InputError for pictures that are too small or not square, and for missing embeddings or texts.
        """
        stage, (height, width) = self.stage, batch.images.shape[2:]
        if height != width or height < stage.image_size:
            raise InputError(
                f"the pictures have {width}×{height} pixels, but {stage.name} is trained on "
                f"{stage.image_size}×{stage.image_size}: load them square and at least as large"
            )
        cond = self._embedded(batch)
        images = _resized(batch.images, stage.image_size)
        if stage.is_upsampler:
            factor = stage.factor if stage.downsample_first else 1
            low_res = _resized(batch.images, stage.image_size // factor)
            if crop:
                images, low_res = _cropped(images, low_res, crop, stage.factor, factor, draw)
            cond = replace(cond, **stage.degradation.draw(low_res, draw))
        return Batch(images, cond, batch.index)

    def given_conditions(
        self, batch: Batch, draw: Draw, before: Tensor | None = None
    ) -> tuple[Conditioning, Tensor | None]:
        """The conditions of a batch's pictures in sampling, and the low-resolution images among them without their
        noise; None for the first U-Net. before: those that the U-Net before has made; None = the pictures' own."""
        stage, cond = self.stage, self._embedded(batch)
        if not stage.is_upsampler:
            return cond, None
        if before is None:
            before = _resized(batch.images, stage.image_size // (stage.factor if stage.downsample_first else 1))
        zero = torch.zeros(len(batch), device=before.device)
        noise = draw.normal("low-resolution noise", before.shape[1:])
        degraded = stage.degradation.apply(before, zero, zero + stage.noise_level, noise)
        return replace(cond, **degraded), before

    def _embedded(self, batch: Batch) -> Conditioning:
        """Image embeddings and text encodings, where the U-Net is conditioned on them."""
        stage, given = self.stage, batch.cond
        clip: Clip | None = self.companions.get(CLIP)
        cond = Conditioning()
        if stage.image_embedding:
            embedding = given.image_embedding
            if embedding is None and clip is not None:
                embedding = clip.encode_images(batch.images)
            if embedding is None:
                raise InputError(
                    f"{stage.name} is conditioned on image embeddings, but the samples have none and there is no CLIP"
                )
            cond = replace(cond, image_embedding=embedding)
        if stage.has_text:
            states, mask = given.text_states, given.mask
            if states is None and clip is not None and given.tokens is not None:
                states = clip.encode_tokens(*given.caption)[1]
            if states is None or mask is None:
                raise InputError(
                    f"{stage.name} is conditioned on text encodings, but the samples have none, nor captions for a CLIP"
                )
            cond = replace(cond, text_states=states, mask=mask)
        return cond

    def drop(self, cond: Conditioning, draw: Draw) -> Conditioning:
        """Image embedding and text, each with its own probability."""
        if cond.image_embedding is not None and self.stage.image_drop_prob:
            cond = cond.drop_embedding(draw.uniform("image embedding dropout") < self.stage.image_drop_prob)
        if cond.mask is not None and self.stage.text_drop_prob:
            cond = cond.drop_text(draw.uniform("text dropout") < self.stage.text_drop_prob)
        return cond

    def swapped(self, cond: Conditioning) -> dict[str, tuple[Conditioning, Tensor]]:
        found, (embedding, states, mask) = {}, (cond.image_embedding, cond.text_states, cond.mask)
        if embedding is not None:
            others = embedding.roll(1, 0)
            found["embedding"] = replace(cond, image_embedding=others), torch.ne(others, embedding).any(1)
        if states is not None and mask is not None:
            others = states.roll(1, 0)
            found["text"] = (
                replace(cond, text_states=others, mask=mask.roll(1, 0)),
                torch.ne(others, states).flatten(1).any(1),
            )
        return found

    def _terms(self, batch: Batch, cond: Conditioning, t: Tensor, draw: Draw) -> dict[str, Tensor]:
        if self.stage.unet.self_cond:
            cond = self._with_prediction(batch, cond, t, draw)
        return super()._terms(batch, cond, t, draw)

    def _with_prediction(self, batch: Batch, cond: Conditioning, t: Tensor, draw: Draw) -> Conditioning:
        """Self-conditioning (Chen et al. 2022): the network's own expected picture, without gradient, thresholded as in
        sampling; for a fraction of the samples in training, for all in evaluation."""
        noise = draw.normal("noise", batch.images.shape[1:])
        x_t = self.process.q_sample(batch.images, t, noise)
        with torch.no_grad():
            predicted = self.process.p_mean_variance(
                self.model, x_t, t, clip_denoised=False, denoised_fn=self.limit, model_kwargs={"cond": cond}
            )["pred_xstart"]
        torch.clear_autocast_cache()  # in older versions it keeps weights cast without gradient
        if self.training:
            seen = draw.uniform("self-conditioning") < SELF_COND_FRACTION
            predicted = torch.where(seen[:, None, None, None], predicted, 0.0)
        return replace(cond, extra={**cond.extra, SELF_COND: predicted})


def _resized(images: Tensor, side: int) -> Tensor:
    return area_resize(images, (side, side))


def _cropped(images: Tensor, low_res: Tensor, crop: int, grid: int, factor: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """A random crop of each image, and the same part of its low-resolution image, ``factor`` times smaller. Crops are
    aligned to a ``grid`` of pixels."""
    places = (images.shape[2] - crop) // grid + 1
    corners = [(draw.uniform(f"crop {side}") * places).long().clamp(max=places - 1) * grid for side in ("top", "left")]
    return _windows(images, corners, crop), _windows(low_res, [corner // factor for corner in corners], crop // factor)


def _windows(images: Tensor, corners: list[Tensor], side: int) -> Tensor:
    """[N, C, H, W] → [N, C, side, side], each from its own corner: tops and lefts [N]."""
    offsets = torch.arange(side, device=images.device)
    rows, columns = (corner[:, None] + offsets for corner in corners)
    every = torch.arange(len(images), device=images.device)[:, None, None]
    found = images.permute(0, 2, 3, 1)[every, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)
