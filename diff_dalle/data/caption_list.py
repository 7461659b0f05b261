"""The captions of shards as prompts: images are neither required nor read."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError
from ..images.decode import BrokenSample
from .captions import caption_kind, read_caption
from .collection import collect
from .shard_table import Required
from .shards import ShardFiles


def read_captions(sources: Sequence[str], caption_field: str, limit: int = 0) -> list[str]:
    """Captions in the order of the shards, at most ``limit`` (0 = all); empty and unreadable ones are skipped.

    Raises InputError when there are no shards or no captions.
    """
    kind = caption_kind(caption_field)
    found = collect(sources, Required({kind: "captions"}), ShardFiles())
    captions: list[str] = []
    for shard, count in enumerate(found.counts.tolist()):
        for member in range(count):
            if limit and len(captions) == limit:
                return captions
            raw = found.fetch(shard, member)
            try:
                raw.check()
                captions.append(read_caption(raw.members[kind], caption_field))
            except BrokenSample:
                continue
    if not captions:
        named = ", ".join(sources)
        raise InputError(f"{named} holds no caption that is neither empty nor unreadable: set another --caption_field")
    return captions
