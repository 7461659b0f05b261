"""Training a noised CLIP: match noisy images with their captions within the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..batch import Batch
from ..diffusion.gaussian_diffusion import GaussianDiffusion
from ..diffusion.resample import ContrastiveConfig, ScheduleSampler, UniformSampler
from ..distributed.world import World
from ..evaluation.plots import OptionalPlot
from ..evaluation.retrieval import CANDIDATES, RetrievalTable, retrieval, same_captions
from ..models.noised_clip import NoisedClip
from ..models.precision import autocast_disabled
from ..randomness import Draw
from ..training.task import Forward, Piece
from .timesteps import TimestepTask


class ContrastiveTask(TimestepTask):
    """CLIP's symmetric loss (Radford et al. 2021, section 2.3) on images noised by the diffusion process.

    The candidates are the whole global batch: features are gathered from all ranks, and their gradients are returned,
    so loss and gradient depend neither on the number of processes nor on the micro-batch.

    process: the full (not respaced) process that noises the images.
    world:   the processes that share the global batch.
    """

    model: NoisedClip
    process: GaussianDiffusion
    config: ContrastiveConfig

    held_out_block = CANDIDATES

    def __init__(self, model: NoisedClip, process: GaussianDiffusion, config: ContrastiveConfig, world: World):
        super().__init__(model, process, config)
        self.world, self.plot = world, OptionalPlot()

    def forward(self, batch: Batch, draw: Draw, part: str = "") -> dict[str, Tensor]:
        """Features of a micro-batch: image and text [N, D], t and its weight [N], and the logit scale, repeated for
        each sample so that its gradient can be cached like theirs."""
        return self._features(batch, draw, self.schedule_sampler)

    def _features(self, batch: Batch, draw: Draw, steps: ScheduleSampler) -> dict[str, Tensor]:
        if self.config.noised:
            t, weight = steps.sample_at(draw.uniform("timestep"))
        else:
            t = torch.zeros(len(batch), dtype=torch.int64, device=batch.images.device)
            weight = torch.ones(len(batch), device=batch.images.device)
        keys = draw.keys("dropout")
        return {
            "image": self.encode_image(batch.images, t, draw, keys),
            "text": self.model.encode_text(*batch.cond.caption, keys),
            "scale": self.model.scale.expand(len(batch)),
            "t": t,
            "weight": weight,
        }

    def encode_image(self, images: Tensor, t: Tensor, draw: Draw, keys: Tensor | None = None) -> Tensor:
        """Features [N, D] of images noised to timestep t, or of clean images for an ordinary CLIP."""
        if self.config.noised:
            images = self.process.q_sample(images, t, draw.normal("noise", images.shape[1:]))
        return self.model.encode_image(images, self.process.model_steps(images, t), keys)

    def backward(self, pieces: Sequence[Piece], forward: Forward, scale: Tensor | float) -> list[dict[str, Tensor]]:
        return [cached_backward(pieces, forward, self._named_losses, scale)]

    def _named_losses(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses of this rank's features against those of all ranks."""
        candidates = self.world.interleave(torch.stack([features["image"], features["text"]], 1))
        own = torch.arange(self.world.slot, len(candidates), self.world.size, device=candidates.device)
        images, texts = candidates.unbind(1)
        losses = contrastive_losses(features, images, texts, own)
        named = {"loss": losses * features["weight"], "logit_scale": features["scale"].detach(), "t": features["t"]}
        if self.observed:
            named["unweighted_loss"] = losses
        return named

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return self._named_losses(self(batch, draw))

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """The loss at one draw of the noise, and at each noise level whether each image retrieves its caption, and each
        caption its image, among this batch (``candidates``)."""
        features = self._features(batch, draw, UniformSampler(self.process))
        own = torch.arange(len(batch), device=batch.images.device)
        loss = contrastive_losses(features, features["image"], features["text"], own)
        named = {"loss": loss, "candidates": torch.full_like(loss, len(batch))}
        alike = same_captions(*batch.cond.caption)
        for t in self.levels:
            steps = torch.full((len(batch),), t, device=batch.images.device)
            image = self.encode_image(batch.images, steps, draw)
            with autocast_disabled(image.device):
                found = retrieval(image, features["text"], alike)
            named |= {RetrievalTable.value_name(name, t): values for name, values in found.items()}
        return named

    @property
    def levels(self) -> list[int]:
        """The timesteps at which retrieval is measured: every tenth of the process and its last; only 0 for an ordinary
        CLIP."""
        steps = self.process.num_timesteps
        return sorted({*(steps * tenth // 10 for tenth in range(10)), steps - 1}) if self.config.noised else [0]

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        table = RetrievalTable.from_values(values, self.levels, round(values["candidates"]))
        note, figures = self.plot("retrieval", table.plot)
        return "\n\n".join(filter(None, [table.text(), note])), figures


def contrastive_losses(features: Mapping[str, Tensor], images: Tensor, texts: Tensor, own: Tensor) -> Tensor:
    """Mean of each image's cross-entropy over all texts and its text's cross-entropy over all images: [N] float32.

    features:      "image" and "text" [N, D] of unit length, "scale" [N].
    images, texts: [M, D], the candidates; sample i's own are at index own[i].
    """
    with autocast_disabled(images.device):
        scale = features["scale"][:, None]
        to_text, to_image = scale * features["image"] @ texts.T, scale * features["text"] @ images.T
        return 0.5 * (
            F.cross_entropy(to_text, own, reduction="none") + F.cross_entropy(to_image, own, reduction="none")
        )


Features = dict[str, Tensor]


def cached_backward(
    pieces: Sequence[Piece],
    forward: Forward,
    loss: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    scale: Tensor | float,
) -> dict[str, Tensor]:
    """Accumulate the gradient of ``scale`` × the mean of ``loss(features)["loss"]`` (Gao et al. 2021, GradCache).

    pieces, forward, scale: as in ``Task.backward``; ``forward`` returns named features, each [N, …].
    loss:                   features of all pieces together → named values [N].

    The first pass computes the features of every piece without gradient; the loss gives the features' gradients; the
    second pass backpropagates them through the network piece by piece. Both passes compute the same features, because
    all randomness, including dropout, is keyed by the sample. Returns the detached values of ``loss``.
    """
    if len(pieces) == 1:  # one pass suffices
        values = loss(forward(*pieces[0], True))
        (values["loss"].mean() * scale).backward()
        return {name: value.detach() for name, value in values.items()}

    with torch.no_grad():
        found = [forward(batch, draw, False) for batch, draw in pieces]
    features = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    for value in features.values():
        value.requires_grad_(value.is_floating_point())
    values = loss(features)
    (values["loss"].mean() * scale).backward()

    sizes = [len(batch) for batch, _ in pieces]
    gradients = {name: value.grad.split(sizes) for name, value in features.items() if value.grad is not None}
    for i, (batch, draw) in enumerate(pieces):
        again = forward(batch, draw, i == len(pieces) - 1)
        reached = [name for name in gradients if again[name].requires_grad]
        torch.autograd.backward([again[name] for name in reached], [gradients[name][i] for name in reached])
    return {name: value.detach() for name, value in values.items()}
