"""The size of the pictures that a CLIP sees, as far as it can be known without loading the CLIP."""

from __future__ import annotations

import contextlib
import json
import os
from importlib.util import find_spec

from .. import storage
from ..checkpoints.loading import open_network

# Width and height in pixels, of OpenAI's models by their names.
_OPENAI = {"ViT-L/14@336px": 336, "RN50x4": 288, "RN50x16": 384, "RN50x64": 448}
_OPENAI_OTHERS = 224


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
