"""The command line and the Python code that sample the same images as a wish."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

from ..commands.examples import PROGRAM
from ..config import shown
from ..sampling.stage_settings import BASE
from .models import Served
from .wish import BATCH, Wish, batch_of, lora_paths


def shown_path(path: str) -> str:
    """A path for all to see: in the server's working directory as it is from there, of elsewhere the file name alone,
    because the rest says how the server's disk is arranged."""
    if os.sep not in path:
        return path
    inside = os.path.relpath(path)
    return os.path.basename(path.rstrip(os.sep)) if "://" in path or inside.startswith(os.pardir) else inside


def _loading(wish: Wish, model: Served, pictures: Sequence[str]) -> dict[str, Any]:
    """What is loaded beside the model, as it is shown."""
    files = {"upsampler_paths": model.upsamplers, "lora": lora_paths(wish, model)}
    found: dict[str, Any] = {name: [shown_path(path) for path in paths] for name, paths in files.items()}
    return found | ({"controlnet": shown_path(model.controlnet)} if "control_image" in pictures else {})


def _batches(wish: Wish, model: Served) -> list[dict[str, int]]:
    """For each stage, its batch size where that is not the usual one: on it the last digits depend."""
    batch = batch_of(wish, model)
    is_less = [wish.num_images > batch and (number == 0 or batch < BATCH) for number in range(len(model.kinds))]
    return [{"batch_size": batch} if less else {} for less in is_less]


def command_line(wish: Wish, model: Served, pictures: Sequence[str] = ()) -> str:
    """For a shell, in any folder. pictures: the names of the wish's pictures, each to be saved as NAME.png."""
    batches = _batches(wish, model)
    flags: dict[str, Any] = {"model_path": shown_path(model.path), **_loading(wish, model, pictures)}
    if "control_image" in pictures:
        flags["control_scale"] = wish.control_scale
    before = ""
    if "|" in wish.prompt:  # separates prompts
        before = f"printf %s {shlex.quote(wish.prompt)} > prompt.txt && "
        flags["prompts_file"] = "prompt.txt"
    else:
        flags["prompts"] = wish.prompt
    flags |= {"negative_prompt": wish.negative_prompt, "labels": wish.label, "seed": wish.seed}
    flags |= {"num_samples": wish.num_images, "sample_size": [wish.height, wish.width] if wish.height else None}
    flags |= {BASE.flag(name): value for name, value in wish.of_base(shown_path(model.classifier)).items()}
    for kind in model.kinds[1:]:
        flags |= {flag: getattr(wish, flag, None) for flag in kind.flags}
    flags |= {name: f"{name}.png" for name in pictures}
    flags |= {"strength": wish.strength, "variation": wish.variation}
    for kind, batch in zip(model.kinds, batches, strict=True):
        flags |= {kind.flag(name): value for name, value in batch.items()}
    words = [f"--{name}={shown(value)}" for name, value in flags.items() if value not in (None, "", [], ())]
    return before + shlex.join([PROGRAM, "sample", *words])


def python_code(wish: Wish, model: Served, pictures: Sequence[str] = ()) -> str:
    """A program whose ``images`` are the wish's. pictures: as for ``command_line``."""
    batches = _batches(wish, model)
    options: dict[str, str] = {"seed": repr(wish.seed), "num_samples": repr(wish.num_images)}
    imports, before = ["import diff_dalle"], []
    if pictures:
        imports += ["import numpy as np", "from PIL import Image"]
        kinds = {name: "L" if name == "mask" else "RGB" for name in pictures}
        before = [f'{name} = np.array(Image.open("{name}.png").convert("{kind}"))' for name, kind in kinds.items()]
    if "control_image" in pictures:
        options["control"] = f"diff_dalle.Control([control_image], scale={wish.control_scale!r})"
    arguments = "".join(f", {name}={value!r}" for name, value in _loading(wish, model, pictures).items() if value)
    if wish.negative_prompt:
        options["negative_prompt"] = repr(wish.negative_prompt)
    if wish.label is not None:
        options["labels"] = repr([wish.label])
    if wish.height:
        options["size"] = repr((wish.height, wish.width))
    base = wish.of_base(shown_path(model.classifier)) | batches[0]
    options |= {name: repr(value) for name, value in base.items()}
    upsampling = [kind.given(wish, i) | batches[i + 1] for i, kind in enumerate(model.kinds[1:])]
    if any(upsampling):
        options["upsampling"] = repr(upsampling)
    if "init_image" in pictures:
        masks = "[mask >= 128]" if "mask" in pictures else "None"
        edit = f"diff_dalle.EditConfig(strength={wish.strength!r}, variation={wish.variation!r})"
        options["edit"] = f"diff_dalle.ImageEdit([init_image], {masks}, {edit})"
    lines = [*imports, "", *before, f"pipeline = diff_dalle.load({shown_path(model.path)!r}{arguments})"]
    rest = "".join(f"    {name}={value},\n" for name, value in options.items())
    return "\n".join([*lines, f"images = pipeline.sample(\n    [{wish.prompt!r}],\n{rest})"]) + "\n"
