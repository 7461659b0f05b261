"""The captions of shards alone, to sample from: no images are needed or read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .captions import caption_kind, read_caption
from .collection import collect
from .decode import BrokenSample
from .shards import ShardFiles
from .sources import find_shards
from .table import Need


def shard_captions(
    sources: Sequence[str], caption_field: str = "txt", index_cache: str = "", flag: str = "--data_dir"
) -> Iterator[str]:
    """Every caption, in the order of the shards; empty and unreadable ones are passed over.

    InputError naming ``flag`` when there are none.
    """
    need = Need(image=False, caption=caption_kind(caption_field))
    found = collect(find_shards(sources, flag), need, ShardFiles(), index_cache, flag)
    for shard, count in enumerate(found.counts.tolist()):
        for member in range(count):
            try:
                yield read_caption(found.read(shard, found.spans(shard, member)).caption, caption_field)
            except BrokenSample:
                continue
