"""The emoji world: what is held out of training, and its shards: picture (png), name (txt), parts (json) per emoji."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from ... import storage
from ...config import InputError, load_mapping, option, settings
from ...config.bounds import MAX_SEED, MAX_SIDE
from ...data.collection import collect
from ...data.shard_table import IMAGE
from ...data.shards import ShardFiles
from ...data.spec import Required
from ...images.decode import BrokenSample, decode_image
from ...randomness import random_uniform
from ..contract import RenderedWorld, Shown
from .font import Renderer, find_font, square_of
from .names import ADULT, WHO, Emoji, names_version, recommended

SPLITS = ("train", "names", "combinations")


@settings
class EmojiConfig:
    """Emoji world"""

    image_size: int = option(32, "image width and height in pixels", least=8, most=MAX_SIDE)
    held_out: float = option(0.05, "fraction of emoji held out by name: the split names", above=0, most=0.3)
    held_out_combinations: float = option(
        0.08,
        "fraction of pairs such as woman × astronaut held out in all skin tones, while other astronauts and women "
        "remain: the split combinations",
        above=0,
        most=0.3,
    )
    samples_per_shard: int = option(1024, "captioned images per shard", least=1)
    seed: int = option(0, "random seed of what is held out", most=MAX_SEED)


def split_emoji(config: EmojiConfig, emoji: Sequence[Emoji]) -> dict[str, list[Emoji]]:
    """The emoji of each of SPLITS. Which one an emoji is in depends on its own code points and the seed only."""
    splits: dict[str, list[Emoji]] = {name: [] for name in SPLITS}
    for each in emoji:
        splits[_split(config, each)].append(each)
    return splits


def _split(config: EmojiConfig, emoji: Emoji) -> str:
    if emoji.who and emoji.what != ADULT:
        # Of each occupation and activity at most one of WHO, so that the others show what it is.
        chosen = int(_chance(config, f"combination {emoji.what}") / config.held_out_combinations)
        if chosen < len(WHO) and WHO[chosen] == emoji.who:
            return "combinations"
    return "names" if _chance(config, f"name {emoji.sequence}") < config.held_out else "train"


def _chance(config: EmojiConfig, text: str) -> float:
    """Uniform in [0, 1), a function of text and seed."""
    return float(random_uniform(config.seed, f"emoji {text}", [0])[0])


class EmojiWorld(RenderedWorld[EmojiConfig, Emoji]):
    """font: path of the font; empty = Noto's, in the usual folders. InputError without font or package."""

    name, title, config_class = "emoji", "an emoji world", EmojiConfig

    def __init__(self, config: EmojiConfig, font: str = ""):
        super().__init__(config, config.samples_per_shard)
        self.renderer, self.emoji = Renderer(find_font(font)), recommended()
        self.pictures: dict[Emoji, Image.Image] = {}

    def made_with(self) -> Mapping[str, str]:
        return {"the font": self.renderer.identity, "the package emoji": names_version()}

    def splits(self) -> Mapping[str, Sequence[Emoji]]:
        self.pictures = dict(self.renderer.distinct(tqdm(self.emoji, desc="drawing", unit="emoji", disable=None)))
        return split_emoji(self.config, list(self.pictures))

    def show(self, split: str, item: Emoji) -> Shown:
        code_points = "-".join(f"{ord(each):x}" for each in item.sequence)  # as Unicode's files write them
        picture = square_of(self.pictures[item], self.config.image_size)
        return Shown(code_points, picture, item.name, dataclasses.asdict(item))


def read_emoji(out_dir: str, split: str) -> tuple[list[Emoji], np.ndarray]:
    """All emoji of a split in order, and their pictures: uint8 [N, H, W, 3].

    Raises InputError for another folder, and for a sample that ``EmojiWorld.write`` did not write.
    """
    config: EmojiConfig = EmojiWorld.read(out_dir)
    size = config.image_size
    required = Required({IMAGE: "images", "json": "the parts of emoji"})
    found = collect([storage.join(out_dir, split)], required, ShardFiles())
    emoji, pictures = [], []
    for shard, count in enumerate(found.counts):
        for member in range(count):
            raw, where = found.fetch(shard, member), found.describe(shard, member)
            try:
                raw.check()
                emoji.append(Emoji.parse(load_mapping(raw.members["json"].decode(), where)))
                pictures.append(np.asarray(decode_image(raw.members[IMAGE], size * size)[0]))
            except (BrokenSample, ValueError) as reason:
                raise InputError(f"{where} is no sample of the emoji world: {reason}") from reason
    return emoji, np.stack(pictures)
