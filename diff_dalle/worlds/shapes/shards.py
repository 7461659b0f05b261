"""The shapes world as webdataset shards: image (png), caption (txt) and scene (json) per sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from PIL import Image

from ..contract import RenderedWorld, Shown
from .captions import training_caption
from .render import render
from .scenes import ShapesConfig, scene, scene_size


class ShapesWorld(RenderedWorld[ShapesConfig, int]):
    """Samples are numbered; each is a function of (config, number, split)."""

    name, title, config_class = "shapes", "a shapes world", ShapesConfig
    compression = 1

    def __init__(self, config: ShapesConfig):
        super().__init__(config, config.samples_per_shard)

    def splits(self) -> Mapping[str, range]:
        config: ShapesConfig = self.config
        return {"train": range(config.train_samples), "val": range(config.val_samples)}

    def show(self, split: str, item: int) -> Shown:
        content = scene(self.config, item, split)
        caption = training_caption(self.config, content, item, split)
        picture = Image.fromarray(render(content, scene_size(self.config, item, split)))
        return Shown(f"{item:08d}", picture, caption, {"caption": caption, **dataclasses.asdict(content)})


read_shapes_config = ShapesWorld.read


def write_shapes(config: ShapesConfig, out_dir: str, processes: int = 1) -> dict[str, dict[str, int]]:
    """``ShapesWorld.write`` of the world with these settings: ``out_dir/train`` and ``out_dir/val``."""
    return ShapesWorld(config).write(out_dir, processes)
