"""The shapes world as webdataset shards: image (png), caption (txt) and scene (json) per sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator

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


def sample_files(config: ShapesConfig, i: int, split: str) -> dict[str, bytes]:
    """The members of sample i, by extension."""
    content = scene(config, i, split)
    text = training_caption(config, content, i, split)
    png = png_bytes(Image.fromarray(render(content, scene_size(config, i, split))), compress_level=1)
    truth = {"caption": text, **dataclasses.asdict(content)}
    return {"png": png, "txt": text.encode(), "json": json.dumps(truth).encode()}


def write_shapes(config: ShapesConfig, out_dir: str) -> dict[str, dict[str, int]]:
    """Write ``out_dir/train`` and ``out_dir/val``, local or remote. Complete shards of an earlier call are kept.

    Returns the numbers of ``shards``, ``samples`` and ``bytes`` of each split. Raises InputError for a folder that
    contains other files, or a shapes world with different settings.
    """
    claim_folder(config, out_dir, RECORD, WORLD)
    report = {}
    for split, count in (("train", config.train_samples), ("val", config.val_samples)):
        folder = storage.join(out_dir, split)
        storage.make_dirs(folder)
        sizes = []
        with tqdm(total=count, desc=f"rendering {split}", unit="image", disable=None) as bar:
            for number, start in enumerate(range(0, count, config.samples_per_shard)):
                path, end = storage.join(folder, f"shapes-{split}-{number:05d}.tar"), start + config.samples_per_shard
                if not storage.exists(path):
                    write_tar(path, _samples(config, split, range(start, min(end, count)), bar))
                bar.update(min(end, count) - bar.n)
                sizes.append(storage.size_and_tag(path)[0])
        report[split] = {"shards": len(sizes), "samples": count, "bytes": sum(sizes)}
    return report


def _samples(config: ShapesConfig, split: str, members: Iterable[int], bar: tqdm) -> Iterator[tuple[str, dict]]:
    for i in members:
        yield f"{i:08d}", sample_files(config, i, split)
        bar.update()


def read_shapes_config(out_dir: str) -> ShapesConfig:
    """The config of a folder written by ``write_shapes``. InputError for any other folder."""
    return read_claim(ShapesConfig, out_dir, RECORD, WORLD)
