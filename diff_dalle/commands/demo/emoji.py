"""The demo's chapter on the emoji world: real pictures, of which a part is held out."""

from __future__ import annotations

from pathlib import Path

from ...worlds.emoji.font import find_font
from ...worlds.emoji.world import SPLITS
from .contract import Chapter, Demo
from .networks import JUDGE, Network, Recipe, make_model

PROMPTS = "woman astronaut dark skin tone|man astronaut light skin tone|cat with heart eyes|red heart|flag: Norway"
#: Of the generator: three times the preset's steps, and all that an emoji may be called.
LONGER = (
    'train_generator.py --preset emoji_32 --lr_anneal_steps 9100 --ema_rate 0.999 --caption_field ["json","captions"]'
)
#: Of the judge, of the size of upsampled images.
LARGER = (
    "train_classifier.py --preset emoji_32_classifier --image_size 64 --classifier_patch_size 4 "
    "--classifier_channel_mult 2,2 --iterations 400"
)
MERGES = 1024  # of the names' vocabulary, most of whose words are its tokens
CARD = {
    "title": "emoji",
    "license": "mit",
    "example_prompt": "woman astronaut dark skin tone",
    "description": "Draws emoji on white by their English CLDR names, such as 'woman astronaut dark skin tone' or "
    "'red heart', in the style of the color font Noto Emoji (SIL Open Font License), from which its training "
    "pictures were rendered.",
    "limits": "It draws people of all skin tones, faces and hearts, also those held out from training. Things without "
    "relatives, such as a pizza, are in one training picture of 3,462 and come out as patterns of color, as do most "
    "flags. It reads names, not sentences.",
}


def run(demo: Demo) -> Path:
    find_font()  # now, not after the other chapters
    demo.run("prepare_data.py emoji --out_dir {home}/emoji --image_size 64")
    splits = [demo.home / "emoji" / split for split in SPLITS]
    data = splits[0], splits[1]
    networks = {
        "classifier": Network("train_classifier.py --preset emoji_32_classifier", data, 20),
        "upsampler": Network("train_generator.py --preset emoji_64_upsampler", data, 40, after=("classifier",)),
        # It has seen what it finds in samples: one that has not finds held-out names in true pictures too seldom.
        JUDGE: Network(LARGER, (",".join(map(str, splits)), splits[1]), 20, after=("upsampler",)),
        "generator": Network(LONGER, data, 40, 9000),
    }
    sampling = "--steps 20 --upsampler_steps 4"
    scoring = "--emoji_dir {home}/emoji --evaluators emoji,retrieval,upsampling"
    return make_model(demo, Recipe("emoji", networks, data[0], data[0], MERGES, PROMPTS, sampling, scoring, CARD))


EMOJI = Chapter("emoji", run, "a generator, a noised CLIP and an upsampler of the emoji of a color font", (100, 3))
