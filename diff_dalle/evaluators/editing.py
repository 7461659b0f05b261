"""Image editing in the shapes world: inpainting, image to image and variations of real renders, scored and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ..config import InputError, named
from ..diffusion.editing import EditConfig
from ..diffusion.sampling import SamplerConfig
from ..evaluation.fidelity import PSNR_CAP, psnr_uint8
from ..evaluation.report import Figure, Report, Section
from ..images.grid import image_grid
from ..sampling.request import ImageEdit
from ..worlds.shapes.prompts import ShapePrompt, shape_prompts
from ..worlds.shapes.scenes import SIZES, SceneObject, ShapesConfig
from ..worlds.shapes.shape_eval import evaluate_shapes
from .context import Context, GuidanceSetting, renders_of

GRID_ROWS = 6  # examples in each grid
STRENGTHS = (0.3, 0.5, 0.7, 0.9)
VARIATIONS = (0.0, 0.3, 1.0)
MARGIN = 1.4  # half width of the mask of an object, in units of the object's half width
INVERSION_STEPS = 100  # DDIM inversion reconstructs an image only in small steps, and without guidance


@dataclass(frozen=True)
class Replacement:
    """A scene, and a prompt for another object of the same size and position."""

    before: ShapePrompt
    after: ShapePrompt


def replacements(count: int, seed: int, config: ShapesConfig, setting: str, remedy: str) -> list[Replacement]:
    """``count`` replacements, or fewer if too few objects of the world share size and position. InputError for fewer
    than 2. setting: whose value ``count`` is; remedy: clause beside raising it."""
    prompts = shape_prompts(8 * count, seed, config, ("attributes",))
    found: list[Replacement] = []
    used: set[int] = set()
    for i, before in enumerate(prompts):
        for j, after in enumerate(prompts):
            a, b = before.scene.objects[0], after.scene.objects[0]
            compatible = (a.size, a.position) == (b.size, b.position)
            if compatible and a.color != b.color and a.shape != b.shape and not {i, j} & used:
                found.append(Replacement(before, after))
                used |= {i, j}
    if len(found[:count]) < 2:
        raise InputError(
            f"this world of shapes gives {len(found)} replacements of an object by another, but 2 are required: raise "
            f"{named(setting)}, or {remedy} for a world of one shape or color"
        )
    return found[:count]


def editing(context: Context) -> Report:
    """Scores of inpainting, image to image and variations, of as many pictures each as the setting edits says."""
    settings, signal = context.settings, context.pipeline.stages[-1].signal
    chosen = replacements(settings.edits, settings.seed, context.shapes, "edits", "leave it at 0")
    renders = renders_of([replacement.before for replacement in chosen], context.pipeline.image_size)
    real = signal.to_pixels(signal.from_pixels(renders))  # gray for a grayscale generator
    scores, sections = dict[str, Any](), []
    for evaluate in (_inpainting, _image_to_image, _variations):
        values, section = evaluate(context, chosen, real)
        scores |= values
        sections.append(section)
    return Report(sections, {"editing": scores})


def object_mask(item: SceneObject, image_size: int) -> np.ndarray:
    """A square around an object: bool [image_size, image_size]."""
    center = (np.arange(image_size) + 0.5) / image_size
    reach = MARGIN * SIZES[item.size]
    return (abs(center - item.y) <= reach)[:, None] & (abs(center - item.x) <= reach)


def _inpainting(context: Context, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    masks = [object_mask(replacement.before.scene.objects[0], real.shape[1]) for replacement in chosen]
    after = [replacement.after for replacement in chosen]
    images = context.edit([prompt.text for prompt in after], ImageEdit(list(real), masks), context.default_guidance)
    row = evaluate_shapes(images, after)["all attributes"]
    outside = ~np.stack(masks)
    unchanged = bool((images[outside] == real[outside]).all())
    masked = np.where(np.stack(masks)[..., None], np.uint8(128), real)
    text = (
        f"A square (gray) is inpainted under a new caption. ShapeEval finds {row.score:.2f} ({row.low:.2f} – "
        f"{row.high:.2f}) of {row.n} images correct. The pixels outside the square "
        f"{'equal' if unchanged else 'DIFFER FROM'} those of the original."
    )
    scores = {name: getattr(row, name) for name in ("score", "low", "high", "n")}
    section = _section("Inpainting", text, after, {"original": real, "masked": masked, "inpainted": images})
    return {"inpainting": {**scores, "unmasked_identical": unchanged}}, section


def _image_to_image(context: Context, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    after = [replacement.after for replacement in chosen]
    columns = {}
    for strength in STRENGTHS:
        edit = ImageEdit(list(real), config=EditConfig(strength=strength))
        images = context.edit([prompt.text for prompt in after], edit, context.default_guidance)
        columns[f"strength {strength:g}"] = images
    scores = {name: evaluate_shapes(images, after)["all attributes"].score for name, images in columns.items()}
    listed = ", ".join(f"{score:.2f} at {name}" for name, score in scores.items())
    text = (
        f"The original is noised to a fraction of the process (strength) and denoised under a new caption. Correct by "
        f"ShapeEval: {listed} ({len(chosen)} images). Low strength preserves the image, high strength follows the "
        "caption."
    )
    return {"image to image": scores}, _section("Image to image", text, after, {"original": real, **columns})


def _variations(context: Context, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    before = [replacement.before for replacement in chosen]
    steps = min(INVERSION_STEPS, context.base.stages[0].diffusion.diffusion_steps)
    sampler, unguided, columns = SamplerConfig("ddim", steps), GuidanceSetting(1.0, 0.0), {}
    for variation in VARIATIONS:
        edit = ImageEdit(list(real), config=EditConfig(variation=variation))
        images = context.edit([prompt.text for prompt in before], edit, unguided, sampler)
        columns[f"variation {variation:g}"] = images
    scores = {name: float(np.minimum(psnr_uint8(images, real), PSNR_CAP).mean()) for name, images in columns.items()}
    listed = ", ".join(f"{value:.1f} dB at {name}" for name, value in scores.items())
    text = (
        f"The original is inverted to noise by DDIM; the noise is rotated toward fresh noise by a fraction of 90° "
        f"(variation) and denoised under the same caption. PSNR to the original: {listed}."
    )
    return {"variation": scores}, _section("Variations", text, before, {"original": real, **columns})


def _section(title: str, text: str, prompts: Sequence[ShapePrompt], columns: Mapping[str, np.ndarray]) -> Section:
    """A row per example, a column per setting; the caption is below the last column."""
    last = list(columns)[-1]
    grid = example_grid(columns, lambda i, name: f"[{name}] {prompts[i].text}" if name == last else f"[{name}]")
    return Section(title, [text, Figure(f"{title.lower().replace(' ', '_')}.png", grid)])


def example_grid(columns: Mapping[str, np.ndarray], label: Callable[[int, str], str]) -> Image.Image:
    """A row for each of the first examples. columns: uint8 [N, H, W, 3]; label: of example i in a column."""
    cells = np.stack([images[:GRID_ROWS] for images in columns.values()], 1)
    labels = [label(i, name) for i in range(len(cells)) for name in columns]
    return image_grid(cells.reshape(-1, *cells.shape[2:]), labels, len(columns))
