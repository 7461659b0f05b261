"""What the page's controls say as a wish, a wish as what they say, and the history's entries."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import Fault, FlagText, InputError, checked, from_dict, shown
from ..sampling.stage_settings import BASE, KINDS, ONLY
from .api import Service
from .gradio_setup import keep
from .models import Served
from .pictures import PictureFiles, Pictures, png
from .wish import LEAVES, Wish

EDITS = {
    "Inpaint what is drawn": "mask",
    "Image to image": "strength",
    "Variations": "variation",
}
EMPTY = "is empty: enter a number"
TEXTS = ("prompt", "negative_prompt")  # which may be empty
# Settings of a wish that are controls of the page: those with one of their own, and the others of each kind of stage.
SAME = (
    *("model", *TEXTS, "label", "seed", "num_images", "sampler", "steps", "guidance_scale"),
    *("classifier_scale", "control_scale"),
)
MORE = {kind: [flag for flag in kind.flags if flag in LEAVES and flag not in SAME] for kind in KINDS}
# What a model must have for a control to be of use.
_NEEDED = {
    **dict.fromkeys(TEXTS, "has_text"),
    **dict.fromkeys(("loras", "lora_factor"), "loras"),
    "label": "num_classes",
    "guidance_scale": "guidable",
    "classifier_scale": "classifier",
}
CHANGING = (*_NEEDED, *(flag for flag in MORE[BASE] if flag in ONLY))  # controls that not every model has
LONGEST = 200_000  # characters of a picture in the JSON that the page shows; a longer text would make it slow
LABELS = {
    "num_images": "Images",
    "label": "Class",
    "guidance_scale": "Guidance scale (1 = off)",
    "classifier_scale": "Classifier guidance (0 = off)",
    "loras": "LoRAs",
    "lora_factor": "Strength of the LoRAs",
    "control_image": "Picture for the ControlNet",
    "control_scale": "Strength of the control",
    "init_image": "Picture to edit",
    "mask": "The drawing",
    **dict.fromkeys(("amount", "strength", "variation"), "Strength of image to image or of variations"),
}


def is_used(name: str, model: Served) -> bool:
    """Whether a control has an effect on what a model makes."""
    if name in MORE[BASE]:
        return name not in model.has_no
    return bool(getattr(model, _NEEDED.get(name, "name")))


def label_of(name: str) -> str:
    """What the page calls a setting or a control."""
    return LABELS.get(name) or name.replace("_", " ").capitalize()


def read_wish(values: dict[str, Any], model: Served) -> tuple[Wish, PictureFiles]:
    """What the page's controls say, without those that the model has no use for. Raises InputError.

    values: by the controls' names, as the browser sends them, which may be anything.
    """
    kind = EDITS.get(str(values["edit"]), "")
    files = PictureFiles.of(values["control_image"] if model.controlnet else None, values["init_image"], kind == "mask")
    asked = {name: values[name] for name in SAME if is_used(name, model)} | {"model": model.name}
    asked |= {name: asked[name] or "" for name in TEXTS if name in asked}
    if "control_image" not in files.files:
        del asked["control_scale"]
    if model.loras and isinstance(values["loras"], list):
        if values["lora_factor"] is None:
            raise InputError(Fault("lora_factor", EMPTY))
        asked["lora"] = [f"{name}:{values['lora_factor']}" for name in values["loras"]]
    for flag in (flag for kind in set(model.kinds) for flag in MORE[kind]):
        text = values.get(flag)
        if isinstance(text, str) and text.strip() and is_used(flag, model):
            asked[flag] = checked(LEAVES[flag], FlagText(text.strip()), flag)
    if "init_image" in files.files and kind != "mask":
        if not kind:
            raise InputError(f"edit must be one of {', '.join(EDITS)}")
        asked[kind] = values["amount"]
    InputError.check(Fault(name, EMPTY) for name, value in asked.items() if value is None)
    texts = {name: value.strip() for name, value in asked.items() if isinstance(value, str)}
    return from_dict(Wish, asked | texts), files


def values_of(wish: dict[str, Any], has_mask: bool = False) -> dict[str, Any]:
    """What the page's controls say for a wish, as a dict: the inverse of ``read_wish``, without its pictures."""
    values = {name: wish[name] for name in SAME if wish[name] is not None}
    values |= {flag: "" if wish[flag] in (None, []) else shown(wish[flag]) for flags in MORE.values() for flag in flags}
    loras = [text.rpartition(":") for text in wish["lora"]]
    values["loras"] = [name for name, _, _ in loras]
    if loras:
        values["lora_factor"] = float(loras[0][2])
    for label, kind in EDITS.items():
        if kind == "mask" and has_mask:
            values["edit"] = label
        elif wish.get(kind) is not None:
            values |= {"edit": label, "amount": wish[kind]}
    return values


def record(service: Service, wish: Wish, pictures: Pictures, images: np.ndarray) -> list[dict]:
    """An entry of the history for each image."""
    wishes = [replace(wish, seed=wish.seed + i, num_images=1) for i in range(len(images))]
    return [{"image": image, **repeated(service, one, pictures)} for one, image in zip(wishes, images, strict=True)]


def repeated(service: Service, wish: Wish, pictures: Pictures) -> dict[str, Any]:
    """What samples the images of a wish again, with the pictures that this reads."""
    return {**service.repeat(wish, pictures), "pictures": pictures}


def request_text(wish: dict[str, Any], pictures: Pictures, longest: int | None = None) -> str:
    """The JSON that asks the API for a wish. longest: characters of a picture, above which a note takes its place."""
    values = {name: value for name, value in wish.items() if value not in (None, [])}
    values |= {"format": "json"} if wish["num_images"] > 1 else {}
    for name, text in pictures.texts().items():
        long = longest is not None and len(text) > longest
        values[name] = f"a text of {len(text):,} characters, which request.json has" if long else text
    return json.dumps(values, indent=1)


def downloads(wish: dict[str, Any], pictures: Pictures) -> list[str]:
    """Files that ``repeated`` needs, if there are pictures: these, and the JSON that holds them."""
    files = {f"{name}.png": png(picture) for name, picture in pictures.given().items()}
    return keep({**files, "request.json": request_text(wish, pictures).encode()}) if files else []
