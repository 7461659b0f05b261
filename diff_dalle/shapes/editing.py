"""Image editing in the shapes world: inpainting, image to image and variations of real renders, scored and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from ..diffusion.editing import EditConfig
from ..errors import InputError, named
from ..evaluation.fidelity import PSNR_CAP, psnr_uint8
from ..evaluation.report import Section
from ..images.grid import image_grid
from ..images.signal import Signal
from ..sampling.request import ImageEdit
from .prompts import ShapePrompt, shape_prompts
from .render import render
from .scenes import SIZES, SceneObject, ShapesConfig
from .shape_eval import evaluate_shapes

GRID_ROWS = 6  # examples in each grid
STRENGTHS = (0.3, 0.5, 0.7, 0.9)
VARIATIONS = (0.0, 0.3, 1.0)
MARGIN = 1.4  # half width of the mask of an object, in units of the object's half width

# (prompts, edit) → uint8 [N, H, W, 3]
Sample = Callable[[Sequence[str], ImageEdit], np.ndarray]


@dataclass(frozen=True)
class Replacement:
    """A scene, and a prompt for another object of the same size and position."""

    before: ShapePrompt
    after: ShapePrompt


def replacements(count: int, seed: int, config: ShapesConfig) -> list[Replacement]:
    """``count`` replacements, or fewer if too few objects of the world share size and position."""
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
    return found[:count]


def evaluate_editing(
    sample: Sample, signal: Signal, image_size: int, count: int, seed: int, config: ShapesConfig
) -> tuple[dict, list[Section]]:
    """Scores and report sections of inpainting, image to image and variations.

    sample: (prompts, edit) → uint8 [N, image_size, image_size, 3]; signal: what it generates; count: images per kind
    of edit. Raises InputError when the world has fewer than 2 objects to replace.
    """
    chosen = replacements(count, seed, config)
    if len(chosen) < 2:
        raise InputError(
            f"this world of shapes gives {len(chosen)} replacements of an object by another, but editing requires 2: "
            f"raise {named('edits')}, or leave it at 0 for a world of one shape or color"
        )
    renders = np.stack([render(replacement.before.scene, image_size) for replacement in chosen])
    real = signal.to_pixels(signal.from_pixels(renders))  # gray for a grayscale generator
    scores, sections = dict[str, Any](), []
    for evaluate in (_inpainting, _image_to_image, _variations):
        values, section = evaluate(sample, chosen, real)
        scores |= values
        sections.append(section)
    return scores, sections


def object_mask(item: SceneObject, image_size: int) -> np.ndarray:
    """A square around an object: bool [image_size, image_size]."""
    center = (np.arange(image_size) + 0.5) / image_size
    reach = MARGIN * SIZES[item.size]
    return (abs(center - item.y) <= reach)[:, None] & (abs(center - item.x) <= reach)


def _inpainting(sample: Sample, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    masks = [object_mask(replacement.before.scene.objects[0], real.shape[1]) for replacement in chosen]
    images = sample([replacement.after.text for replacement in chosen], ImageEdit(list(real), masks))
    row = evaluate_shapes(images, [replacement.after for replacement in chosen])["all attributes"]
    outside = ~np.stack(masks)
    unchanged = bool((images[outside] == real[outside]).all())
    masked = np.where(np.stack(masks)[..., None], np.uint8(128), real)
    text = (
        f"A square (gray) is inpainted under a new caption. ShapeEval finds {row.score:.2f} ({row.low:.2f} – "
        f"{row.high:.2f}) of {row.n} images correct. The pixels outside the square "
        f"{'equal' if unchanged else 'DIFFER FROM'} those of the original."
    )
    columns = {"original": real, "masked": masked, "inpainted": images}
    scores = {name: getattr(row, name) for name in ("score", "low", "high", "n")}
    return {"inpainting": {**scores, "unmasked_identical": unchanged}}, _section(
        "Inpainting", text, "inpainting.png", chosen, columns
    )


def _image_to_image(sample: Sample, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    prompts = [replacement.after for replacement in chosen]
    configs = {f"strength {strength:g}": EditConfig(strength=strength) for strength in STRENGTHS}
    columns = _sweep(sample, prompts, real, configs)
    scores = {name: evaluate_shapes(images, prompts)["all attributes"].score for name, images in columns.items()}
    listed = ", ".join(f"{score:.2f} at {name}" for name, score in scores.items())
    text = (
        f"The original is noised to a fraction of the process (strength) and denoised under a new caption. Correct by "
        f"ShapeEval: {listed} ({len(chosen)} images). Low strength preserves the image, high strength follows the "
        "caption."
    )
    columns = {"original": real, **columns}
    return {"image to image": scores}, _section("Image to image", text, "image_to_image.png", chosen, columns)


def _variations(sample: Sample, chosen: Sequence[Replacement], real: np.ndarray) -> tuple[dict, Section]:
    configs = {f"variation {variation:g}": EditConfig(variation=variation) for variation in VARIATIONS}
    columns = _sweep(sample, [replacement.before for replacement in chosen], real, configs)
    scores = {name: float(np.minimum(psnr_uint8(images, real), PSNR_CAP).mean()) for name, images in columns.items()}
    listed = ", ".join(f"{value:.1f} dB at {name}" for name, value in scores.items())
    text = (
        f"The original is inverted to noise by DDIM; the noise is rotated toward fresh noise by a fraction of 90° "
        f"(variation) and denoised under the same caption. PSNR to the original: {listed}."
    )
    same, columns = [replace(item, after=item.before) for item in chosen], {"original": real, **columns}
    return {"variation": scores}, _section("Variations", text, "variations.png", same, columns)


def _sweep(
    sample: Sample, prompts: Sequence[ShapePrompt], real: np.ndarray, configs: Mapping[str, EditConfig]
) -> dict[str, np.ndarray]:
    """The images edited under these prompts with each config, by the config's name."""
    texts = [prompt.text for prompt in prompts]
    return {name: sample(texts, ImageEdit(list(real), config=config)) for name, config in configs.items()}


def _section(
    title: str, text: str, image_name: str, chosen: Sequence[Replacement], columns: dict[str, np.ndarray]
) -> Section:
    """A row per example, a column per setting; the caption is below the last column."""
    last = list(columns)[-1]
    grid = example_grid(columns, lambda i, name: f"[{name}] {chosen[i].after.text}" if name == last else f"[{name}]")
    return Section(title, text, grid, image_name)


def example_grid(columns: Mapping[str, np.ndarray], label: Callable[[int, str], str]) -> Image.Image:
    """A row for each of the first examples. columns: uint8 [N, H, W, 3]; label: of example i in a column."""
    cells = np.stack([images[:GRID_ROWS] for images in columns.values()], 1)
    labels = [label(i, name) for i in range(len(cells)) for name in columns]
    return image_grid(cells.reshape(-1, *cells.shape[2:]), labels, len(columns))
