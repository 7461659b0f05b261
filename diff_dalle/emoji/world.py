"""The emoji world's settings, and which emoji are held out of training."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import option, settings
from ..randomness import random_uniform
from .names import ADULT, WHO, Emoji

SPLITS = ("train", "names", "combinations")


@settings
class EmojiConfig:
    """Emoji world"""

    image_size: int = option(32, "image width and height in pixels", least=8)
    held_out: float = option(0.05, "fraction of emoji held out by name: the split names", above=0, most=0.3)
    held_out_combinations: float = option(
        0.08,
        "fraction of pairs such as woman × astronaut held out in all skin tones, while other astronauts and women "
        "remain: the split combinations",
        above=0,
        most=0.3,
    )
    samples_per_shard: int = option(1024, "captioned images per shard", least=1)
    seed: int = option(0, "random seed of what is held out")


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
