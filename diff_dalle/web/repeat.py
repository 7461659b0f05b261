"""The command line and the Python code that sample the same images as a wish."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from .models import Served
from .wish import BATCH, Wish, batch_of, lora_paths


def shown_path(path: str) -> str:
    """A path for all to see: in the server's working directory as it is from there, of elsewhere the file name alone,
    because the rest says how the server's disk is arranged."""
    if os.sep not in path:
        return path
    inside = os.path.relpath(path)
    return os.path.basename(path.rstrip(os.sep)) if "://" in path or inside.startswith(os.pardir) else inside


def _shown(model: Served) -> Served:
    return replace(
        model,
        path=shown_path(model.path),
        upsamplers=[shown_path(path) for path in model.upsamplers],
        classifier=shown_path(model.classifier),
        loras={name: shown_path(path) for name, path in model.loras.items()},
        controlnet=shown_path(model.controlnet),
    )


def _reduced(batch: int, model: Served) -> bool:
    """Whether the upsamplers have a smaller batch than of their own accord."""
    return model.stages > 1 and batch < BATCH


def command_line(wish: Wish, model: Served, pictures: Sequence[str] = ()) -> str:
    """For a shell. pictures: the names of the wish's pictures, each of which is to be saved as NAME.png."""
    batch, model = batch_of(wish, model), _shown(model)
    flags: dict[str, object] = {"model_path": model.path, "upsampler_paths": ",".join(model.upsamplers)}
    flags["lora"] = ",".join(lora_paths(wish, model))
    if "control_image" in pictures:
        flags |= {"controlnet": model.controlnet, "control_image": "control_image.png"}
        flags |= {"control_scale": wish.control_scale}
    before = ""
    if "|" in wish.prompt:  # separates prompts
        before = f"printf %s {shlex.quote(wish.prompt)} > prompt.txt && "
        flags["prompts_file"] = "prompt.txt"
    else:
        flags["prompts"] = wish.prompt
    flags |= {"negative_prompt": wish.negative_prompt, "labels": wish.label, "seed": wish.seed}
    flags |= {"num_samples": wish.num_images, "sample_size": f"{wish.height},{wish.width}" if wish.height else None}
    flags |= {"sampler": wish.sampler, "timestep_respacing": wish.steps, "guidance_scale": wish.guidance_scale}
    if wish.classifier_scale:
        flags |= {"classifier_path": model.classifier, "classifier_scale": wish.classifier_scale}
    flags |= {name: f"{name}.png" for name in ("init_image", "mask") if name in pictures}
    flags |= {"strength": wish.strength, "variation": wish.variation}
    if wish.num_images > batch:  # on which the last digits depend
        flags |= {"batch_size": batch, "upsampler_batch_size": batch if _reduced(batch, model) else None}
    words = [f"--{name}={value}" for name, value in flags.items() if value not in (None, "")]
    return before + shlex.join(["python", "scripts/sample.py", *words])


def python_code(wish: Wish, model: Served, pictures: Sequence[str] = ()) -> str:
    """A program whose ``images`` are the wish's. pictures: as for ``command_line``."""
    batch, model = batch_of(wish, model), _shown(model)
    loading: dict[str, object] = {"upsampler_paths": model.upsamplers, "lora": lora_paths(wish, model)}
    options: dict[str, str] = {"seed": repr(wish.seed), "num_samples": repr(wish.num_images)}
    imports, before = ["import diff_dalle"], []
    if pictures:
        imports += ["import numpy as np", "from PIL import Image"]
        kinds = {name: "L" if name == "mask" else "RGB" for name in pictures}
        before = [f'{name} = np.array(Image.open("{name}.png").convert("{kind}"))' for name, kind in kinds.items()]
    if "control_image" in pictures:
        loading["controlnet"] = model.controlnet
        options["control"] = f"diff_dalle.Control([control_image], scale={wish.control_scale!r})"
    arguments = "".join(f", {name}={value!r}" for name, value in loading.items() if value)
    if wish.negative_prompt:
        options["negative_prompt"] = repr(wish.negative_prompt)
    if wish.label is not None:
        options["labels"] = repr([wish.label])
    if wish.height:
        options["size"] = repr((wish.height, wish.width))
    steps = None if wish.steps is None else str(wish.steps)
    changed = {"sampler": wish.sampler, "timestep_respacing": steps}
    if words := ", ".join(f"{name}={value!r}" for name, value in changed.items() if value is not None):
        options["sampler"] = f"defaults.sampler.changed({words})"
    if wish.guidance_scale is not None:
        options["guidance"] = f"replace(defaults.guidance, guidance_scale={wish.guidance_scale!r})"
    if wish.classifier_scale:
        options |= {"classifier": repr(model.classifier), "classifier_scale": repr(wish.classifier_scale)}
    if "init_image" in pictures:
        masks = "[mask >= 128]" if "mask" in pictures else "None"
        edit = f"diff_dalle.EditConfig(strength={wish.strength!r}, variation={wish.variation!r})"
        options["edit"] = f"diff_dalle.ImageEdit([init_image], {masks}, {edit})"
    if wish.num_images > batch:
        options["batch_size"] = repr(batch)
        if _reduced(batch, model):
            options["upsampling"] = f"[replace(each, batch_size={batch}) for each in pipeline.upsampler_defaults]"
    if any("replace(" in value for value in options.values()):
        imports.insert(0, "from dataclasses import replace\n")
    lines = [*imports, "", *before, f"pipeline = diff_dalle.load({model.path!r}{arguments})"]
    if "sampler" in options or "guidance" in options:
        lines.append("defaults = pipeline.stages[0].defaults")
    rest = "".join(f"    {name}={value},\n" for name, value in options.items())
    return "\n".join([*lines, f"images = pipeline.sample(\n    [{wish.prompt!r}],\n{rest})"]) + "\n"
