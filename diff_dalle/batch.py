"""The records that data fills and models read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditioning:
    """What a network is told about each image, apart from the noisy image and its timestep.

    Every field is a Tensor whose first axis is the sample, or None where that kind of condition is not used.

    tokens:        [N, L] int64, token ids, padded to a common length.
    mask:          [N, L] bool, True = a real token. Position 0 (the start token) is always real.
    labels:        [N] int64, class ids; ``num_classes`` (one past the last) stands for "no class".
    text_states:   [N, L, D] float, the text encoder's output, filled once per sampling run so that the text
                   is not encoded again at every step.
    text_pooled:   [N, D] float, the text encoder's summary vector, filled together with ``text_states``.
    low_res:       [N, C, h, w] float in [-1, 1], the image to be enlarged.
    low_res_level: [N] float in [0, 1], how strongly ``low_res`` was noised; 0 = not.
    low_res_blur:  [N] float, sigma in its own pixels by which ``low_res`` was blurred; 0 = not.
    dropout_keys:  [N] int64, one random key a sample from which every dropout mask of the network follows;
                   None leaves dropout to torch's own generator.
    """

    tokens: Tensor | None = None
    mask: Tensor | None = None
    labels: Tensor | None = None
    text_states: Tensor | None = None
    text_pooled: Tensor | None = None
    low_res: Tensor | None = None
    low_res_level: Tensor | None = None
    low_res_blur: Tensor | None = None
    dropout_keys: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """The fields that are set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _map(self, function) -> Conditioning:
        return replace(self, **{name: function(value) for name, value in self.present().items()})

    def to(self, device, non_blocking: bool = False) -> Conditioning:
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def split(self, size: int) -> list[Conditioning]:
        """Pieces of ``size`` samples, the last one perhaps smaller."""
        pieces = {name: value.split(size) for name, value in self.present().items()}
        count = max((len(piece) for piece in pieces.values()), default=0)
        return [Conditioning(**{name: piece[i] for name, piece in pieces.items()}) for i in range(count)]

    def select(self, index) -> Conditioning:
        """The samples that ``index`` (a slice, a list or an index tensor) picks, in its order."""
        return self._map(lambda value: value[index])

    @staticmethod
    def concat(parts: Sequence[Conditioning]) -> Conditioning:
        """Join along the sample axis. Every part must have the same fields set, else ValueError."""
        names = [set(part.present()) for part in parts]
        if any(name != names[0] for name in names):
            raise ValueError(f"cannot join conditionings with different fields: {sorted(map(sorted, names))}")
        return Conditioning(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names[0]})

    def drop(self, where: Tensor, num_classes: int = 0) -> Conditioning:
        """Forget caption and class of the samples where ``where`` [N] bool is True (Ho & Salimans 2022).

        A dropped caption keeps its start token alone, which is also what an empty caption is; a dropped class
        becomes ``num_classes``. Already encoded text is discarded, because it belongs to the full captions.
        """
        changed = {}
        if self.mask is not None:
            first = torch.arange(self.mask.shape[1], device=self.mask.device) == 0
            changed["mask"] = self.mask & (first | ~where[:, None])
            changed["text_states"] = changed["text_pooled"] = None
        if self.labels is not None:
            changed["labels"] = torch.where(where, torch.full_like(self.labels, num_classes), self.labels)
        return replace(self, **changed)


@dataclass(frozen=True)
class Batch:
    """Training samples.

    images: [N, C, H, W] float32 in [-1, 1].
    cond:   what goes with them.
    index:  [N] int64, ALWAYS on the CPU: each sample's position in the run (samples consumed before it), the key
            of everything random about it.
    """

    images: Tensor
    cond: Conditioning
    index: Tensor

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device, non_blocking: bool = False) -> Batch:
        images = self.images.to(device, non_blocking=non_blocking)
        return Batch(images, self.cond.to(device, non_blocking), self.index)

    def split(self, size: int) -> list[Batch]:
        """Pieces of ``size`` samples, the last one perhaps smaller."""
        images, index = self.images.split(size), self.index.split(size)
        conds = self.cond.split(size) or [Conditioning()] * len(images)
        return [Batch(*piece) for piece in zip(images, conds, index, strict=True)]

    def select(self, index) -> Batch:
        """The samples that ``index`` picks, in its order."""
        return Batch(self.images[index], self.cond.select(index), self.index[index])
