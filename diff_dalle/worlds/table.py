"""The worlds by name."""

from __future__ import annotations

from ..config import Registry
from .contract import RenderedWorld
from .emoji.world import EmojiWorld
from .shapes.shards import ShapesWorld

WORLDS: Registry[type[RenderedWorld]] = Registry("diff_dalle.worlds", {"shapes": ShapesWorld, "emoji": EmojiWorld})
