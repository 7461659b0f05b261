"""The demo: what it opens with, the table of its chapters, and its settings."""

from __future__ import annotations

from ...checkpoints.model_folder import trained_models
from ...config import option, settings
from .cascade import CASCADE
from .contract import Chapter, Demo
from .decoder import DECODER
from .emoji import EMOJI
from .generator import GENERATOR
from .shapes import SHAPES

#: What to ask of each bundled model. Of the emoji, those with a skin tone were not in its training data.
PROMPTS = {
    "emoji": "woman astronaut light skin tone|woman running dark skin tone|police officer medium skin tone|red heart",
    "shapes": "a large red circle in the top left|a small blue square to the right of a yellow triangle",
}
CHAPTERS: dict[str, Chapter] = {chapter.name: chapter for chapter in (GENERATOR, SHAPES, EMOJI, DECODER, CASCADE)}
_WHAT = "; ".join(
    f"{each.name}: {each.trains} ({each.minutes[0]} minutes on two cores, {each.minutes[1]} with --quick)"
    for each in CHAPTERS.values()
)


@settings
class DemoConfig:
    """Demo"""

    what: tuple[str, ...] = option(("generator",), f"chapters: {_WHAT}", choices=CHAPTERS)
    demo_dir: str = option("runs/demo", "folder for data, checkpoints and reports; an unfinished demo is continued")
    quick: bool = option(False, "the same steps with barely trained models")


def show_first_pictures(demo: Demo) -> None:
    """Sample a few pictures of each bundled model, before any training."""
    for name in trained_models():
        sampled = f"--model_path {name} --logdir {{home}}/first_pictures/{name} --prompts {{prompts}}"
        demo.run(f"sample.py {sampled}", prompts=PROMPTS[name])
