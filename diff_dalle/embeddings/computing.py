"""Computing the embeddings of all samples of shards once, into sidecar files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tqdm import tqdm

from .. import storage
from ..config import Fault, InputError, quantity
from ..distributed.world import World
from .clip import load_clip
from .material import EmbeddingsConfig, Images, Material, Texts
from .shard_embeddings import ShardWork
from .sources import FILE, folder_record

LISTED = 1000  # missing samples that are named in a record


def compute_embeddings(config: EmbeddingsConfig, world: World) -> list[str]:
    """Write the embeddings of all samples of ``data_dir`` into ``out_dir``, a file for each shard, and for each kind of
    embedding a record of how they were made (``sources.py``). All processes of ``world`` call it, and share the shards.

    Rows of samples that cannot be read are zeros, the mark of a missing embedding. Files that are there, complete and
    still right stay; called again after an interruption, it goes on. Returns lines about what was made.

    Raises InputError for a missing setting, data without images or captions, and a folder that holds embeddings made
    in another way.
    """
    names = ("data_dir", "clip_path", "out_dir")
    InputError.check(Fault(name, "is not set") for name in names if not getattr(config, name))
    clip = load_clip(config.clip_make, config.clip_path, world.device, config.precision)
    if "text_states" in config.what and not clip.text_width:
        rule = f"has text_states, but the text tower of {clip.name} has none to give: leave it out"
        raise InputError(Fault("what", rule))
    texts = tuple(kind for kind in config.what if kind != "image")
    lines = make_embeddings(Images(config, clip, ("image",), world), world) if "image" in config.what else []
    return lines + (make_embeddings(Texts(config, clip, texts, world), world) if texts else [])


def make_embeddings(material: Material, world: World) -> list[str]:
    """Make the embeddings of a material, as ``compute_embeddings`` says. Returns lines about what was made."""
    if world.is_main:
        for kind in material.records:
            _claim(material, kind)
    world.barrier()
    collection = material.collection
    sizes = {kind: sum(collection.totals) * record.row_bytes / 1e6 for kind, record in material.records.items()}
    each = ", ".join(f"{kind} {size:,.1f}" for kind, size in sizes.items())
    world.print(f"Disk: about {sum(sizes.values()):,.1f} MB in {material.form.out_dir} ({each}).")
    works = [ShardWork(material, shard) for shard in range(len(collection.shards))[world.rank :: world.size]]
    # Batch by batch in step with the other processes: one that has done its own would wait for them in a single
    # collective for longer than ``timeout``.
    steps = _steps(material, works, world)
    while world.any(next(steps, False)):
        pass
    found = [
        (work.shard, len(work.missing), [_named(work, member) for member in sorted(work.missing)[:LISTED]])
        for work in works
    ]
    missing = sorted(each for part in world.gather(found) for each in part)
    named_samples = [sample for _, _, samples in missing for sample in samples]
    return _finish(material, sum(count for _, count, _ in missing), named_samples, world)


def _named(work: ShardWork, member: int) -> tuple[str, str]:
    """A missing sample, and why it is."""
    return work.collection.describe(work.shard, member), work.missing[member]


def _claim(material: Material, kind: str) -> None:
    """Write the record of a folder that is empty, or holds embeddings made in the same way."""
    folder, record = material.folder(kind), material.records[kind]
    another = f"choose another {material.place}"
    there = folder_record(folder)
    if there is None:
        if storage.exists(folder) and any(path.endswith(".npy") for path in storage.list_files(folder)):
            raise InputError(f"{folder} holds embeddings without a record ({FILE}): {another}")
        storage.make_dirs(folder)
    elif difference := there.difference(record):
        raise InputError(f"{folder} holds embeddings made in another way ({difference}): {another}")
    record.write(folder, {}, {})


def _steps(material: Material, works: Sequence[ShardWork], world: World) -> Iterator[bool]:
    total = sum(int(material.collection.counts[work.shard]) for work in works)
    of = f" (process 1 of {world.size})" if world.size > 1 else ""
    title = f"embedding {' and '.join(material.records)}{of}"
    with tqdm(total=total, desc=title, unit="sample", disable=not world.is_main or None) as bar:
        for work in works:
            for done in work.steps():
                bar.update(done)
                yield True


def _finish(material: Material, unreadable: int, missing: Sequence[tuple[str, str]], world: World) -> list[str]:
    """Complete the records. Returns lines about what was made."""
    collection = material.collection
    samples = sum(collection.totals)
    embedded = collection.samples - unreadable
    counts = {"shards": len(collection.shards), "samples": samples, "embeddings": embedded}
    counts["missing"] = samples - embedded
    lines = []
    for kind, record in material.records.items():
        folder = material.folder(kind)
        if world.is_main:
            record.write(folder, counts, dict(missing[:LISTED]))
        made, shards = quantity(embedded, "embedding"), quantity(counts["shards"], "shard")
        lines.append(f"{folder}: {made} {list(record.shape)} in {record.dtype}, {shards}, by {record.clip}")
    if counts["missing"]:
        lines.append(
            f"{quantity(counts['missing'], 'sample')} without an embedding: {collection.left_out:,} without "
            f"{material.one}, {unreadable:,} that cannot be read"
        )
        lines += [f"  {sample}: {reason}" for sample, reason in missing[:10]]
    return lines
