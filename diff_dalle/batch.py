"""The records that data fills and models read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from .config import InputError, named

SELF_COND = "self_cond"  # in ``Conditioning.extra``: [N, C, H, W], the x_start predicted before (Chen et al. 2022)
ALIGNED = 16  # bytes, of which the places of tensors in a common buffer are multiples
PACKED = ("cuda", "meta")  # devices to which they are copied together
CONTROL_HINT = "control_hint"  # in ``Conditioning.extra``: what a ControlNet made of ``control``, once for all steps


def moved(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors on a device. To a GPU, those of the CPU go in one copy, which is not waited for."""
    device = torch.device(device)
    names = [name for name, value in tensors.items() if value.device.type == "cpu"] if device.type in PACKED else []
    found = {name: value.to(device) for name, value in tensors.items() if name not in names}
    if names:
        values = [tensors[name] for name in names]
        there = packed(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        found |= dict(zip(names, unpacked(there, values), strict=True))
    return {name: found[name] for name in tensors}


def packed(values: Sequence[Tensor], pin_memory: bool = False) -> Tensor:
    """The bytes of tensors of any types, uint8 [n]."""
    buffer = torch.empty(sum(map(_place, values)), dtype=torch.uint8, pin_memory=pin_memory)
    for place, value in zip(unpacked(buffer, values), values, strict=True):
        place.copy_(value)
    return buffer


def unpacked(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes and types of ``like``, in the memory of what ``packed`` makes of such ones."""
    places = zip(buffer.split(list(map(_place, like))), like, strict=True)
    return [place[: value.nbytes].view(value.dtype).view(value.shape) for place, value in places]


def _place(value: Tensor) -> int:
    """The bytes of a tensor and the gap after it."""
    return -(-value.nbytes // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Conditioning:
    """What a network knows about each image besides the noisy image and its timestep.

    Every field is a Tensor whose first axis is the sample, or None where that kind of condition is not used.

    tokens:          [N, L] int64, token ids, padded to a common length.
    mask:            [N, L] bool, True = a real token. Position 0 (the start token) is always real.
    labels:          [N] int64, class ids; ``num_classes`` (one past the last) stands for "no class".
    text_states:     [N, L, D] float, a text encoder's output: filled once per sampling run from ``tokens``, or given
                     from outside, without ``tokens``, by an encoder that is not part of the network.
    text_pooled:     [N, D] float, the text encoder's summary vector, filled or given together with ``text_states``.
    text_mask:       [N, S] bool, which text states count, where these are others than the tokens of ``mask``.
    image_embedding: [N, E] float, such as a CLIP image embedding.
    embedding_mask:  [N] bool, False = the image embedding is dropped; None = all of them count.
    semantic:        [N, C, h, w] float, semantic latents; 0 where they are dropped.
    known:           [N, C + 1, H, W] float, the known part of the image to be inpainted, 0 elsewhere, and after it a
                     channel that is 1 where the image is known; guidance does not drop it.
    low_res:         [N, C, h, w] float, the image to be upsampled.
    low_res_level:   [N] float in [0, 1], the noise level of ``low_res``; 0 = none.
    low_res_blur:    [N] float, standard deviation in its own pixels of the blur of ``low_res``; 0 = none.
    control:         [N, C, h, w] float in [0, 1], what a ControlNet steers by; guidance does not drop it.
    dropout_keys:    [N] int64, one random key per sample from which all dropout masks of the network follow; None
                     leaves dropout to torch's own generator.
    routing_keys:    [N] int64, one random key per sample, which decides the image tokens that skip some of a
                     transformer's blocks in training; None = none of them.
    perturbed:       [N] bool, True = every position attends to itself alone of all positions, as in the prediction that
                     perturbed-attention guidance leads away from; None = nowhere.
    extra:           further conditions by name, for networks that need ones of their own (a second tokenizer's ids).
    """

    tokens: Tensor | None = None
    mask: Tensor | None = None
    labels: Tensor | None = None
    text_states: Tensor | None = None
    text_pooled: Tensor | None = None
    text_mask: Tensor | None = None
    image_embedding: Tensor | None = None
    embedding_mask: Tensor | None = None
    semantic: Tensor | None = None
    known: Tensor | None = None
    low_res: Tensor | None = None
    low_res_level: Tensor | None = None
    low_res_blur: Tensor | None = None
    control: Tensor | None = None
    dropout_keys: Tensor | None = None
    routing_keys: Tensor | None = None
    perturbed: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def present(self) -> dict[str, Tensor]:
        """The fields that are set, by name; ``extra`` ones as ``extra.NAME``."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extra"}
        values |= {f"extra.{name}": value for name, value in self.extra.items()}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def of(values: Mapping[str, Tensor]) -> Conditioning:
        """The inverse of ``present``."""
        extra = {name.removeprefix("extra."): value for name, value in values.items() if name.startswith("extra.")}
        return Conditioning(**{name: values[name] for name in values if not name.startswith("extra.")}, extra=extra)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        return Conditioning.of({name: function(value) for name, value in self.present().items()})

    def to(self, device) -> Conditioning:
        return Conditioning.of(moved(self.present(), device))

    def split(self, size: int) -> list[Conditioning]:
        """Pieces of ``size`` samples, the last one perhaps smaller."""
        pieces = {name: value.split(size) for name, value in self.present().items()}
        count = max((len(piece) for piece in pieces.values()), default=0)
        return [Conditioning.of({name: piece[i] for name, piece in pieces.items()}) for i in range(count)]

    def select(self, index) -> Conditioning:
        """The samples that ``index`` (a slice, a list or an index tensor) selects, in its order."""
        return self._map(lambda value: value[index])

    @staticmethod
    def concat(parts: Sequence[Conditioning]) -> Conditioning:
        """Join along the sample axis. Every part must have the same fields set, else ValueError."""
        values = [part.present() for part in parts]
        if any(value.keys() != values[0].keys() for value in values):
            raise ValueError(f"cannot join conditionings with different fields: {sorted(map(sorted, values))}")
        return Conditioning.of({name: torch.cat([value[name] for value in values]) for name in values[0]})

    @property
    def states_mask(self) -> Tensor | None:
        """[N, S] bool, which of ``text_states`` count."""
        return self.mask if self.text_mask is None else self.text_mask

    @property
    def caption(self) -> tuple[Tensor, Tensor]:
        """``tokens`` and ``mask``. InputError when there is no caption."""
        if self.tokens is None or self.mask is None:
            raise InputError("captions are required, but cond has no tokens or mask")
        return self.tokens, self.mask

    @property
    def uncaptioned(self) -> Tensor | None:
        """[N] bool, the samples whose caption is empty or dropped; None without captions."""
        return None if self.mask is None else ~self.mask[:, 1:].any(1)  # without the start token

    @property
    def droppable(self) -> bool:
        """Whether there is anything that classifier-free guidance can drop: text, class, image embedding or semantic
        latents."""
        given = (self.mask, self.text_pooled, self.labels, self.image_embedding, self.semantic)
        return any(value is not None for value in given)

    def drop(self, where: Tensor, num_classes: int = 0) -> Conditioning:
        """Drop text, class, image embedding and semantic latents of the samples where ``where`` [N] bool is True (Ho &
        Salimans 2022).

        Raises InputError when there is none of them.
        """
        if not self.droppable:
            raise InputError(
                "there is no caption, class or image embedding to drop, so classifier-free guidance is impossible: "
                f"set {named('guidance_scale')} to 1"
            )
        return self.drop_text(where).drop_labels(where, num_classes).drop_embedding(where).drop_semantic(where)

    def without_control(self) -> Conditioning:
        """The same without control, with which a ControlNet has no effect."""
        extra = {name: value for name, value in self.extra.items() if name != CONTROL_HINT}
        return replace(self, control=None, extra=extra)

    def drop_text(self, where: Tensor) -> Conditioning:
        """Drop the text of the samples where ``where`` [N] bool is True; nothing changes without text.

        A dropped caption keeps its start token alone, which is also what an empty caption is. Text encoded from
        ``tokens`` is discarded, because it belongs to the full captions; text states from outside become 0.
        """
        mask = self.mask
        if mask is not None:
            first = torch.arange(mask.shape[1], device=mask.device) == 0
            mask = mask & (first | ~where[:, None])
        if self.tokens is not None:
            return replace(self, mask=mask, text_states=None, text_pooled=None, text_mask=None)
        states, pooled = (
            None if text is None else text.masked_fill(where.view(-1, *[1] * (text.dim() - 1)), 0.0)
            for text in (self.text_states, self.text_pooled)
        )
        return replace(self, mask=mask, text_states=states, text_pooled=pooled)

    def drop_labels(self, where: Tensor, num_classes: int) -> Conditioning:
        """Replace the class of the samples where ``where`` [N] bool is True by ``num_classes``, "no class"."""
        if self.labels is None:
            return self
        return replace(self, labels=torch.where(where, torch.full_like(self.labels, num_classes), self.labels))

    def drop_embedding(self, where: Tensor) -> Conditioning:
        """Drop the image embedding of the samples where ``where`` [N] bool is True: it becomes 0 and is masked."""
        if self.image_embedding is None:
            return self
        kept = ~where if self.embedding_mask is None else self.embedding_mask & ~where
        embedding = self.image_embedding.masked_fill(~kept[:, None], 0.0)
        return replace(self, image_embedding=embedding, embedding_mask=kept)

    def drop_semantic(self, where: Tensor) -> Conditioning:
        """Drop the semantic latents of the samples where ``where`` [N] bool is True: they become 0."""
        if self.semantic is None:
            return self
        return replace(self, semantic=self.semantic.masked_fill(where[:, None, None, None], 0.0))


@dataclass(frozen=True)
class Batch:
    """Training samples.

    images: [N, C, H, W] float32 in [-1, 1]. H and W may differ from batch to batch. [N, 0, 0, 0] without images.
    cond:   their conditions.
    index:  [N] int64, ALWAYS on the CPU: each sample's position in the run (samples consumed before it), the key
            of everything random about it.
    weight: [N] float32, factors of the samples' losses; None = 1 for all.
    """

    images: Tensor
    cond: Conditioning
    index: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device) -> Batch:
        images = self.images.to(device, non_blocking=self.images.is_pinned())
        weight = None if self.weight is None else self.weight.to(device)
        return Batch(images, self.cond.to(device), self.index, weight)

    def split(self, size: int) -> list[Batch]:
        """Pieces of ``size`` samples, the last one perhaps smaller."""
        images, index = self.images.split(size), self.index.split(size)
        conds = self.cond.split(size) or [Conditioning()] * len(images)
        weights = [None] * len(images) if self.weight is None else self.weight.split(size)
        return [Batch(*piece) for piece in zip(images, conds, index, weights, strict=True)]

    def select(self, index) -> Batch:
        """The samples that ``index`` selects, in its order."""
        weight = None if self.weight is None else self.weight[index]
        return Batch(self.images[index], self.cond.select(index), self.index[index], weight)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """All samples of batches that have images of one size, the same conditions, and all weights or none."""
        weights = [part.weight for part in parts if part.weight is not None]
        return Batch(
            torch.cat([part.images for part in parts]),
            Conditioning.concat([part.cond for part in parts]),
            torch.cat([part.index for part in parts]),
            torch.cat(weights) if weights else None,
        )
