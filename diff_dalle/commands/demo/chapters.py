"""The demo: the table of its chapters, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import lookup, option
from .cascade import CASCADE
from .contract import Chapter
from .decoder import DECODER
from .emoji import EMOJI
from .generator import GENERATOR
from .shapes import SHAPES

CHAPTERS: dict[str, Chapter] = {chapter.name: chapter for chapter in (GENERATOR, SHAPES, EMOJI, DECODER, CASCADE)}
_WHAT = "; ".join(
    f"{each.name}: {each.trains} ({each.minutes[0]} minutes on two cores, {each.minutes[1]} with --quick)"
    for each in CHAPTERS.values()
)


@dataclass(frozen=True)
class DemoConfig:
    """Demo"""

    what: tuple[str, ...] = option(("generator",), f"chapters: {_WHAT}")
    demo_dir: str = option("runs/demo", "folder for data, checkpoints and reports; an unfinished demo is continued")
    quick: bool = option(False, "the same steps with barely trained models")

    def __post_init__(self):
        for name in self.what:
            lookup(CHAPTERS, name, "chapter")
