"""The demo's chapter on the emoji world: real pictures, of which a part is held out."""

from __future__ import annotations

from pathlib import Path

from ...worlds.emoji.font import find_font
from ...worlds.emoji.world import SPLITS
from .contract import JUDGE, Chapter, Demo, Network, Recipe, make_model

PROMPTS = "woman astronaut dark skin tone|man astronaut light skin tone|cat with heart eyes|red heart|flag: Norway"
#: Of the generators: all that an emoji may be called.
NAMES = '--caption_field ["json","captions"]'
#: The layers that read and write pixels, which are patches of another size.
PIXELS = "unet.encoder.input_blocks.0.*,unet.out_conv.*,unet.pixel_conv.*"
MERGES = 1024  # of the names' vocabulary, most of whose words are its tokens
CARD = {
    "title": "emoji",
    "license": "mit",
    "example_prompt": "woman astronaut dark skin tone",
    "description": "Draws emoji on white from their English CLDR names, such as 'woman astronaut dark skin tone' or "
    "'red heart', in the style of the color font Noto Emoji (SIL Open Font License), from which its training "
    "pictures were rendered.",
    "limits": "It draws people of all skin tones, faces and hearts, including held-out ones. Things without "
    "relatives, such as a pizza, are in one training picture of 3,462 and come out as patterns of color, as do most "
    "flags. It reads names, not sentences.",
}


def run(demo: Demo) -> Path:
    find_font()  # now, not after the other chapters
    demo.run("prepare_data.py emoji --out_dir {home}/emoji --image_size 64")
    splits = [demo.home / "emoji" / split for split in SPLITS]
    data = splits[0], splits[1]
    finer = f"--init_checkpoint {{home}}/emoji_coarse --init_exclude {PIXELS}"
    networks = {
        "coarse": Network(f"train_generator.py --preset emoji_32 {NAMES}", data, 40),
        "classifier": Network("train_classifier.py --preset emoji_64_classifier", data, 20),
        # It has seen what it finds in samples: one that has not finds held-out names in true pictures too seldom.
        JUDGE: Network("train_classifier.py --preset emoji_64_classifier", (",".join(map(str, splits)), splits[1]), 20),
        "generator": Network(f"train_generator.py --preset emoji_64 {NAMES} {finer}", data, 40, after=("coarse",)),
    }
    sampling = "--steps 20"
    scoring = "--emoji_dir {home}/emoji --evaluators emoji,retrieval"
    return make_model(demo, Recipe("emoji", networks, data[0], data[0], MERGES, PROMPTS, sampling, scoring, CARD))


EMOJI = Chapter("emoji", run, "a generator and a noised CLIP of the emoji of a color font", (100, 3))
