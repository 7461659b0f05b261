"""The shapes world as webdataset shards: image (png), caption (txt) and scene (json) per sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from PIL import Image
from tqdm import tqdm

from .. import storage
from ..data.made_folder import claim_folder, read_claim
from ..data.tar import write_tar
from ..images.output import png_bytes
from .captions import training_caption
from .render import render
from .scenes import ShapesConfig, scene, scene_size

RECORD, WORLD = "shapes.json", "a shapes world"  # the config of the folder
AT_ONCE = 64  # samples that a process renders before it is asked for others

# (function, numbers) → the values of the function, in order
Map = Callable[[Callable[[int], dict[str, bytes]], Iterable[int]], Iterable[dict[str, bytes]]]


def sample_files(config: ShapesConfig, i: int, split: str) -> dict[str, bytes]:
    """The members of sample i, by extension."""
    content = scene(config, i, split)
    text = training_caption(config, content, i, split)
    png = png_bytes(Image.fromarray(render(content, scene_size(config, i, split))), compress_level=1)
    truth = {"caption": text, **dataclasses.asdict(content)}
    return {"png": png, "txt": text.encode(), "json": json.dumps(truth).encode()}


def write_shapes(config: ShapesConfig, out_dir: str, processes: int = 1) -> dict[str, dict[str, int]]:
    """Write ``out_dir/train`` and ``out_dir/val``, local or remote. Complete shards of an earlier call are kept.

    processes: how many render; the shards do not depend on it.
    Returns the numbers of ``shards``, ``samples`` and ``bytes`` of each split. Raises InputError for a folder that
    contains other files, or a shapes world with different settings.
    """
    claim_folder(config, out_dir, RECORD, WORLD)
    with _mapping(processes) as mapped:
        splits = {"train": config.train_samples, "val": config.val_samples}
        return {split: _write_split(config, out_dir, split, count, mapped) for split, count in splits.items()}


def _write_split(config: ShapesConfig, out_dir: str, split: str, count: int, mapped: Map) -> dict[str, int]:
    folder = storage.join(out_dir, split)
    storage.make_dirs(folder)
    sizes = []
    files = functools.partial(sample_files, config, split=split)
    with tqdm(total=count, desc=f"rendering {split}", unit="image", disable=None) as bar:
        for number, start in enumerate(range(0, count, config.samples_per_shard)):
            path, end = storage.join(folder, f"shapes-{split}-{number:05d}.tar"), start + config.samples_per_shard
            members = range(start, min(end, count))
            if not storage.exists(path):
                write_tar(path, _named(members, mapped(files, members), bar))
            bar.update(members.stop - bar.n)
            sizes.append(storage.size_and_tag(path)[0])
    return {"shards": len(sizes), "samples": count, "bytes": sum(sizes)}


def _named(members: Iterable[int], files: Iterable[dict], bar: tqdm) -> Iterator[tuple[str, dict]]:
    for i, content in zip(members, files, strict=True):
        yield f"{i:08d}", content
        bar.update()


@contextlib.contextmanager
def _mapping(processes: int) -> Iterator[Map]:
    """``map``, by several processes if asked for."""
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # the former starts at once
    ignore = (signal.SIGINT, signal.SIG_IGN)  # the first process ends them
    with ProcessPoolExecutor(processes, context, signal.signal, ignore) as pool:
        yield functools.partial(pool.map, chunksize=AT_ONCE)


def read_shapes_config(out_dir: str) -> ShapesConfig:
    """The config of a folder written by ``write_shapes``. InputError for any other folder."""
    return read_claim(ShapesConfig, out_dir, RECORD, WORLD)
