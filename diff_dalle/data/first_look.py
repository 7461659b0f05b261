"""A look at some samples before anything is trained: whether there is what the settings name.

It is bounded: LOOK samples from SHARDS shards, both spread evenly, and the same ones at every start. What it finds is
said; what no sample has is refused, since nothing could be trained.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import storage
from ..config import Fault, InputError, quantity
from ..images.decode import BrokenSample
from .arrays import MissingEmbedding, is_zero
from .captions import caption_kind, read_caption, read_record
from .collection import Collection, Raw, Unavailable
from .spec import SampleSpec

LOOK = 1024
SHARDS = 16
NAMED = 8  # keys of a json in a message
log = logging.getLogger(__name__)


@dataclass
class Findings:
    """What a look found.

    samples: the number of samples that there are, of which it looked at ``looked``.
    captions: the texts of those with a readable one; unread: why the others have none, with their numbers.
    texts:    in how many samples a key of the json holds texts.
    missing:  how many have no embedding, by the reason.
    """

    samples: int
    looked: int = 0
    captions: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def is_complete(self) -> bool:
        """Whether it looked at all samples."""
        return self.looked == self.samples

    @property
    def where(self) -> str:
        """What it looked at, for messages."""
        spread = "" if self.is_complete else ", spread evenly over the shards"
        return f"{quantity(self.looked, 'sample')}{spread}"

    def said(self) -> list[str]:
        """A line for each kind of part that some of the samples lack."""
        counts = ((self.missing, "an embedding"), (self.unread, "a readable caption"))
        return [
            f"{reasons.total():,} of {self.where}: without {what}, and skipped: "
            + "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(3))
            for reasons, what in counts
            if reasons
        ]

    def check(self, flag: str, caption_field: str) -> None:
        """Raise InputError where no sample has an embedding, naming ``flag``, or none a caption."""
        if self.looked and self.missing.total() == self.looked:
            (reason, _), *_ = self.missing.most_common(1)
            raise InputError(f"none of {self.where} of {flag} has an embedding: {reason}; give the data's embeddings")
        if self.looked and self.unread.total() == self.looked:
            (reason, _), *_ = self.unread.most_common(1)
            keys = ", ".join(f"{key} ({count:,})" for key, count in self.texts.most_common(NAMED))
            there = f"; its texts are under {keys}" if keys else ""
            rule = f"finds no caption in any of {self.where} of {flag}: {reason}{there}"
            raise InputError(Fault("caption_field", rule, caption_field))


def look(found: Collection, spec: SampleSpec, caption_field: str) -> Findings:
    """Look at the captions and embeddings of some samples, which ``spec`` asks for."""
    findings, kind = Findings(found.samples), caption_kind(caption_field)
    members = {kind} if spec.read_captions else set()
    members |= {each.member for each in spec.embeddings if each.member}
    if not members and not spec.embeddings:
        return findings

    def read(place: tuple[int, int]) -> Raw:
        return found.fetch(*place, sorted(members), sidecars=True)

    places = list(_places(found.counts))
    waits = any(map(found.in_place, {shard for shard, _ in places}))
    for raw in storage.in_parallel(read, places) if waits else map(read, places):
        if isinstance(raw.problem, Unavailable):
            continue  # nothing is known about it
        findings.looked += 1
        try:
            raw.check()
            for each in spec.embeddings:
                each.read(raw.members, raw.embeddings)
            if spec.read_captions:
                _look_at_caption(raw, kind, caption_field, findings)
        except MissingEmbedding as reason:
            findings.missing[str(reason)] += 1
        except BrokenSample:
            pass  # replaced, named and counted when it is met
    return findings


def zero_embeddings(found: Collection, kind: str) -> tuple[int, int]:
    """How many embeddings in members of this kind are all zeros, of how many that it looked at."""
    raws = [found.fetch(*place, [kind]) for place in _places(found.counts)]
    members = [raw.members[kind] for raw in raws if not raw.problem]
    return sum(is_zero(kind, data) for data in members), len(members)


def _places(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Shard and member of the samples to look at."""
    filled = np.flatnonzero(counts)
    shards = filled[_spread(len(filled), SHARDS)].tolist()
    for shard in shards:
        for member in _spread(int(counts[shard]), LOOK // len(shards)).tolist():
            yield shard, member


def _spread(count: int, most: int) -> np.ndarray:
    """At most ``most`` numbers below ``count``, evenly."""
    wanted = min(count, most)
    return np.arange(wanted) * count // max(1, wanted)


def _look_at_caption(raw: Raw, kind: str, caption_field: str, findings: Findings) -> None:
    data, record = raw.members[kind], None
    try:
        if kind == "json":
            record = read_record(data)
            findings.texts.update(key for key, value in record.items() if _is_text(value))
        findings.captions.append(read_caption(data, caption_field, record))
    except BrokenSample as reason:
        findings.unread[str(reason)] += 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and bool(value) and isinstance(value[0], str))
