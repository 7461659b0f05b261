"""A PatchGAN discriminator (Isola et al. 2017) for stage A's reconstructions, and its hinge losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...config import InputError, named, settings
from ..options import blocks_option, width_option
from ..precision import autocast_disabled

STARTING_ITERATIONS = 15  # of the power method at initialization
LEAK = 0.2  # slope of the leaky ReLUs


@settings
class DiscriminatorConfig:
    """Discriminator"""

    discriminator_depth: int = blocks_option(6, "convolutions; each halves the resolution")
    discriminator_width: int = width_option(
        512,
        "channels of the last convolutions; the first have 1/8, 1/4 and 1/2 of them",
        least=8,
        multiple_of=8,
    )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels after each convolution."""
        return tuple(self.discriminator_width >> max(3 - i, 0) for i in range(self.discriminator_depth))


class SpectralConv2d(nn.Conv2d):
    """A convolution divided by its largest singular value, found by the power method (Miyato et al. 2018).

    The iteration is not part of the forward pass: how often that runs for one update depends on the number of
    micro-batches. ``direction`` [out_channels]: the present left singular vector.
    """

    direction: Tensor

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int, padding: int):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self.register_buffer("direction", F.normalize(torch.randn(out_channels), dim=0))
        for _ in range(STARTING_ITERATIONS):
            self.iterate()

    @torch.no_grad()
    def iterate(self) -> None:
        """One iteration of the power method; to be called after each update of the weights."""
        matrix = self.weight.flatten(1)
        right = F.normalize(matrix.T @ self.direction, dim=0)
        self.direction.copy_(F.normalize(matrix @ right, dim=0))

    def forward(self, input: Tensor) -> Tensor:
        with autocast_disabled(input.device):
            norm = torch.linalg.vector_norm(self.weight.flatten(1).T @ self.direction)
            weight = self.weight / norm
        return self._conv_forward(input, weight, self.bias)


class Discriminator(nn.Module):
    """Images [N, 3, H, W] in [-1, 1] → logits [N, 1, h, w], one for each patch: large for pictures, small for
    reconstructions.

    There is no sigmoid at the end: the hinge losses need values beyond ±1.
    """

    full_precision = ("out_conv",)  # see ``for_inference``

    def __init__(self, config: DiscriminatorConfig):
        super().__init__()
        self.config = config
        widths = (3, *config.widths)
        self.convs = nn.ModuleList(
            SpectralConv2d(widths[i], widths[i + 1], 3, stride=2, padding=1) for i in range(config.discriminator_depth)
        )
        self.out_conv = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Raises InputError for images that end up as a single row or column."""
        depth, (height, width) = self.config.discriminator_depth, images.shape[2:]
        if min(height, width) <= 2**depth:
            raise InputError(
                f"the images have {width}×{height} pixels, but {named('discriminator_depth')} {depth} needs more than "
                f"{2**depth} on each side: lower it"
            )
        h = images.contiguous(memory_format=torch.channels_last)
        for i, conv in enumerate(self.convs):
            h = conv(h)
            h = F.leaky_relu(F.instance_norm(h) if i else h, LEAK)
        with autocast_disabled(h.device):
            return self.out_conv(h.float())

    def iterate(self) -> None:
        """See ``SpectralConv2d.iterate``."""
        for conv in self.convs:
            conv.iterate()  # type: ignore[operator]  # a SpectralConv2d


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """The hinge loss (Lim & Ye 2017) of logits [N, 1, h, w] of pictures and of reconstructions: [N]."""
    return (F.relu(1 - real) + F.relu(1 + fake)).flatten(1).mean(1) / 2


def adversarial_loss(fake: Tensor) -> Tensor:
    """What the autoencoder minimizes, of the logits of its reconstructions: [N]."""
    return -fake.flatten(1).mean(1)
