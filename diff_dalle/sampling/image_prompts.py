"""Pictures that a decoder is given by their CLIP embeddings: each alone, all mixed, or the way from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import Fault, InputError, named, quantity
from ..embeddings.contract import Clip
from ..images.files import fit_image
from ..images.signal import Signal, check_pixels

BATCH = 32  # pictures that the CLIP sees at once
CANCELED = 1e-4  # norm of a mixture, as a fraction of its weights, below which rounding decides its direction


@dataclass(frozen=True, eq=False)
class ImagePrompts:
    """Pictures of any size, whose embeddings are used in turn. ``len`` is the number of different embeddings.

    images:      uint8 [H, W, 3] each. A sequence that reads files when it is asked is asked for one at a time.
    weights:     one per picture, for a single embedding: their sum with these weights, scaled to unit norm. Below 0 =
                 away from the picture. None = an embedding of each picture.
    interpolate: number of embeddings from the first picture's to the second's, both included, at equal angles; 0 =
                 none.
    names:       of the pictures, for captions; none = their numbers.

    Raises InputError for no picture, settings that exclude each other, and another number of pictures than they need.
    """

    images: Sequence[np.ndarray]
    weights: Sequence[float] | None = None
    interpolate: int = 0
    names: Sequence[str] = ()

    def __post_init__(self):
        count, images = len(self.images), named("images")
        if not count:
            raise InputError(f"there is no picture to vary: give at least one ({images})")
        if self.weights is not None and self.interpolate:
            rule = f"and {named('interpolate')} exclude each other: leave one of them out"
            raise InputError(Fault("image_weights", rule))
        if self.weights is not None and len(self.weights) != count:
            values = f"has {quantity(len(self.weights), 'value')} for {quantity(count, 'image')}"
            raise InputError(Fault("image_weights", f"{values}: give one for each ({images})"))
        if self.interpolate and count != 2:
            there = "there is" if count == 1 else "there are"
            raise InputError(Fault("interpolate", f"is between 2 images, but {there} {count:,} ({images})"))
        if self.interpolate < 0 or self.interpolate == 1:
            raise InputError(Fault("interpolate", "must be at least 2: it includes both images", self.interpolate))

    def __len__(self) -> int:
        return 1 if self.weights is not None else self.interpolate or len(self.images)

    def embed(self, clip: Clip, signal: Signal, count: int) -> np.ndarray:
        """Embeddings for ``count`` images, float32 [count, E]: of pictures scaled to cover the CLIP's input and
        center-cropped, as ``prepare_data.py embeddings`` does. signal: what the decoder makes, and its CLIP saw in
        training: gray pictures or RGB."""
        whole = self.weights is not None or self.interpolate
        used, size = len(self.images) if whole else min(count, len(self.images)), (clip.image_size,) * 2
        parts = []
        for start in range(0, used, BATCH):
            batch = [self._fitted(i, size) for i in range(start, min(start + BATCH, used))]
            parts.append(clip.encode_images(signal.from_pixels(np.stack(batch))).cpu().numpy())
        found = np.concatenate(parts)
        if self.weights is not None:
            found = mixed(found, self.weights)[None]
        elif self.interpolate:
            found = slerp(found[0], found[1], np.linspace(0, 1, self.interpolate))
        return found[np.arange(count) % len(found)]

    def _fitted(self, i: int, size: tuple[int, int]) -> np.ndarray:
        image = self.images[i]
        check_pixels(f"an image prompt ({named('images')})", image, "[H, W, 3]")
        return fit_image(image, size)

    def seeds(self, seed: int, count: int) -> list[int]:
        """The seeds of ``count`` images: all different, but those of one interpolation, which share their noise."""
        return [seed + i // max(self.interpolate, 1) for i in range(count)]

    def name(self, i: int) -> str:
        """The name of picture ``i``."""
        return self.names[i] if self.names else f"image {i + 1}"

    def captions(self, count: int) -> list[str]:
        """What ``count`` images are made from, for people."""
        names = [self.name(i) for i in range(min(count, len(self.images)))]
        if self.weights is not None:
            names = [" + ".join(f"{weight:g} {self.name(i)}" for i, weight in enumerate(self.weights))]
        elif self.interpolate:
            steps = range(1, self.interpolate + 1)
            names = [f"{self.name(0)} → {self.name(1)} {i}/{self.interpolate}" for i in steps]
        return [names[i % len(names)] for i in range(count)]

    def rows(self, count: int) -> list[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        """``count`` images beside what they are made from, as numbers: pictures, images, pictures. A row for each
        picture, each interpolation, or the mixture."""
        every = range(count)
        if self.weights is not None:
            return [(range(len(self.images)), every, ())]
        if self.interpolate:
            starts = range(0, count, self.interpolate)
            return [((0,), every[start : start + self.interpolate], (1,)) for start in starts]
        return [((i,), every[i :: len(self)], ()) for i in range(min(len(self), count))]


def mixed(embeddings: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """The sum of embeddings [M, E] with these weights, scaled to unit norm: float32 [E]. InputError where it cancels
    out."""
    factors = np.asarray(weights, dtype=np.float64)
    total = factors @ embeddings.astype(np.float64)
    norm = np.linalg.norm(total)
    if not norm > CANCELED * np.abs(factors).sum():
        shown = ",".join(f"{weight:g}" for weight in weights)
        rule = f"is {shown}, with which the embeddings cancel out: choose other weights"
        raise InputError(Fault("image_weights", rule))
    return (total / norm).astype(np.float32)


def slerp(first: np.ndarray, last: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Spherical interpolation of unit vectors [E] (Shoemake 1985): float32 [steps, E]. InputError where they are
    opposite, between which there is no shortest way."""
    a, b = first.astype(np.float64), last.astype(np.float64)
    angle = 2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b))  # accurate for small ones, unlike arccos
    if np.pi - angle < CANCELED:
        rule = f"is between images with opposite embeddings: choose others ({named('images')})"
        raise InputError(Fault("interpolate", rule))
    back, on = 1 - fractions[:, None], fractions[:, None]
    # sin(f · angle) / sin(angle), which is f at angle 0
    steps = back * np.sinc(back * angle / np.pi) * a + on * np.sinc(on * angle / np.pi) * b
    return (steps / np.sinc(angle / np.pi)).astype(np.float32)
