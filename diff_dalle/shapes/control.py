"""ControlNets in the shapes world: do samples show what controls them, and still what their captions say?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError, named
from ..evaluation.fidelity import PSNR_CAP
from ..evaluation.report import Section, markdown_table
from ..images.control_filters.canny import CannyFilter
from ..images.control_filters.contract import ControlFilter
from ..randomness import Draw
from ..sampling.control import Control
from .captions import PHRASINGS, caption, phrasing_key, sayable
from .editing import GRID_ROWS, example_grid, object_mask, replacements
from .prompts import ShapePrompt, shape_prompts
from .render import render
from .scenes import ShapesConfig
from .shape_eval import evaluate_shapes

EDGE = 0.5  # of a canny control, above which a pixel is an edge
ROWS = ("color", "shape", "position", "all attributes")
EXPLANATION = """
Real pictures control samples of captions that name their shapes and colors, but neither size nor position; or, where
an object is masked, of captions of another object in its place. Scores of ShapeEval with the ControlNet and without it,
with 95 % intervals."""

# (prompts, control or None) → uint8 [N, H, W, 3]
Sample = Callable[[Sequence[str], Control | None], np.ndarray]


def evaluate_control(
    sample: Sample, control_filter: ControlFilter, image_size: int, count: int, seed: int, config: ShapesConfig
) -> tuple[dict, Section]:
    """Scores and report section of a ControlNet with this filter. count: number of pictures.

    A filter that takes masks is shown pictures in which an object is masked and another one is asked for.
    """
    masks: list[np.ndarray] | None = None
    if control_filter.takes_masks:
        chosen = replacements(count, seed, config)
        if len(chosen) < 2:
            raise InputError(
                f"this world of shapes gives {len(chosen)} replacements of an object by another, but 2 are required: "
                f"raise {named('prompts_per_task')}, or leave controlnet out for a world of one shape or color"
            )
        prompts = [each.after for each in chosen]
        pictures = [render(each.before.scene, image_size) for each in chosen]
        masks = [object_mask(each.before.scene.objects[0], image_size) for each in chosen]
    else:
        prompts = _open_prompts(count, seed, config)
        pictures = [render(prompt.scene, image_size) for prompt in prompts]
    texts = [prompt.text for prompt in prompts]
    control = Control(pictures, masks)
    samples = {"with": sample(texts, control), "without": sample(texts, None)}
    scores: dict = {name: _scores(images, prompts) for name, images in samples.items()}
    lines = [EXPLANATION.strip(), "", _table(scores)]
    if isinstance(control_filter, CannyFilter):
        known = _edges(control_filter, np.stack(pictures))
        scores["edges"] = {name: edge_agreement(known, _edges(control_filter, each)) for name, each in samples.items()}
        lines += [
            "",
            "Agreement of edges: {with:.3f} with the ControlNet, {without:.3f} without.".format(**scores["edges"]),
        ]
    if masks is not None:
        scores["kept"] = {name: _kept(each, np.stack(pictures), np.stack(masks)) for name, each in samples.items()}
        kept = "PSNR to the picture outside of the masks: {with:.1f} dB with the ControlNet, {without:.1f} dB without."
        lines += ["", kept.format(**scores["kept"])]
    shown = _shown(control_filter, control, image_size, seed)
    columns = {"control": shown, **samples}
    grid = example_grid(columns, lambda i, name: texts[i] if name == "with" else f"[{name}]")
    return scores, Section("ControlNet", "\n".join(lines), grid, "control.png")


def _open_prompts(count: int, seed: int, config: ShapesConfig) -> list[ShapePrompt]:
    """Prompts that leave size and position to the control."""
    found = []
    for prompt in shape_prompts(count, seed, config, ("attributes",)):
        say = frozenset({"color"}) & sayable(prompt.scene, config)
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


def _table(scores: dict) -> str:
    rows = []
    for name, row in scores["with"].items():
        cells = [name]
        for each in (row, scores["without"][name]):
            cells += [f"{each['score']:.3f}", f"{each['low']:.3f} – {each['high']:.3f}"]
        rows.append([*cells, row["n"]])
    return markdown_table(["score", "with", "95 % interval", "without", "95 % interval", "n"], rows)


def _shown(control_filter: ControlFilter, control: Control, image_size: int, seed: int) -> np.ndarray:
    """The first controls as pictures, uint8 [n, H, W, 3]."""
    index, size = range(min(GRID_ROWS, len(control.images))), (image_size, image_size)
    pictures = control.pictures(index, size)
    found = control_filter(pictures, Draw(seed, torch.tensor(list(index))), control.masked(index, size))
    shown = control_filter.shown(found, pictures)
    return (255 * shown).round().byte().permute(0, 2, 3, 1).numpy()
