"""The emoji world as webdataset shards, written and read: picture (png), name (txt) and parts (json) per emoji."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from .. import storage
from ..config import load_mapping
from ..data.collection import collect
from ..data.made_folder import MadeFolder
from ..data.shard_table import IMAGE, Required
from ..data.shards import ShardFiles
from ..errors import InputError
from ..images.decode import BrokenSample, decode_image
from ..images.output import png_bytes
from .font import Renderer, find_font, square_of
from .names import Emoji, names_version, recommended
from .world import EmojiConfig, split_emoji

FOLDER = MadeFolder("emoji", "an emoji world", EmojiConfig)
read_emoji_config = FOLDER.read


def write_emoji(config: EmojiConfig, font: str, out_dir: str) -> dict[str, dict[str, int]]:
    """Write a folder of shards for each of SPLITS, local or remote. Complete shards of an earlier call are kept.

    font: path of the font; empty = Noto's, in the usual folders.

    Returns the numbers of ``shards``, ``samples`` and ``bytes`` of each split. Raises InputError without font or
    package, and for a folder that contains other files, or an emoji world with different settings, of another font or
    with the names of another version.
    """
    renderer, emoji = Renderer(find_font(font)), recommended()
    FOLDER.claim(config, out_dir, {"the font": renderer.identity, "the package emoji": names_version()})
    bar = tqdm(emoji, desc="drawing", unit="emoji", disable=None)
    pictures = {each.sequence: picture for each, picture in renderer.distinct(bar)}

    def files(part: Sequence[Emoji]) -> Iterator[tuple[str, dict[str, bytes]]]:
        for each in part:
            yield _key(each), _files(config, each, pictures[each.sequence])

    splits = split_emoji(config, [each for each in emoji if each.sequence in pictures])
    return {
        name: FOLDER.write_split(out_dir, name, own, config.samples_per_shard, files) for name, own in splits.items()
    }


def _key(emoji: Emoji) -> str:
    """Its code points, as Unicode's files write them."""
    return "-".join(f"{ord(each):x}" for each in emoji.sequence)


def _files(config: EmojiConfig, emoji: Emoji, picture: Image.Image) -> dict[str, bytes]:
    """The members of a sample, by extension."""
    png = png_bytes(square_of(picture, config.image_size))
    return {
        "png": png,
        "txt": emoji.name.encode(),
        "json": json.dumps(dataclasses.asdict(emoji), ensure_ascii=False).encode(),
    }


def read_emoji(out_dir: str, split: str) -> tuple[list[Emoji], np.ndarray]:
    """All emoji of a split in order, and their pictures: uint8 [N, H, W, 3].

    Raises InputError for another folder, and for a sample that ``write_emoji`` did not write.
    """
    size = read_emoji_config(out_dir).image_size
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
