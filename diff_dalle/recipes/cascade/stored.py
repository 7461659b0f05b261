"""What frozen networks make of every sample of stage B or C, once, in place of every step: what can be stored, and what
of it a run reads. ``storing.py`` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ... import storage
from ...config import Fault, InputError, named, quantity, redact
from ...data.arrays import Grid, Shape
from ...data.loader import Loader
from ...data.settings import DataConfig
from ...data.sidecars import Sidecar
from ...data.spec import EmbeddingSpec
from ...embeddings.contract import Clip
from ...embeddings.material import EmbeddingsConfig, captions_of
from ...embeddings.sources import NAMES, Record, folder_record
from ...images.decode import Size
from ..recipe import Session, standard_loaders

HOW = "diff-dalle prepare_data latents"
SETTING = "latents_path"
DTYPE = EmbeddingsConfig.dtype  # of the files, unless told otherwise


@dataclass(frozen=True)
class Pictures:
    """The images of a run, each the same in every epoch.

    sizes: (height, width) that they have. made_from: what they are, for people; another text means other pixels.
    """

    sizes: tuple[Size, ...]
    made_from: str

    @classmethod
    def of(cls, data: DataConfig, side: int, seed: int) -> Pictures:
        """side: width and height of a square with as many pixels."""
        aspect = data.aspect
        if not aspect.multi_aspect_ratio:
            return cls(((side, side),), f"images of {side}×{side} pixels, cropped in the center")
        text = (
            f"images of as many pixels as {side}×{side}, in the ratios {', '.join(aspect.multi_aspect_ratio)} with "
            f"sides that are multiples of {aspect.bucket_factor}, the nearest by {aspect.bucket_distance} distance, "
            "cropped in the center"
        )
        if aspect.bucketeer_random_ratio:
            text += f"; {aspect.bucketeer_random_ratio:g} of them in a random ratio by the seed {seed}"
        return cls(aspect.buckets(side**2).sizes, text)


@dataclass(frozen=True)
class Condition:
    """What a frozen network makes of a sample.

    record: of a folder of such files.
    make:   images [N, 3, H, W] in [-1, 1], or texts → [N, …] of one or several conditions, by their names.
    grid:   of a map.
    """

    record: Record
    make: Callable[[Any], Mapping[str, Tensor]]
    grid: Grid | None = None

    @classmethod
    def of_images(
        cls, pictures: Pictures, maker: Maker, encode: Callable[[Tensor], Tensor], form: Grid | int
    ) -> Condition:
        """encode: images, of a map scaled by its grid, → [N, …]. form: of a vector its width."""
        if isinstance(form, int):
            return cls(_record(maker, (form,), pictures.made_from), lambda images: {maker.what: encode(images)})
        made_from = pictures.made_from + ("" if form.scale == 1 else f", scaled by {form.scale:g}")

        def make(images: Tensor) -> dict[str, Tensor]:
            height, width = images.shape[2:]
            return {maker.what: encode(F.interpolate(images, form.pixels((height, width)), mode="nearest"))}

        return cls(_record(maker, (form.width(pictures.sizes),), made_from), make, form)

    @property
    def what(self) -> str:
        return self.record.what

    def find(self, folder: str) -> Stored | None:
        """What is stored of it in the folder of its kind; None = nothing. InputError for what is another, or not
        finished."""
        found = folder_record(folder)
        if found is None:
            return None
        own = replace(self.record, dtype=found.dtype, pattern=found.pattern, index_width=found.index_width)
        again = f"make them again by {HOW}, in another folder"
        if difference := found.difference(own):
            raise InputError(Fault(SETTING, f": {folder} holds others than those of this run ({difference}): {again}"))
        if not found.counts:
            raise InputError(Fault(SETTING, f": {folder} is not finished: run {HOW} again, or remove it"))
        sidecar = Sidecar(storage.join(folder, found.pattern), found.index_width)
        name = {"image": "", "text_states": ""}.get(self.what, self.what)
        length = found.shape[0] if len(found.shape) > 1 else 0
        return Stored(folder, found, EmbeddingSpec(found.shape[-1], sidecar, name, length, self.grid, stored=True))


class Maker(NamedTuple):
    """What is made, a key of ``embeddings.sources.NAMES``, and by which network: its name, and identity."""

    what: str
    name: str
    identity: str


def _record(maker: Maker, shape: Shape, made_from: str) -> Record:
    pattern = f"{NAMES[maker.what]}_{{name}}.npy"
    return Record(maker.what, redact(maker.name), maker.identity, shape, DTYPE, pattern, 0, made_from, {}, {})


@dataclass(frozen=True)
class Stored:
    """What is stored of a condition, with the record of the folder, and how a loader reads it."""

    folder: str
    record: Record
    spec: EmbeddingSpec


def text_conditions(clip: Clip, names: Iterable[str], caption_field: str) -> Iterator[Condition]:
    """What a CLIP makes of captions, of these names."""
    shapes = {"text": (clip.embed_dim,), "text_states": (clip.text_length, clip.text_width)}

    def make(texts: Sequence[str]) -> dict[str, Tensor]:
        return dict(zip(shapes, clip.encode_text(texts), strict=False))

    for name in names:
        maker = Maker(name, clip.name, clip.identity)
        yield Condition(_record(maker, shapes[name], captions_of(caption_field)), make)


def changing_pictures(data: DataConfig) -> Iterator[Fault]:
    """What makes other pixels of an image in every epoch."""
    why = f"but the latents of {named(SETTING)} are those of the same pixels in every epoch"
    for name in ("random_crop", "random_flip", "saliency"):
        if getattr(data, name):
            yield Fault(f"data.{name}", f"is set, {why}: leave one of them out")
    if data.aspect.crops_at_random:
        yield Fault("data.bucket_crop", f"is random, {why}: set it to center")


def with_stored(session: Session, conditions: Iterable[Condition], needed: Sequence[str], folder: str) -> Session:
    """A session whose training samples have, in place of images and captions, what ``folder`` stores of the conditions.
    The rest is made in every step, and of held-out samples everything.

    needed: what a step needs of frozen networks, by the names of conditions or others.

    Raises InputError where nothing is stored, or something else than the conditions.
    """
    found: dict[str, Stored] = {}
    for each in conditions:
        if stored := each.find(storage.join(folder, NAMES[each.what])):
            found[each.what] = stored
    left = [what for what in needed if what not in found]
    if not found:
        raise InputError(Fault(SETTING, f": {folder} has nothing of {', '.join(needed)}: run {HOW} first"))
    has_text, lacks_text = any(map(is_text, found)), list(filter(is_text, left))
    if has_text and lacks_text:
        raise InputError(Fault(SETTING, f": {folder} has text without {lacks_text[0]}: run {HOW}, which adds it"))
    spec, of_images = session.spec, [what for what in left if not is_text(what)]
    assert spec.image is not None
    spec = replace(
        spec,
        image=replace(spec.image, read=bool(of_images)),
        captions=tuple(replace(each, read=not has_text) for each in spec.captions),
        embeddings=tuple(stored.spec for stored in found.values()),
    )
    rest = f"; made in every step: {', '.join(left)}" if left else ""
    session.world.print(f"Read from {folder}: {', '.join(found)}{rest}{'' if of_images else '; no image is decoded'}.")
    return replace(session, spec=spec, loaders=partial(_loaders, list(found.values())))


def is_text(what: str) -> bool:
    """Whether it is made of captions."""
    return what.startswith("text")


def _loaders(found: Sequence[Stored], session: Session) -> tuple[Loader, Loader | None]:
    """InputError for other shards than those of which the conditions were made."""
    data, held_out = standard_loaders(session)
    shards = [(shard.path, shard.size) for shard in data.collection.shards]
    for stored in found:
        if others := stored.record.others_of(shards):
            count = quantity(len(others), "shard")
            rule = f": {stored.folder} was not made of {count} of this run, the first {redact(others[0])}: run {HOW}"
            raise InputError(Fault(SETTING, rule))
    return data, held_out
