"""Feature maps of clean images by frozen encoders: what alignment and perceptual losses compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoints.checkpoint import check_weights, load_weights, named_tensors
from ..checkpoints.loading import at_most, open_networks
from ..checkpoints.model_folder import find_file
from ..config import Fault, InputError, named, quantity
from ..distributed.devices import with_memory, without_values
from ..models.dinov2 import UNUSED, Dinov2
from ..models.latent.semantic import SemanticAutoencoder
from ..models.noised_clip import NoisedClip
from ..models.vit_clip import VitClip
from .contract import weights_digest

KINDS = ("classifier", "vit_clip", "semantic")  # of our checkpoints
USUAL_GRID = 16  # patches of a DINOv2 along the shorter side: 224 pixels of the released models, as in REPA


class PatchEncoder(nn.Module):
    """A frozen network as a function from images of any size to feature maps.

    network: whose ``feature_map`` takes images [N, 3, H, W] in [-1, 1].
    size:    the shorter side in pixels that images are resized to.
    multiple: what both sides must be a multiple of.
    square:  both sides are ``size``, whatever the images' proportions.

    Attributes: ``channels`` of the feature map; ``identity``, the same for the same weights.
    """

    def __init__(self, network: nn.Module, size: int, multiple: int, square: bool):
        super().__init__()
        self.network, self.size, self.multiple, self.square = (
            network.eval().requires_grad_(False),
            size,
            multiple,
            square,
        )
        self.identity = weights_digest(network.state_dict())
        side, like = max(1, size // multiple) * multiple, next(network.parameters())
        with torch.no_grad():
            self.channels = self(torch.zeros(1, 3, side, side, device=like.device)).shape[1]

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 1 or 3, H, W] in [-1, 1], gray or RGB → [N, channels, h, w] float32. A gradient reaches the
        images."""
        found: Any = self.network
        return found.feature_map(self._resized(images.float().expand(-1, 3, -1, -1))).float()

    def _resized(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        factor = self.size / min(height, width)
        wanted = [max(1, round(length * factor / self.multiple)) * self.multiple for length in (height, width)]
        target = (self.size, self.size) if self.square else (wanted[0], wanted[1])
        return images if target == (height, width) else F.interpolate(images, target, mode="bicubic", antialias=True)


def open_encoder(path: str, device: torch.device, setting: str, image_size: int, size: int = 0) -> PatchEncoder:
    """The encoder in a file: a checkpoint of ``KINDS``, or a DINOv2 as released (safetensors, or what torch saved).

    setting:    what gives the path; image_size: of the run, in pixels.
    size:       as of ``PatchEncoder``; 0 = that of a classifier's training, of a DINOv2 ``USUAL_GRID`` patches, of a
                semantic encoder the images' own.

    Raises InputError for a file of anything else, for weights that are missing or too many, and for a size below one
    patch or where the network takes one only.
    """
    path = find_file(path, "classifier_path")
    if (state := named_tensors(path)) and Dinov2.fits(state):
        dino = _dinov2(state, path, device)
        return PatchEncoder(
            dino, _checked(size or USUAL_GRID * dino.patch, dino.patch, path, setting), dino.patch, square=False
        )
    network: Any = open_networks(path, KINDS)[0].load(device)
    if isinstance(network, SemanticAutoencoder):
        stride = network.config.stride
        return PatchEncoder(network, _checked(size or image_size, stride, path, setting), stride, square=False)
    assert isinstance(network, (NoisedClip, VitClip))
    if size:
        own = f"{path} takes images of {quantity(network.config.image_size, 'pixel')} alone"
        raise InputError(Fault(setting.replace("_path", "_image_size"), f"is {size}, but {own}: leave it out"))
    return PatchEncoder(network, network.config.image_size, network.config.image_size, square=True)


def _checked(size: int, patch: int, path: str, setting: str) -> int:
    if size < patch:
        rule = f"images of {size} pixels are smaller than one patch of {path}, which has {patch}"
        larger = f"set {named('alignment_image_size')} to at least that, or " if setting == "alignment_path" else ""
        raise InputError(f"{rule}: {larger}give another encoder as {named(setting)}")
    return size


def _dinov2(state: dict[str, Any], path: str, device: torch.device) -> Dinov2:
    weights = {name: value for name, value in state.items() if name != UNUSED}
    try:
        with without_values(), at_most(len(weights)):
            network = Dinov2.shaped(weights)
    except (KeyError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise InputError(f"{path} holds no DINOv2 that can be read: {error}") from None
    check_weights(network, {"state": weights}, path)
    load_weights(with_memory(network, device), {"state": weights}, path)
    return network
