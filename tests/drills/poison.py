"""Values that are not finite, put into the data, the loss or a gradient of chosen steps of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

Steps = range  # numbers of steps, from 1 on


def _poison_images(steps: Steps, value: float) -> None:
    """One pixel of the first image of a step's batch."""
    from diff_dalle.data.loader import Loader

    original = Loader.batches

    def batches(self, position: int, *arguments, **options):
        for number, batch in enumerate(original(self, position, *arguments, **options), start=1):
            if number in steps:
                images = batch.images.clone()
                images[0, 0, 0, 0] = value
                batch = dataclasses.replace(batch, images=images)
            yield batch

    Loader.batches = batches  # type: ignore[method-assign]


class _Step:
    """The number of the update in progress."""

    def __init__(self):
        from diff_dalle.training.trainee import Trainee

        self.number, original = 0, Trainee.update

        def update(trainee, *arguments, **options):
            self.number += 1
            return original(trainee, *arguments, **options)

        Trainee.update = update  # type: ignore[method-assign, assignment]


def _poison_loss(steps: Steps, value: float) -> None:
    """The loss of this rank's first sample."""
    from diff_dalle.tasks.contrastive import ContrastiveTask
    from diff_dalle.tasks.denoising import DenoisingTask

    step = _Step()
    for task, name in ((DenoisingTask, "losses"), (ContrastiveTask, "_named_losses")):
        original = getattr(task, name)

        def poisoned(self, *arguments, original=original):
            named = original(self, *arguments)
            if step.number not in steps:
                return named
            factor = named["loss"].new_ones(len(named["loss"]))
            factor[0] = value
            return {**named, "loss": named["loss"] * factor}

        setattr(task, name, poisoned)


def _poison_gradient(steps: Steps, value: float) -> None:
    """One element of the gradient of one parameter, before it is exchanged with the other ranks."""
    from diff_dalle.training.trainee import Trainee

    step = _Step()
    original = Trainee.update

    def update(trainee, *arguments, **options):
        if step.number + 1 not in steps:
            return original(trainee, *arguments, **options)

        def poisoned(gradient):
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
            return gradient

        parameter = next(p for p in trainee.task.model.parameters() if p.requires_grad)
        handle = parameter.register_hook(poisoned)
        try:
            return original(trainee, *arguments, **options)
        finally:
            handle.remove()

    Trainee.update = update  # type: ignore[method-assign, assignment]


POISONS: dict[str, Callable[[Steps, float], None]] = {
    "images": _poison_images,
    "loss": _poison_loss,
    "gradient": _poison_gradient,
}
