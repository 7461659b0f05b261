"""Representation alignment: a network's tokens learn to say what a frozen encoder sees in the clean image."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Fault, InputError, option, settings
from ..config.bounds import MAX_SIDE, MAX_WIDTH
from ..models.layers import Linear, to_tokens
from ..models.precision import autocast_disabled
from ..randomness import Draw

ENCODER = "alignment"  # name of the companion
PROJECTOR = "projector"  # what the trained module is called in the optimizer's state
ON = ("alignment_path",)


@settings
class AlignmentConfig:
    """Representation alignment"""

    alignment_path: str = option(
        "",
        "encoder to align the network's tokens with (REPA): a noised CLIP, a semantic encoder, or a released DINOv2 "
        "file; empty = no alignment",
        free=True,
    )
    alignment_weight: float = option(0.5, "weight of the alignment loss, 1 − cosine", needs=ON, above=0)
    alignment_block: str = option(
        "",
        "dotted name of the block whose output is aligned, such as unet.output_blocks.0; empty = the network's middle",
        needs=ON,
    )
    alignment_until: float = option(
        1.0,
        "share of the run's iterations or samples after which alignment stops; 1 = never",
        needs=ON,
        above=0,
        most=1,
    )
    alignment_width: int = option(2048, "hidden channels of the projector", needs=ON, least=1, most=MAX_WIDTH)
    alignment_image_size: int = option(
        0,
        "shorter side in pixels of images at the encoder; 0 = the classifier's own, 16 patches for DINOv2, the "
        "images' own for a semantic encoder",
        needs=ON,
        least=0,
        most=MAX_SIDE,
    )
    alignment_encoder: str = option(
        "", "required identity of the encoder's weights; recorded by training, empty = any", needs=ON
    )


class Kept:
    """The inputs and the output of a module's latest forward pass in training, once.

    Its hook stays: a new one for each pass would be new to torch.compile every time.
    """

    def __init__(self, module: nn.Module):
        self._latest: tuple[Any, Any] | None = None
        module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._latest = inputs, output

    def take(self) -> tuple[Any, Any]:
        found, self._latest = self._latest, None
        assert found is not None
        return found


class Alignment(nn.Module):
    """The loss of REPA (Yu et al. 2025, equation 8): 1 − cosine of projected tokens and an encoder's features, its mean
    over positions. It can stop early (Wang et al. 2025, HASTE).

    block:     a module of the network, whose output is [N, C, h, w], or [N, h · w, C] with h / w as the image's.
    projector: trained with the network, but no part of it.
    until:     position in the data from which on samples have no alignment loss; None = there is none.

    The features, not the tokens, are resized to the other's grid: bilinear, with an antialiasing filter.
    """

    def __init__(self, block: nn.Module, projector: nn.Module, weight: float, until: int | None = None):
        super().__init__()
        self.projector, self.weight, self.until, self.kept = projector, weight, until, Kept(block)

    def loss(self, encoder: nn.Module, images: Tensor, draw: Draw) -> Tensor:
        """[N] float32, of the network's latest forward pass. images: clean, [N, C, H, W]."""
        tokens, size = tokens_of(self.kept.take()[1], images.shape[2:])
        if self.until is not None and draw.index.numpy().min() >= self.until:
            ended = self.projector(tokens[:1].detach()).float().mean()
            return (0 * ended).expand(len(images))  # a gradient of 0: data parallelism expects one
        with torch.no_grad():
            features = encoder(images)
        loss = dissimilarity(self.projector(tokens), to_tokens(on_grid(features, size)))
        return loss if self.until is None else torch.where(draw.positions < self.until, loss, 0.0)


def tokens_of(output: Any, image: Any) -> tuple[Tensor, tuple[int, int]]:
    """A block's output as tokens [N, h · w, C], and their grid (h, w). image: (H, W) in pixels. InputError for an
    output that has no grid."""
    if isinstance(output, Tensor) and output.ndim == 4:
        return to_tokens(output), (output.shape[2], output.shape[3])
    if isinstance(output, Tensor) and output.ndim == 3:
        height = round(math.sqrt(output.shape[1] * image[0] / image[1]))
        if height and height * round(output.shape[1] / height) == output.shape[1]:
            return output, (height, output.shape[1] // height)
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    rule = f"gives {shape}, which is no feature map of the image: name another block"
    raise InputError(Fault("alignment_block", rule))


def on_grid(features: Tensor, size: tuple[int, int]) -> Tensor:
    """Feature maps [N, C, h, w] on another grid."""
    if features.shape[2:] == size:
        return features
    return F.interpolate(features, size, mode="bilinear", antialias=True)


def dissimilarity(tokens: Tensor, others: Tensor) -> Tensor:
    """1 − cosine, mean over positions: [N, T, C] twice → [N] float32."""
    with autocast_disabled(tokens.device):
        return (1 - F.cosine_similarity(tokens.float(), others.float(), dim=-1)).mean(1)


def find_block(network: nn.Module, name: str) -> nn.Module:
    """A network's block by its dotted name; "" = the one that it names itself as its ``middle_block``. InputError for a
    name that no module has."""
    wanted = name or getattr(network, "middle_block", "")
    try:
        found = attrgetter(wanted)(network) if wanted else None
    except AttributeError:
        found = None
    if not isinstance(found, nn.Module):
        names = [each for each, _ in network.named_modules() if each.count(".") == 2][:4]
        rule = f"is {wanted or 'empty'}, but the network has no such module; names look like {', '.join(names)}"
        raise InputError(Fault("alignment_block", rule))
    if getattr(found, "joins_text", False):
        rule = f"is {wanted}, whose output has tokens of the text too: name the block's map, in place of blocks maps"
        raise InputError(Fault("alignment_block", rule))
    return found


class Projector(nn.Module):
    """An MLP of three layers from a network's tokens [N, T, channels] to an encoder's features [N, T, out_channels]
    (Yu et al. 2025, REPA, appendix A)."""

    entries = ()  # see ``models.units``

    def __init__(self, channels: int, width: int, out_channels: int):
        super().__init__()
        self.first, self.second, self.last = Linear(channels, width), Linear(width, width), Linear(width, out_channels)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(F.silu(self.second(F.silu(self.first(tokens)))))


def make_projector(config: AlignmentConfig, channels: int, out_channels: int, seed: int) -> Projector:
    """With initial weights that are a function of the seed."""
    torch.manual_seed(seed)
    return Projector(channels, config.alignment_width, out_channels)
