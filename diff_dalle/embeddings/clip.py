"""The CLIPs that embeddings can be made with, by maker.

To add one: a subclass of ``Clip`` and a function that loads it, in a file of this folder, and a line in ``CLIPS``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import lookup
from ..distributed.devices import use_device
from ..errors import InputError
from ..models.precision import resolve_precision
from .contract import Clip
from .diff_dalle_clip import load_diff_dalle_clip
from .open_clip_models import load_open_clip, load_openai_clip

__all__ = ["CLIPS", "Clip", "load_clip"]

# Functions of (model, device, precision, outputs).
CLIPS: dict[str, Callable[[str, torch.device, str, str], Clip]] = {
    "diff_dalle": load_diff_dalle_clip,  # model: a checkpoint of train_classifier.py
    "open_clip": load_open_clip,  # ViT-B-32/laion2b_s34b_b79k
    "openai": load_openai_clip,  # ViT-L/14
}


def load_clip(
    make: str, model: str, device: str | torch.device = "auto", precision: str = "auto", outputs: str = "unit"
) -> Clip:
    """A frozen CLIP. make: a key of ``CLIPS``; model: what its maker calls it; outputs: see ``Clip``.

    Raises InputError for an unknown one, a missing package, and weights that cannot be found.
    """
    load, resolved = lookup(CLIPS, make, "clip.make"), use_device(device)
    if not model:
        raise InputError("the CLIP has no model: name a checkpoint of train_classifier.py, or a model of open_clip")
    return load(model, resolved, resolve_precision(precision, resolved), outputs)
