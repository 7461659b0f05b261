"""Pictures of the shapes world changed by a generator: painted anew in a part, changed as a whole, varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..diffusion.editing import EditConfig
from ..evaluation.fidelity import PSNR_CAP, psnr
from ..evaluation.report import Section
from ..images.grid import image_grid
from ..sampling.request import PictureEdit
from .prompts import ShapePrompt, shape_prompts
from .render import render
from .scenes import SIZES, ShapesConfig, Thing
from .shape_eval import evaluate_shapes

SHOWN = 6  # examples in each picture, a row for each
STRENGTHS = (0.3, 0.5, 0.7, 0.9)
VARIATIONS = (0.0, 0.3, 1.0)
MARGIN = 1.4  # half the side of what is painted anew, as a multiple of half the thing's width
SCREEN_SIDE = 96  # screen pixels up to which small pictures are enlarged

Sample = Callable[[Sequence[str], PictureEdit], np.ndarray]


@dataclass(frozen=True)
class Change:
    """A picture that exists, and another thing of the same size and place that is to be in it instead."""

    before: ShapePrompt
    after: ShapePrompt


def changes(count: int, seed: int, config: ShapesConfig) -> list[Change]:
    """So many changes, or fewer where the world has too few things of the same size and place."""
    prompts = shape_prompts(8 * count, seed, config, ("attributes",))
    found, taken = [], set()
    for i, before in enumerate(prompts):
        for j, after in enumerate(prompts):
            a, b = before.scene.things[0], after.scene.things[0]
            alike = (a.size, a.position) == (b.size, b.position)
            if alike and a.colour != b.colour and a.shape != b.shape and not {i, j} & taken:
                found.append(Change(before, after))
                taken |= {i, j}
    return found[:count]


def edited(sample: Sample, side: int, count: int, seed: int, config: ShapesConfig) -> tuple[dict, list[Section]]:
    """Scores and report sections of the three ways of changing a picture.

    sample: (prompts, edit) → uint8 [N, side, side, 3].
    """
    wanted = changes(count, seed, config)
    real = np.stack([render(change.before.scene, side) for change in wanted])
    scores, sections = {}, []
    for part in (_inpainting, _image_to_image, _variations):
        values, section = part(sample, wanted, real)
        scores |= values
        sections.append(section)
    return scores, sections


def around(thing: Thing, side: int) -> np.ndarray:
    """A mask of the square around a thing: bool [side, side]."""
    place = (np.arange(side) + 0.5) / side
    reach = MARGIN * SIZES[thing.size]
    return (abs(place - thing.y) <= reach)[:, None] & (abs(place - thing.x) <= reach)


def _inpainting(sample: Sample, wanted: Sequence[Change], real: np.ndarray) -> tuple[dict, Section]:
    masks = [around(change.before.scene.things[0], real.shape[1]) for change in wanted]
    images = sample([change.after.text for change in wanted], PictureEdit(list(real), masks))
    row = evaluate_shapes(images, [change.after for change in wanted])["all attributes"]
    outside = ~np.stack(masks)
    kept = bool((images[outside] == real[outside]).all())
    shown = np.where(np.stack(masks)[..., None], np.uint8(128), real)
    text = (f"A square (grey) is painted anew under another caption. In {row.score:.2f} ({row.low:.2f} – "
            f"{row.high:.2f}) of {row.n} pictures ShapeEval then finds what the new caption says; the pixels outside "
            f"the square are {'exactly' if kept else 'NOT'} those of the original.")  # fmt: skip
    section = _section("Inpainting", text, "inpainting.png", wanted, {"original": real, "masked": shown, "new": images})
    return {"inpainting": {"score": row.score, "low": row.low, "high": row.high, "n": row.n, "kept": kept}}, section


def _image_to_image(sample: Sample, wanted: Sequence[Change], real: np.ndarray) -> tuple[dict, Section]:
    prompts = [change.after for change in wanted]
    columns = _each(sample, prompts, real, "strength", STRENGTHS)
    scores = {way: evaluate_shapes(images, prompts)["all attributes"].score for way, images in columns.items()}
    found = ", ".join(f"{score:.2f} at {way}" for way, score in scores.items())
    text = (f"The original is noised to a part of the process and drawn again under another caption. What this says is "
            f"then found in {found} ({len(wanted)} pictures): a low strength keeps the picture, a high one follows the "
            "caption.")  # fmt: skip
    columns = {"original": real, **columns}
    return {"image to image": scores}, _section("Image to image", text, "image_to_image.png", wanted, columns)


def _variations(sample: Sample, wanted: Sequence[Change], real: np.ndarray) -> tuple[dict, Section]:
    columns = _each(sample, [change.before for change in wanted], real, "variation", VARIATIONS)
    scores = {way: float(np.minimum(psnr(images, real), PSNR_CAP).mean()) for way, images in columns.items()}
    found = ", ".join(f"{value:.1f} dB at {way}" for way, value in scores.items())
    text = (f"The original is traced back to its noise (DDIM inversion), which is turned towards fresh noise by a part "
            f"of a right angle and drawn under the same caption. PSNR with the original: {found}.")  # fmt: skip
    whose, columns = [replace(change, after=change.before) for change in wanted], {"original": real, **columns}
    return {"variation": scores}, _section("Variations", text, "variations.png", whose, columns)


def _each(sample: Sample, prompts: Sequence[ShapePrompt], real: np.ndarray, setting: str, values: Sequence[float]
          ) -> dict[str, np.ndarray]:  # fmt: skip
    """What comes of the pictures under these prompts with each value of a setting, by its name and value."""
    texts = [prompt.text for prompt in prompts]
    return {
        f"{setting} {value:g}": sample(texts, PictureEdit(list(real), config=EditConfig(**{setting: value})))
        for value in values
    }


def _section(title: str, text: str, name: str, wanted: Sequence[Change], columns: dict[str, np.ndarray]) -> Section:
    """A row for each of the first examples, a column for each way; the caption stands below the last."""
    cells, last = np.stack([images[:SHOWN] for images in columns.values()], 1), list(columns)[-1]
    labels = [
        f"[{way}] {change.after.text}" if way == last else f"[{way}]" for change in wanted[:SHOWN] for way in columns
    ]
    side = cells.shape[2]
    grid = image_grid(cells.reshape(-1, *cells.shape[2:]), labels, len(columns), max(1, SCREEN_SIDE // side))
    return Section(title, text, grid, name)
