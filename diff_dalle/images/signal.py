"""What a generator produces: its channels, the range of its values, and how it becomes pixels; and uint8 images ↔ the
float tensors that networks compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import InputError

# ITU-R BT.601 luma in 16-bit fixed point, as in Pillow's mode "L". The weights sum to 65536, so gray stays gray.
LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)


def to_uint8(images: Tensor) -> Tensor:
    """[N, C, H, W] in [-1, 1] → [N, H, W, C] uint8, rounded; values out of range are clipped."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def from_uint8(images: np.ndarray | Tensor) -> Tensor:
    """Images [N, H, W, C] uint8 → [N, C, H, W] float32 in [-1, 1], on the device of ``images``."""
    return from_levels(torch.as_tensor(images).permute(0, 3, 1, 2))


def from_levels(images: Tensor) -> Tensor:
    """uint8 of any shape → float32 in [-1, 1] of the same shape, on the same device."""
    return images.float().div_(127.5).sub_(1.0)  # in place: batches are large


def check_pixels(name: str, images: np.ndarray, shape: str) -> None:
    """InputError unless ``images`` is uint8 of a shape like ``shape``: "[H, W, 3]", or "[N, h, w, 3]"."""
    if images.dtype != np.uint8 or images.ndim != shape.count(",") + 1 or images.shape[-1] != 3:
        raise InputError(f"{name} is {images.dtype} of shape {list(images.shape)}, but must be uint8 {shape}")


class Signal(ABC):
    """The tensors [N, channels, h, w] that a generator denoises and that the stages of a cascade pass on.

    channels:    number of channels.
    value_range: smallest and largest valid value; None = unbounded, as for latents.
    scale:       pixels per position: H = scale × h, W = scale × w.
    """

    channels: int
    value_range: tuple[float, float] | None
    scale: int = 1

    def finish(self, x: Tensor) -> Tensor:
        """A sampled signal in the form in which it is stored and passed to the next stage, of x's shape."""
        return x

    @abstractmethod
    def to_pixels(self, x: Tensor) -> np.ndarray:
        """[N, channels, h, w] → RGB images, uint8 [N, H, W, 3]."""

    @abstractmethod
    def from_pixels(self, images: np.ndarray) -> Tensor:
        """RGB images, uint8 [N, H, W, 3] → [N, channels, h, w] float32 on the CPU."""


@dataclass(frozen=True)
class PixelSignal(Signal):
    """Images in [-1, 1]: RGB (3 channels) or grayscale (1 channel)."""

    channels: int = 3
    value_range = (-1.0, 1.0)

    def finish(self, x: Tensor) -> Tensor:
        """Rounded to 8-bit levels and clipped: exactly what is read back from a PNG of the image."""
        return from_uint8(to_uint8(x))

    def to_pixels(self, x: Tensor) -> np.ndarray:
        """Grayscale images get three equal channels."""
        images = to_uint8(x).cpu().numpy()
        return images if self.channels == 3 else images.repeat(3, axis=3)

    def from_pixels(self, images: np.ndarray) -> Tensor:
        """Grayscale is the luma of ITU-R BT.601."""
        return from_uint8(images if self.channels == 3 else _luma(images))


@dataclass(frozen=True)
class LatentSignal(Signal):
    """Latents of an autoencoder, which makes them pixels.

    autoencoder: its name, for messages.
    encode, decode: images [N, 3, H, W] in [-1, 1] ↔ [N, channels, H / scale, W / scale], on the autoencoder's device;
                    None = there is none. Decoded images of another size are resized, as a preview's.
    """

    channels: int
    scale: int = 1
    autoencoder: str = "an autoencoder"
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    value_range = None

    def to_pixels(self, x: Tensor) -> np.ndarray:
        if self.decode is None:
            raise InputError(f"latents become pictures by {self.autoencoder}, but there is none: give its checkpoint")
        images = self.decode(x)
        size = x.shape[2] * self.scale, x.shape[3] * self.scale
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return to_uint8(images).cpu().numpy()

    def from_pixels(self, images: np.ndarray) -> Tensor:
        if self.encode is None:
            raise InputError(f"pictures become latents by {self.autoencoder}, but there is none: give its checkpoint")
        return self.encode(from_uint8(images)).float().cpu()


def _luma(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] → uint8 [N, H, W, 1]."""
    return ((images @ LUMA + 2**15) >> 16).astype(np.uint8)[..., None]
