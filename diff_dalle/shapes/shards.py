"""The shapes world as webdataset shards: image (png), caption (txt) and scene (json) per sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from PIL import Image

from ..data.made_folder import MadeFolder
from ..images.output import png_bytes
from .captions import training_caption
from .render import render
from .scenes import ShapesConfig, scene, scene_size

FOLDER = MadeFolder("shapes", "a shapes world", ShapesConfig)
read_shapes_config = FOLDER.read
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
    FOLDER.claim(config, out_dir)
    report = {}
    with _mapping(processes) as mapped:
        for split, count in {"train": config.train_samples, "val": config.val_samples}.items():

            def files(part: Sequence[int], split=split) -> Iterator[tuple[str, dict[str, bytes]]]:
                found = mapped(functools.partial(sample_files, config, split=split), part)
                return zip([f"{i:08d}" for i in part], found, strict=True)

            report[split] = FOLDER.write_split(out_dir, split, range(count), config.samples_per_shard, files)
    return report


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
