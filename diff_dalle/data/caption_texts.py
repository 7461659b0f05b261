"""The captions of shards alone, without their images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tqdm import tqdm

from ..images.decode import BrokenSample
from .captions import caption_kind, read_caption
from .collection import collect
from .shard_table import Required
from .shards import ShardFiles


def caption_texts(data_dir: Sequence[str], caption_field: str) -> Iterator[str]:
    """Every caption of shards in order, with a progress bar. Broken ones are left out. Arguments and errors as for
    ``DataConfig``."""
    kind = caption_kind(caption_field)
    found = collect(data_dir, Required({kind: "captions"}), ShardFiles())
    with tqdm(total=found.samples, desc="reading captions", unit="caption", disable=None) as bar:
        for shard, count in enumerate(found.counts):
            for member in range(count):
                bar.update()
                raw = found.fetch(shard, member)
                try:
                    raw.check()
                    yield read_caption(raw.members[kind], caption_field)
                except BrokenSample:
                    continue
