"""The captions of shards alone: images are neither required nor read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from ..errors import InputError, named
from ..images.decode import BrokenSample
from .captions import caption_kind, read_caption
from .collection import collect
from .shard_table import Required
from .shards import ShardFiles


def caption_texts(sources: Sequence[str], caption_field: str, quiet: bool = False) -> Iterator[str]:
    """Every caption of shards in order, with a progress bar unless ``quiet``. Empty and unreadable ones are left out.
    Arguments and errors as for ``DataConfig``."""
    kind = caption_kind(caption_field)
    found = collect(sources, Required({kind: "captions"}), ShardFiles())
    with tqdm(total=found.samples, desc="reading captions", unit="caption", disable=quiet or None) as bar:
        for shard, count in enumerate(found.counts.tolist()):
            for member in range(count):
                bar.update()
                raw = found.fetch(shard, member)
                try:
                    raw.check()
                    yield read_caption(raw.members[kind], caption_field)
                except BrokenSample:
                    continue


def read_captions(sources: Sequence[str], caption_field: str, limit: int = 0) -> list[str]:
    """The first ``limit`` captions, 0 = all, as prompts. Raises InputError when there are no shards or no captions."""
    captions = list(itertools.islice(caption_texts(sources, caption_field, quiet=True), limit or None))
    if not captions:
        remedy = f"set another {named('caption_field')}"
        raise InputError(f"{', '.join(sources)} holds no caption that is neither empty nor unreadable: {remedy}")
    return captions
