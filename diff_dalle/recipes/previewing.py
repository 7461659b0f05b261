"""How much previews show: what their share of a run pays for."""

from __future__ import annotations

import math

from ..config import named, quantity, spelled
from ..distributed.world import World
from .recipe import Recipe
from .spelling import spelling_of

#: Forward passes that a sample takes in a training step: a backward pass computes about twice as much as a forward pass
#: (Kaplan et al. 2020, section 2.1).
TRAINED = 3


def affordable(
    recipe: Recipe, world: World, images: int, steps: int = 1, each: float = 1, once: float = 0, name: str = ""
) -> tuple[int, int]:
    """The number of images and of sampling steps of every preview: those that are asked for, or fewer of both where all
    previews would take more than ``recipe.preview_share`` of the run, which is printed. At least 1 each.

    Counted are forward passes of a training sample on one process, since each makes all previews.

    each: passes per image and step. once: those per image beside these. name: of the network.
    """
    training, share = recipe.training, recipe.preview_share
    if share is None:
        return images, steps
    total, interval = training.last_step(world.size), recipe.sample_interval
    between = interval if total is None else total / -(-total // interval)  # steps of each preview
    limit = share * TRAINED * training.batch_size * between
    asked = images * (once + steps * each)
    if asked <= limit:
        return images, steps
    few = max(1, int(steps * math.sqrt(limit / asked)))  # both by the same factor
    count = min(images, max(1, int(limit / (once + few * each))))
    few = min(steps, max(1, int((limit / count - once) / each)))
    if (count, few) != (images, steps):
        shown = [f"{count} of {quantity(images, 'image')}"] if count < images else []
        shown += [f"{few} of {quantity(steps, 'sampling step')}"] if few < steps else []
        setting = spelled(named("preview_share"), spelling_of(type(recipe.settings)))
        owner = f" of {name}" if name else ""
        every = _rounded_up(share * asked / limit)
        world.print(
            f"Previews{owner} have {' and '.join(shown)}, so that they take at most {100 * share:g}% of the run; "
            f"{setting} {every:g} would give them all."
        )
    return count, few


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit) * unit, 12)
