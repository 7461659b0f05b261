"""Perceptual losses of the images that a denoiser predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..config import Fault, named, option, settings
from ..diffusion.diffusion_config import TrainingProcess
from ..models.layers import to_tokens
from .alignment import Kept, dissimilarity

NETWORK = "perceptual"  # name of the companion
FEATURES = "features"  # in place of the name of a network of LPIPS
ON = ("perceptual_weight",)

Distance = Callable[[Tensor, Tensor], Tensor]


@settings
class PerceptualConfig:
    """Perceptual loss"""

    perceptual_weight: float = option(
        0.0, "weight of the perceptual distance between predicted and true image; 0 = none", least=0
    )
    perceptual_net: str = option(
        FEATURES,
        "perceptual distance: features = 1 − cosine of an encoder's patch features, as of alignment_path; else LPIPS "
        "(Zhang et al. 2018) with that network",
        choices=(FEATURES, "alex", "vgg", "squeeze"),
        needs=ON,
    )
    perceptual_path: str = option(
        "", "the encoder, or a file with torchvision's weights of perceptual_net", free=True, needs=ON
    )
    perceptual_snr: float = option(
        0.2, "signal-to-noise ratio below which an image has no perceptual loss", needs=ON, least=0
    )
    perceptual_encoder: str = option(
        "", "required identity of perceptual_path's weights; recorded by training, empty = any", needs=ON
    )

    def faults(self) -> Iterator[Fault]:
        if self.perceptual_weight and not self.perceptual_path:
            yield Fault("perceptual_path", f"is required with {named('perceptual_weight')}: nothing is downloaded")


class Perceptual:
    """The perceptual distance of the predicted x_start from the true one where the noise is low, 0 elsewhere, as
    PixelGen (Ma et al. 2026) does it; the bound in terms of the signal-to-noise ratio and its default are ours.

    denoiser: whose latest forward pass it is about.
    distance: (true images, others) [N, C, H, W] → [N], with a gradient for the others.
    snr:      the bound.
    """

    def __init__(self, denoiser: nn.Module, process: TrainingProcess, distance: Distance, weight: float, snr: float):
        self.kept, self.process, self.distance = Kept(denoiser), process, distance
        self.weight, self.snr = weight, snr

    def loss(self, images: Tensor, t: Tensor) -> Tensor:
        """[N] float32, of x_t at the times t [N]."""
        (x_t, *_), output = self.kept.take()
        low = self.process.log_snr(t).exp() >= self.snr
        predicted = self.process.x_start(output, x_t, t)
        # Where the distance does not count, predictions may be beyond all bounds, and their gradient not finite.
        predicted = torch.where(low.view(-1, 1, 1, 1), predicted, images)
        return torch.where(low, self.distance(images, predicted).float(), 0.0)


def feature_distance(encoder: nn.Module) -> Distance:
    """1 − cosine of an encoder's features at each position, mean over positions."""

    def distance(images: Tensor, others: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = encoder(images)
        return dissimilarity(to_tokens(encoder(others)), to_tokens(wanted))

    return distance
