"""What a decoder is trained on: shards, and where their embeddings and texts come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...checkpoints.decoder import CLIPS, ClipConfig, DecoderConfig
from ...config import Fault, InputError, named
from ...data.index import count_kinds, index_shards
from ...data.shards import ShardFiles
from ...data.sidecars import Sidecar
from ...data.spec import CaptionSpec, EmbeddingSpec, ImageSpec, SampleSpec
from ...distributed.world import World
from ...embeddings.clip import load_clip
from ...embeddings.contract import Clip
from ...embeddings.sources import EmbeddingSource, find_embeddings
from .rules import too_small
from .sections import INDEX_WIDTH, DataSection

# Kinds of members that hold embeddings, the first one that the shards have is read: our own names, clip-retrieval's and
# the reference's.
IMAGE_KINDS = tuple(f"{name}{kind}" for name in ("img_emb.", "image_emb.", "") for kind in ("npy", "safetensors"))
TEXT_KINDS = tuple(f"{name}.{kind}" for name in ("text_states", "text_emb") for kind in ("npy", "safetensors"))


@dataclass(frozen=True)
class Materials:
    """shards: by part, "train", "val" and "test". spec: what a sample holds. clip: makes what the samples lack.
    made_by: the CLIP of the embeddings, wherever they are, as far as it is known. origins: where image embeddings and
    texts come from, for people."""

    shards: Mapping[str, Sequence[str]]
    spec: SampleSpec
    clip: Clip | None
    made_by: ClipConfig | None
    origins: Mapping[str, str]


def open_materials(decoder: DecoderConfig, data: DataSection, side: int, seed: int, world: World) -> Materials:
    """Find the shards and the embeddings; every rank calls it.

    side: width and height in pixels of the images that are trained on.

    Raises InputError when there are no shards or embeddings, or embeddings of another width than the U-Nets have.
    """
    shards = world.broadcast(data.divided(seed) if world.is_main else None)
    files = ShardFiles(data.shard_cache, index_cache=data.index_cache)
    entries = index_shards(shards["train"] if world.is_main else [], files, world)
    kinds = world.broadcast(dict(count_kinds(entries)))
    embeddings: list[EmbeddingSpec] = []
    captions: list[CaptionSpec] = []
    origins, stages, made_by = {}, decoder.stages(), decoder.clip
    sighted, reading = ([each for each in stages if getattr(each, name)] for name in ("image_embedding", "has_text"))
    embeds = (sighted and not data.img_embeddings_url) or (reading and not data.text_embeddings_url)
    clip = None
    if made_by and embeds:
        clip = load_clip(made_by.make, made_by.model, world.device, outputs=made_by.outputs)
    if made_by and clip:
        made_by = replace(made_by, identity=clip.identity)
    if sighted:
        width = sighted[0].unet.image_embed_dim or 0
        found = _find(data.img_embeddings_url, width, 0, IMAGE_KINDS, data, made_by, kinds)
        if found is not None:
            embeddings.append(found.spec)
            made_by = made_by or _maker(found)
        elif clip is None:
            raise InputError(_none("image embeddings", "data.img_embeddings_url", "img_emb"))
        else:
            _check_width(clip, clip.embed_dim, "image_embed_dim", width)
            InputError.check(too_small(clip.name, clip.image_size, data))
            side = max(side, clip.image_size)
        origins["image embeddings"] = _origin(found, clip)
    if reading:
        width, length = reading[0].unet.text_embed_dim or 0, max(stage.unet.max_text_len for stage in reading)
        found = _find(data.text_embeddings_url, width, length, TEXT_KINDS, data, made_by, kinds)
        if found is not None:
            embeddings.append(found.spec)
        elif clip is None:
            raise InputError(_none("text encodings", "data.text_embeddings_url", "text_states"))
        elif not clip.text_width:
            other = named("decoder.clip")
            raise InputError(f"the CLIP {clip.name} has no states of text tokens: choose another {other}")
        else:
            _check_width(clip, clip.text_width, "text_embed_dim", width)
            captions.append(CaptionSpec(clip.tokenize, clip.text_length))
        origins["text encodings"] = _origin(found, clip)
    image = ImageSpec((side, side), channels=decoder.channels)
    return Materials(shards, SampleSpec(image, tuple(captions), embeddings=tuple(embeddings)), clip, made_by, origins)


def _none(what: str, setting: str, member: str) -> Fault:
    how = f"set {named(setting)} or {named('decoder.clip')}, or put .{member}.npy members into the shards"
    return Fault("decoder.unets", f"are conditioned on {what}, but there are none: {how}")


def _find(
    url: str | None,
    width: int,
    length: int,
    members: Sequence[str],
    data: DataSection,
    clip: ClipConfig | None,
    kinds: Mapping[str, int],
) -> EmbeddingSource | None:
    """Embeddings that are there: those of ``url``, or members of the shards; None = there are none, or the CLIP is to
    make them. length: above 0, they are the states of a text's tokens."""
    setting, what = ("data.text_embeddings_url", "text_states") if length else ("data.img_embeddings_url", "image")
    if not url:
        member = None if clip else next((kind for kind in members if kind in kinds), None)
        return find_embeddings(member, width, setting, what, length=length) if member else None
    identity = clip.identity if clip else ""
    found = find_embeddings(url, width, setting, what, data.index_width, length, identity=identity)
    source = found.spec.source
    if data.index_width is None and not found.identity and isinstance(source, Sidecar):  # of an unknown origin
        return replace(found, spec=replace(found.spec, source=replace(source, index_width=INDEX_WIDTH)))
    return found


def _maker(found: EmbeddingSource) -> ClipConfig | None:
    """The CLIP that made these embeddings, as their record names it; None = not known."""
    make, _, model = found.clip.partition(" ")
    return ClipConfig(make, model, found.identity) if make in CLIPS and model else None


def _origin(found: EmbeddingSource | None, clip: Clip | None) -> str:
    return found.origin if found else f"computed by the CLIP {clip.name if clip else ''}"


def _check_width(clip: Clip, made: int, setting: str, width: int) -> None:
    if made != width:
        embeddings = f"the CLIP {clip.name} makes embeddings of {made} elements"
        raise InputError(f"{embeddings}, but {setting} is {width}: set it")
