"""What ``train_decoder.py --check True`` prints: the data, the embeddings and the U-Nets of a run that could start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoints.pixels import DecoderSettings
from ...data.loader import Loader
from ...distributed.world import World
from ...errors import quantity
from ...evaluation.report import markdown_table
from ..info import network_cost

if TYPE_CHECKING:
    from ..train_decoder import DecoderRun

PARTS = {"train": "training", "val": "validation and metrics", "test": "shown beside samples"}


def describe_decoder(run: DecoderRun, world: World) -> str:
    """The report; every rank calls it. Raises InputError for what would keep the run from starting."""
    if world.is_main:
        run.check_start()
    run = run.settled(world)
    opened = run.opened
    assert opened is not None
    rows = []
    for name, use in PARTS.items():
        loader = getattr(opened, name)
        shards = len(opened.materials.shards[name])
        counts = (loader.samples, loader.collection.left_out) if loader else (0, 0)
        rows.append([name, shards, *(f"{count:,}" for count in counts), use])
    training, size, epochs = run.training, run.data.batch_size * world.size, run.train.epochs
    steps = quantity(training.last_step(world.size) or 0, "step")
    text = [
        markdown_table(["split", "shards", "samples", "left out", "use"], rows),
        f"{epochs:,} epoch{'s' * (epochs > 1)} of {quantity(run.epoch_samples, 'sample')}: {steps} of "
        f"{quantity(size, 'sample')}; a checkpoint every {quantity(training.save_interval, 'step')}, a validation "
        f"every {quantity(training.eval_interval, 'step')}.",
        *(f"The {what}: {origin}." for what, origin in opened.materials.origins.items()),
    ]
    metrics = run.metrics(world)
    if metrics is not None:
        count = quantity(metrics.config.n_evaluation_samples, "image")
        text.append(f"Metrics of {count} of the split val after each validation: {', '.join(metrics.config.given)}.")
    text += [_first_sample(opened.train), _networks(run)]
    return "\n\n".join(text)


def _first_sample(data: Loader) -> str:
    """A sample, read as a run would read it."""
    batch = data.batch_at([0])
    found = ", ".join(f"{name} {list(value.shape[1:])}" for name, value in batch.cond.present().items())
    return f"A sample: image {list(batch.images.shape[1:])}{', ' + found if found else ''}."


def _networks(run: DecoderRun) -> str:
    """Parameters, FLOPs and memory of the U-Nets."""
    decoder, rows, total = run.decoder, [], 0.0
    batch = run.training.microbatch or run.training.batch_size
    for i, stage in enumerate(decoder.stages()):
        cost = network_cost(DecoderSettings(decoder), 0, stage.name)
        is_trained = i in run.trained
        held = (
            cost.own.training_bytes(batch, emas=len(run.optims[i].ema_rate)) if is_trained else 4 * cost.own.parameters
        )
        total += held
        rows.append(
            [
                stage.name,
                f"{stage.image_size}",
                f"{cost.own.parameters / 1e6:,.1f}",
                f"{cost.own.flops / 1e9:,.1f}",
                f"{held / 2**30:,.2f}",
                "trained" if is_trained else "kept as it is",
            ]
        )
    header = ["U-Net", "pixels", "parameters, M", "GFLOPs per image", "GiB in training", ""]
    note = (
        f"Memory is for {quantity(batch, 'sample')} per forward pass in fp32; the U-Nets are trained in turn, and need "
        f"together at most {total / 2**30:,.2f} GiB."
    )
    return f"{markdown_table(header, rows)}\n\n{note}"
