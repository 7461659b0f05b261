"""ControlNets in the shapes world: do samples show what controls them, and still what their captions say?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..evaluation.fidelity import PSNR_CAP
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..images.control_filters.canny import CannyFilter
from ..images.control_filters.contract import ControlFilter
from ..randomness import Draw
from ..sampling.control import Control
from ..worlds.shapes.captions import PHRASINGS, caption, phrasing_key, sayable
from ..worlds.shapes.prompts import ShapePrompt
from ..worlds.shapes.shape_eval import evaluate_shapes
from .context import Context, renders_of
from .editing import GRID_ROWS, example_grid, object_mask, replacements

EDGE = 0.5  # of a canny control, above which a pixel is an edge
ROWS = ("color", "shape", "position", "all attributes")
EXPLANATION = """
Real pictures control samples of captions that name their shapes and colors, but neither size nor position; or, where
an object is masked, of captions of another object in its place. Scores of ShapeEval with the ControlNet and without it,
with 95 % intervals."""


def control(context: Context) -> Report:
    """Scores of a ControlNet. A filter that takes masks is shown pictures in which an object is masked and another one
    is asked for."""
    settings, size = context.settings, context.base.image_size
    control_filter = context.steering.control_filter(context.base.stages[0].signal)
    masks: list[np.ndarray] | None = None
    if control_filter.takes_masks:
        count, setting = settings.prompts_per_task, "prompts_per_task"
        chosen = replacements(count, settings.seed, context.shapes, setting, "leave controlnet out")
        prompts = [each.after for each in chosen]
        pictures = renders_of([each.before for each in chosen], size)
        masks = [object_mask(each.before.scene.objects[0], size) for each in chosen]
    else:
        prompts = _open_prompts(context)
        pictures = renders_of(prompts, size)
    texts, given = [prompt.text for prompt in prompts], Control(list(pictures), masks)
    samples = {"with": context.steer(texts, given), "without": context.steer(texts, None)}
    scores: dict[str, Any] = {name: _scores(images, prompts) for name, images in samples.items()}
    parts: list[Part] = [EXPLANATION, _table(scores)]
    if isinstance(control_filter, CannyFilter):
        known = _edges(control_filter, pictures)
        scores["edges"] = {name: edge_agreement(known, _edges(control_filter, each)) for name, each in samples.items()}
        agreement = "Agreement of edges: {with:.3f} with the ControlNet, {without:.3f} without."
        parts.append(agreement.format(**scores["edges"]))
    if masks is not None:
        scores["kept"] = {name: _kept(each, pictures, np.stack(masks)) for name, each in samples.items()}
        kept = "PSNR to the picture outside of the masks: {with:.1f} dB with the ControlNet, {without:.1f} dB without."
        parts.append(kept.format(**scores["kept"]))
    columns = {"control": _shown(control_filter, given, size, settings.seed), **samples}
    grid = example_grid(columns, lambda i, name: texts[i] if name == "with" else f"[{name}]")
    return Report([Section("ControlNet", [*parts, Figure("control.png", grid)])], {"control": scores}, parts)


def _open_prompts(context: Context) -> list[ShapePrompt]:
    """Prompts that leave size and position to the control."""
    found = []
    for prompt in context.shape_prompts(("attributes",)):
        say = frozenset({"color"}) & sayable(prompt.scene, context.shapes)
        text = caption(prompt.scene, PHRASINGS[phrasing_key(prompt.scene, say)][0], say)
        found.append(ShapePrompt(text, prompt.task, prompt.scene, say))
    return found


def edge_agreement(one: Tensor, other: Tensor) -> float:
    """Mean over the pictures of |A ∩ B| / |A ∪ B| of their edges, bool [N, 1, H, W], both dilated by a pixel; 1 where
    neither has any."""
    a, b = (F.max_pool2d(each.float(), 3, 1, 1).bool().flatten(1) for each in (one, other))
    union, common = (a | b).sum(1).double(), (a & b).sum(1).double()
    return float(torch.where(union > 0, common / union.clamp(min=1), 1.0).mean())


def _kept(images: np.ndarray, pictures: np.ndarray, masks: np.ndarray) -> float:
    """PSNR in dB to the pictures where they are not masked, at most ``PSNR_CAP``; the mean over the pictures."""
    errors = ((images.astype(float) - pictures) ** 2).mean(3)
    mse = np.array([error[~mask].mean() for error, mask in zip(errors, masks, strict=True)])
    return float(np.minimum(10 * np.log10(255**2 / np.maximum(mse, 1e-9)), PSNR_CAP).mean())


def _edges(control_filter: CannyFilter, images: np.ndarray) -> Tensor:
    pictures = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return control_filter(pictures, Draw(0, torch.arange(len(pictures)))) > EDGE


def _scores(images: np.ndarray, prompts: Sequence[ShapePrompt]) -> dict[str, dict]:
    return {row.name: asdict(row) for row in evaluate_shapes(images, prompts).rows if row.name in ROWS}


def _table(scores: dict) -> Table:
    rows = []
    for name, row in scores["with"].items():
        cells = [name]
        for each in (row, scores["without"][name]):
            cells += [f"{each['score']:.3f}", f"{each['low']:.3f} – {each['high']:.3f}"]
        rows.append([*cells, row["n"]])
    return Table(["score", "with", "95 % interval", "without", "95 % interval", "n"], rows)


def _shown(control_filter: ControlFilter, control: Control, image_size: int, seed: int) -> np.ndarray:
    """The first controls as pictures, uint8 [n, H, W, 3]."""
    index, size = range(min(GRID_ROWS, len(control.images))), (image_size, image_size)
    pictures, masks = control.at(index, size)
    found = control_filter(pictures, Draw(seed, torch.tensor(list(index))), masks)
    shown = control_filter.shown(found, pictures)
    return (255 * shown).round().byte().permute(0, 2, 3, 1).numpy()
