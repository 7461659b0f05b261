"""The CLIPs that embeddings can be made with, by maker, those of ours, and what is known of one before it is loaded.

To add one: a subclass of ``Clip`` and a function that loads it, in a file of this folder, and a line in ``CLIPS``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn

from .. import storage
from ..checkpoints.loading import open_network
from ..config import InputError, entries, lookup, to_dict
from ..distributed.devices import use_device
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..models.precision import resolve_precision
from ..text.tokenizer import Tokenizer
from .contract import Clip, weights_digest
from .open_clip_models import load_open_clip, load_openai_clip

# Width and height in pixels, of OpenAI's models by their names.
_OPENAI = {"ViT-L/14@336px": 336, "RN50x4": 288, "RN50x16": 384, "RN50x64": 448}
_OPENAI_OTHERS = 224


class DiffDalleClip(Clip):
    """Pictures are seen at t = 0: as good as clean ones for a network that was trained on noised images too."""

    def image_features(self, images: Tensor) -> Tensor:
        t = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        return cast("NoisedClip", self.network).encode_image(images, t)

    def text_features(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return cast("NoisedClip", self.network).encode_tokens(tokens, mask)

    @property
    def tokenizer(self) -> Tokenizer:
        return cast(Tokenizer, self.tokenize)

    def token_table(self) -> tuple[nn.Module, str]:
        return cast("NoisedClip", self.network).text_tower, "token_emb"


def load_diff_dalle_clip(model: str, device: torch.device, precision: str, outputs: str = "unit") -> DiffDalleClip:
    """model: a model or EMA checkpoint. Raises InputError as ``open_network`` does, and for other outputs than unit."""
    if outputs != "unit":
        raise InputError(f"the outputs of the CLIP {model} are {outputs!r}, but those of a CLIP of ours must be 'unit'")
    saved = open_network(model, "classifier")
    assert saved.tokenizer is not None  # classifiers always read text
    network, config = saved.load(device), saved.settings.model
    defaults = to_dict(NoisedClipConfig())  # left out, so that a setting of a later version changes no identity
    changed = {
        name: value
        for name, free, value in entries(NoisedClipConfig, to_dict(config))
        if not free and value != defaults[name]
    }
    identity = weights_digest(network.state_dict(), f"{saved.tokenizer.identity} {sorted(changed.items())}")
    return DiffDalleClip(
        network,
        f"diff_dalle {model}",
        f"diff_dalle:{identity}",
        config.image_size,
        saved.tokenizer,
        config.text_length,
        precision,
    )


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


def known_image_size(make: str, model: str) -> int:
    """Width and height in pixels of the pictures that the CLIP ``load_clip(make, model)`` sees; 0 = not known before it
    is loaded. Raises InputError for a local checkpoint that holds no CLIP."""
    if make == "openai":
        return _OPENAI.get(model.partition(":")[0], _OPENAI_OTHERS)
    if make == "open_clip":
        return _of_open_clip(model.partition(":")[0])
    return open_network(model, "classifier").settings.model.image_size if is_local_file(model) else 0


def is_local_file(path: str) -> bool:
    """Whether it is one, and neither remote nor a command."""
    return not storage.is_remote(path) and os.path.isfile(storage.local_path(path))


def _of_open_clip(name: str) -> int:
    """From the package's own list of models, without importing it: it imports torchvision. name: MODEL or MODEL/TAG."""
    with contextlib.suppress(ImportError, ValueError, OSError, KeyError, TypeError):
        spec = find_spec("open_clip")
        folder = os.path.dirname(spec.origin or "") if spec else ""
        known = set(os.listdir(os.path.join(folder, "model_configs"))) if folder else set()
        for model in (name, name.rpartition("/")[0]):
            if (file := f"{model.replace('/', '-')}.json") in known:
                with open(os.path.join(folder, "model_configs", file), encoding="utf-8") as source:
                    size = json.load(source)["vision_cfg"]["image_size"]
                return int(max(size) if isinstance(size, list) else size)
    return 0
