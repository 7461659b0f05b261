"""Variations of pictures of the shapes world: do they keep what the embedding of a picture says about it?

The score of an attribute is that of ShapeEval, with the picture's own content in place of a caption's. Beside it stands
what a linear probe reads from the same embeddings: a decoder cannot show what they do not carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..config import InputError
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..images.grid import image_grid
from ..worlds.shapes.prompts import ShapePrompt
from ..worlds.shapes.render import render
from ..worlds.shapes.scenes import Scene, ShapesConfig, scene
from ..worlds.shapes.shape_eval import ShapeReport, evaluate_shapes
from .context import Context, renders_of

TASKS = ("attributes", "held-out pairs")  # pictures of a single object; the latter of pairs never seen in training
ATTRIBUTES = ("color", "position", "size", "shape")
PROBE_SCENES = 2000  # from whose embeddings the probes learn
PENALTY = 1e-3  # of a probe: weight of the squared norm of the weights beside the mean cross entropy
STEPS = 200  # of L-BFGS; some tens suffice
GRID_COLUMNS = 10  # pictures in the grid
CARRIED = 0.5  # share of the way from chance to 1 above which a probe's score says that an attribute is carried

EXPLANATION = """
Each variation is sampled from the embedding of a picture that was not trained on. *Score*: the attribute, judged from
the variation's pixels, is the picture's; the last two rows: number of objects and all attributes are, for pairs of
color and shape that training has seen, and that it has not. *Chance*: the same variations scored against other
pictures. *Probe*: a logistic regression reads the attribute from the embedding: what the CLIP carries, and so about
the most that a decoder can show. 95 % Wilson intervals.
"""


def image_variations(context: Context) -> Report:
    """Of variations of pictures by a decoder, from the embeddings of its CLIP."""
    prompts, size = context.shape_prompts(TASKS), context.pipeline.image_size
    pictures = renders_of(prompts, size)
    embeddings = context.embed(pictures)
    stages = context.vary(embeddings)
    scenes = probe_scenes(context.shapes)
    known = context.embed(np.stack([render(each, size) for each in scenes]))
    rows = variation_rows(evaluate_shapes(stages[-1], prompts), probe_scores(known, scenes, embeddings, prompts))
    summary = variation_table(rows)
    shown = {"pictures": pictures, "variations of the first U-Net": stages[0], "variations": stages[-1]}
    if len(stages) == 1:
        del shown["variations of the first U-Net"]
    names = f"Rows of the grid: {', '.join(shown)}."
    section = Section("Image variations", [EXPLANATION, *summary, names, Figure("image_variations.png", _grid(shown))])
    return Report([section], {"image_variations": {row["name"]: row for row in rows}}, summary)


def _grid(shown: Mapping[str, np.ndarray]) -> Image.Image:
    """Rows of some of the pictures, uint8 [N, H, W, 3], at the size of the last ones."""
    *_, last = shown.values()
    count, side = last.shape[:2]
    chosen = np.linspace(0, count, GRID_COLUMNS, endpoint=False).astype(int)
    rows = [each.repeat(side // each.shape[1], 1).repeat(side // each.shape[2], 2)[chosen] for each in shown.values()]
    return image_grid(np.concatenate(rows), columns=len(chosen))


def probe_scenes(config: ShapesConfig, count: int = PROBE_SCENES) -> list[Scene]:
    """The first ``count`` scenes of the training split with a single object; fewer if that split has fewer."""
    found = (scene(config, i) for i in range(config.train_samples))
    chosen: list[Scene] = []
    for each in found:
        if each.kind == "single":
            chosen.append(each)
        if len(chosen) == count:
            break
    return chosen


def probe_scores(
    features: Tensor, scenes: Sequence[Scene], queries: Tensor, prompts: Sequence[ShapePrompt]
) -> dict[str, float]:
    """For each attribute, the share of prompts of the task ``attributes`` where a probe reads the scene's from its
    embedding.

    features: [N, E] embeddings of pictures of ``scenes``, for the probes to learn from. queries: [M, E] embeddings of
    pictures of the prompts' scenes.
    """
    asked = [i for i, prompt in enumerate(prompts) if prompt.task == TASKS[0]]
    scores = {}
    for name in ATTRIBUTES:
        found = linear_probe(features, [getattr(each.objects[0], name) for each in scenes], queries[asked])
        truth = [getattr(prompts[i].scene.objects[0], name) for i in asked]
        scores[name] = float(np.mean([a == b for a, b in zip(found, truth, strict=True)]))
    return scores


def linear_probe(features: Tensor, labels: Sequence[str], queries: Tensor) -> list[str]:
    """The labels of ``queries`` [M, D] by logistic regression on ``features`` [N, D] with N labels (Alain & Bengio
    2016; Radford et al. 2021, appendix A.3): what a linear map can read from features.

    Features are standardized by the mean and standard deviation of ``features``; a constant one counts for nothing. All
    in float64, by L-BFGS from zero weights: the same inputs give the same labels. InputError for no labels, and for
    other numbers of labels than features.
    """
    if len(labels) != len(features) or not len(labels):
        raise InputError(f"a probe got {len(labels)} labels for {len(features)} features: give one for each")
    classes = sorted(set(labels))
    targets = torch.tensor([classes.index(label) for label in labels])
    known, asked = features.detach().double().cpu(), queries.detach().double().cpu()
    mean, std = known.mean(0), known.std(0, unbiased=False)
    known, asked = ((x - mean) / std.where(std > 0, torch.inf) for x in (known, asked))
    weight = torch.zeros(known.shape[1], len(classes), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(classes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(known @ weight + bias, targets) + PENALTY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    with torch.no_grad():
        return [classes[i] for i in (asked @ weight + bias).argmax(1).tolist()]


def variation_rows(report: ShapeReport, probes: Mapping[str, float]) -> list[dict[str, Any]]:
    """The rows of the table: fractions in [0, 1], with the ends of the 95 % interval of the score; probe: None for rows
    that no probe answers.

    report: of the variations against the pictures; probes: of ``probe_scores``.
    """
    known = {row.name: row for row in report.rows}
    found = [known[name] for name in (*ATTRIBUTES, "all attributes", "held-out pairs") if name in known]
    kept = ("name", "n", "score", "low", "high", "chance")
    return [{**{name: getattr(row, name) for name in kept}, "probe": probes.get(row.name)} for row in found]


def variation_table(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """A table, and a sentence for the attributes that the embedding does not carry."""
    cells, lost = [], []
    for row in rows:
        chance, probe = row["chance"], row["probe"]
        interval = f"{row['low']:.2f} – {row['high']:.2f}"
        known = "" if probe is None else f"{probe:.2f}"
        cells.append([row["name"], f"{row['score']:.2f}", interval, f"{chance:.2f}", known, row["n"]])
        if probe is not None and probe < chance + CARRIED * (1 - chance):
            lost.append(row["name"])
    table = Table(("attribute", "score", "95 % interval", "chance", "probe", "n"), cells)
    return [table, *([f"The embedding hardly carries {' and '.join(lost)}: look at the CLIP first."] if lost else [])]
