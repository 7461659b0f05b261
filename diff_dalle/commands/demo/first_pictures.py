"""What the demo opens with: pictures by the models that come along, before any training."""

from __future__ import annotations

from ...checkpoints.model_folder import trained_models
from .contract import Demo

#: What to ask of each model. Of the emoji, those with a skin tone were not in its training data.
PROMPTS = {
    "emoji": "woman astronaut light skin tone|woman running dark skin tone|police officer medium skin tone|red heart",
    "shapes": "a large red circle in the top left|a small blue square to the right of a yellow triangle",
}


def show_first_pictures(demo: Demo) -> None:
    """Sample a few pictures of each model into ``first_pictures`` of the demo's folder."""
    for name in trained_models():
        demo.run(
            "sample.py",
            "--model_path",
            name,
            "--logdir",
            demo.home / "first_pictures" / name,
            "--prompts",
            PROMPTS[name],
        )
