"""What a training sample must hold. Whoever trains declares it; nothing else is read from the shards.

Every class here is frozen and can be sent to worker processes, provided that the functions in it can: a tokenizer
object, a function at module level, a ``functools.partial`` of one, but no lambda.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ..config import InputError
from ..images.decode import BrokenSample, Size
from ..images.transforms import Window
from .arrays import KINDS, Grid, Shape, read_embedding
from .captions import caption_kind
from .filters import Filter
from .shard_table import IMAGE
from .sidecars import Sidecar

Tokenize = Callable[[Sequence[str], int], tuple[Tensor, Tensor]]


class Rejected(BrokenSample):
    """A sample that a filter does not accept. ``filter`` is the filter's name."""

    def __init__(self, filter_name: str, reason: str):
        super().__init__(reason)
        self.filter = filter_name


@dataclass(frozen=True)
class ImageSpec:
    """The image of a sample, which fills ``Batch.images``.

    size:     (height, width) in pixels that images are resized and cropped to. With buckets, each batch has the size
              of its bucket instead.
    channels: 3 = RGB, 1 = gray.
    window:   a random square crop of the image of that size; None = all of it.
    read:     False = a sample must have it, and it has this size, but it is neither read nor decoded.
    """

    size: Size
    channels: int = 3
    window: Window | None = None
    read: bool = True

    def __post_init__(self):
        if len(self.size) != 2 or min(self.size) < 1:
            raise InputError(f"the image size is {self.size}, but must be a height and a width of at least 1 pixel")
        if self.channels not in (1, 3):
            raise InputError(f"images have {self.channels} channels, but must have 3 (RGB) or 1 (gray)")
        if self.window:
            self.window.check_size(self.size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the result."""
        height, width = (self.window.size, self.window.size) if self.window else self.size
        return height, width, self.channels


@dataclass(frozen=True)
class ControlSpec:
    """A ready-made control of a sample: a second picture, which fills ``Conditioning.control``. It is resized, cropped
    and flipped as the sample's image is.

    member:   the extension of its member of the tar, such as "cond.png".
    channels: 3 = RGB, 1 = gray.
    """

    member: str
    channels: int = 3


@dataclass(frozen=True)
class CaptionSpec:
    """The caption of a sample, as tokens.

    tokenize: ``tokenize(texts, length) -> (tokens, mask)``, both [N, length]; mask True = a real token.
    length:   tokens that a caption is truncated and padded to.
    name:     "" fills ``Conditioning.tokens`` and ``.mask``; NAME fills ``Conditioning.extra["NAME_tokens"]`` and
              ``["NAME_mask"]``.
    read:     False = a sample must have it, but it is not read and fills nothing.
    """

    tokenize: Tokenize
    length: int
    name: str = ""
    read: bool = True

    @property
    def fields(self) -> tuple[str, str]:
        """What it fills, in the names of ``Conditioning.present``."""
        return (f"extra.{self.name}_tokens", f"extra.{self.name}_mask") if self.name else ("tokens", "mask")


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding of a sample, float32. One with NaN or infinite values is a broken sample; one of only zeros, the
    mark of a missing one, is skipped and counted.

    source: the kind of a .npy or safetensors member of the tar, such as "npy", "img_emb.npy" or "safetensors", or a
            ``Sidecar``.
    name:   "" fills ``Conditioning.image_embedding``; NAME fills ``Conditioning.extra["NAME_embedding"]``.
    length: above 0, it is not one vector [width] but the states of a text's tokens, [any number, width], cut and padded
            with zeros to this length. They fill ``Conditioning.text_states`` and ``.mask``, or
            ``Conditioning.extra["NAME_states"]`` and ``["NAME_mask"]``.
    grid:   it is a map [channels, h, w] of the sample's image, in rows of this width as ``Grid`` packs them. It fills
            ``Conditioning.extra["NAME_map"]``.
    stored: it was made of the sample's image or caption, and stands for that in training; see ``SampleSpec.whole``.
    """

    width: int
    source: str | Sidecar
    name: str = ""
    length: int = 0
    grid: Grid | None = None
    stored: bool = False

    def __post_init__(self):
        if self.width < 1 or self.length < 0:
            raise InputError(
                f"the width of an embedding is {self.width} and its length {self.length}, but they must be at least 1 "
                "and 0"
            )
        if isinstance(self.source, str) and not re.fullmatch(rf"([^./]+\.)*({'|'.join(KINDS)})", self.member):
            raise InputError(
                f"the source of an embedding is {self.source!r}, but must be the extension of a member, such as npy, "
                "img_emb.npy or safetensors, or a Sidecar"
            )

    @property
    def member(self) -> str:
        """The kind of the member that holds it; "" = a sidecar does."""
        return self.source.lower() if isinstance(self.source, str) else ""

    def read(self, members: Mapping[str, bytes], stored: Mapping[Sidecar, np.ndarray]) -> np.ndarray:
        """That of a sample with these parts. Raises BrokenSample for one that cannot be used."""
        if isinstance(self.source, Sidecar):
            return stored[self.source]
        return read_embedding(self.member, members[self.member], self.shape)

    @property
    def shape(self) -> Shape:
        """(width,), or (length, width)."""
        return (self.length, self.width) if self.length else (self.width,)

    @property
    def fields(self) -> tuple[str, ...]:
        """What it fills, in the names of ``Conditioning.present``: the embedding, the map, or states and mask."""
        if self.grid:
            return (f"extra.{self.name}_map",)
        if self.length:
            return (f"extra.{self.name}_states", f"extra.{self.name}_mask") if self.name else ("text_states", "mask")
        return (f"extra.{self.name}_embedding" if self.name else "image_embedding",)


@dataclass(frozen=True)
class JsonFilter:
    """A condition on the ``json`` member of a sample. Rejected samples are replaced, and counted by the filter's name.

    name:   the filter's name, for counts and messages.
    fields: keys of the json object. A sample that lacks one is rejected.
    accept: ``accept(*values)``, the fields' values in order, says whether to use the sample. An exception (a value of
            the wrong type) counts as no.
    """

    name: str
    fields: tuple[str, ...]
    accept: Callable[..., bool]

    def check(self, record: dict) -> None:
        """Raise Rejected unless the filter accepts the json object."""
        missing = [field for field in self.fields if field not in record]
        if missing:
            raise Rejected(self.name, f"its json has no {missing[0]!r}")
        values = [record[field] for field in self.fields]
        try:
            accepted = self.accept(*values)
        except Exception as error:  # values come from anywhere: one of the wrong type is a property of the sample
            raise Rejected(self.name, f"{type(error).__name__}: {error}") from error
        if not accepted:
            found = ", ".join(f"{field} = {value!r:.40}" for field, value in zip(self.fields, values, strict=True))
            raise Rejected(self.name, found)


@dataclass(frozen=True)
class Required:
    """What the samples of a collection must have.

    members:  kinds of members ("txt", "json", or IMAGE for any image), each with what it is needed for ("captions").
    sidecars: embeddings from files beside the shards, with their shapes.
    filters:  that must accept a sample's json.
    sizes:    whether the sizes of the images are to be found out.
    unread:   those of ``members`` that a sample must have, but that are not read.
    """

    members: Mapping[str, str]
    sidecars: Mapping[Sidecar, Shape] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()
    sizes: bool = False
    unread: frozenset[str] = frozenset()

    @property
    def read(self) -> list[str]:
        """The kinds of members that are read."""
        return [kind for kind in self.members if kind not in self.unread]

    @property
    def needs_survey(self) -> bool:
        return bool(self.filters) or self.sizes


@dataclass(frozen=True)
class SampleSpec:
    """What every sample must hold. Samples without it are left out, and nothing else is read.

    num_classes: above 0, the ``cls`` member holds a class, an integer below it, which fills ``Conditioning.labels``.

    control:     of an image that is read.

    Raises InputError for a spec that asks for nothing, fills a field twice, or has two filters of one name.
    """

    image: ImageSpec | None = None
    captions: tuple[CaptionSpec, ...] = ()
    num_classes: int = 0
    embeddings: tuple[EmbeddingSpec, ...] = ()
    filters: tuple[JsonFilter, ...] = ()
    control: ControlSpec | None = None

    def __post_init__(self):
        if self.control and not (self.image and self.image.read):
            raise InputError("a control belongs to an image, but the spec asks for none")
        filled = [name for caption in self.read_captions for name in caption.fields]
        filled += [name for embedding in self.embeddings for name in embedding.fields]
        if not (self.image or filled or self.num_classes):
            raise InputError("a sample must hold something: an image, a caption, a class or an embedding")
        for names, what in ((filled, "fields"), ([each.name for each in self.filters], "filters")):
            if twice := {name for name in names if names.count(name) > 1}:
                raise InputError(f"the {what} of a sample must have different names, but {min(twice)} occurs twice")
        shapes = {(each.source, each.shape) for each in self.embeddings if isinstance(each.source, Sidecar)}
        if len(shapes) > len(self.sidecars):
            raise InputError("the embeddings of one Sidecar have one width and length, but the spec gives two")

    @property
    def read_captions(self) -> tuple[CaptionSpec, ...]:
        return tuple(each for each in self.captions if each.read)

    @property
    def whole(self) -> SampleSpec:
        """The same with the image and the captions in place of what was made of them and ``stored``."""
        return replace(
            self,
            image=self.image and replace(self.image, read=True),
            captions=tuple(replace(each, read=True) for each in self.captions),
            embeddings=tuple(each for each in self.embeddings if not each.stored),
        )

    @property
    def sidecars(self) -> dict[Sidecar, Shape]:
        """The embeddings from files beside the shards, with their shapes."""
        return {each.source: each.shape for each in self.embeddings if isinstance(each.source, Sidecar)}

    def required(self, caption_field: str) -> Required:
        """What this reads. caption_field: as in ``DataConfig``."""
        members = {IMAGE: "images"} if self.image else {}
        unread = {IMAGE} if self.image and not self.image.read else set()
        if self.captions:
            members[kind := caption_kind(caption_field)] = "captions"
            unread |= set() if self.read_captions else {kind}
        if self.num_classes:
            members["cls"] = "labels"
        members |= {each.member: "embeddings" for each in self.embeddings if each.member}
        if self.control:
            members[self.control.member.lower()] = "controls"
        if self.filters:
            members.setdefault("json", "json records")
            unread.discard("json")
        return Required(members, self.sidecars, unread=frozenset(unread))
