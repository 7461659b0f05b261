"""What ``train_decoder.py --check True`` prints: the data, the embeddings and the U-Nets of a run that could start."""

from __future__ import annotations

from ..checkpoints.pixels import DecoderSettings
from ..config import quantity, redact
from ..data.loader import Loader
from ..distributed.world import World
from ..evaluation.report import markdown_table
from ..recipes.decoder import DecoderRun, OpenedDecoder, open_decoder
from ..recipes.planning.cost import NetworkCost

PARTS = {"train": "training", "val": "validation and metrics", "test": "shown beside samples"}


def describe_decoder(run: DecoderRun, world: World) -> str:
    """The report; every rank calls it. Raises InputError for what would keep the run from starting."""
    if world.is_main:
        run.check_start()
    opened = open_decoder(run.recipe(world.size), world)
    run, recipe = opened.run, opened.recipe
    rows = []
    for name, use in PARTS.items():
        loader = getattr(opened, name)
        shards = len(opened.materials.shards[name])
        counts = (loader.samples, loader.collection.left_out) if loader else (0, 0)
        rows.append([name, shards, *(f"{count:,}" for count in counts), use])
    training, size, epochs = recipe.training, run.data.batch_size * world.size, run.train.epochs
    steps = quantity(training.last_step(world.size) or 0, "step")
    text = [
        markdown_table(["split", "shards", "samples", "left out", "use"], rows),
        f"{epochs:,} epoch{'s' * (epochs > 1)} of {quantity(recipe.epoch_samples, 'sample')}: {steps} of "
        f"{quantity(size, 'sample')}; a checkpoint every {quantity(training.save_interval, 'step')}, a validation "
        f"every {quantity(training.eval_interval, 'step')}.",
        *_found(opened),
        *(f"The {what}: {origin}." for what, origin in opened.materials.origins.items()),
    ]
    metrics = opened.metrics()
    if metrics is not None:
        count = quantity(metrics.config.n_evaluation_samples, "image")
        text.append(f"Metrics of {count} of the split val after each validation: {', '.join(metrics.config.given)}.")
    text += [_first_sample(opened.train), _networks(opened)]
    return "\n\n".join(text)


def _found(opened: OpenedDecoder) -> list[str]:
    """What samples lack, of each split."""
    lines: list[str] = []
    for name in PARTS:
        loader = getattr(opened, name)
        if loader and loader.collection.absent:
            paths = list(map(redact, loader.collection.absent.values()))
            lines.append(f"Split {name}: {quantity(len(paths), 'shard')} left out: there is no {', '.join(paths)}.")
        if loader and loader.findings:
            lines += [f"Split {name}: {line}." for line in loader.findings.said()]
    return lines


def _first_sample(data: Loader) -> str:
    """A sample, read as a run would read it."""
    batch = data.batch_at([0])
    found = ", ".join(f"{name} {list(value.shape[1:])}" for name, value in batch.cond.present().items())
    return f"A sample: image {list(batch.images.shape[1:])}{', ' + found if found else ''}."


def _networks(opened: OpenedDecoder) -> str:
    """Parameters, FLOPs and memory of the U-Nets."""
    run, recipe, rows, total = opened.run, opened.recipe, [], 0
    settings, batch = DecoderSettings(run.decoder), recipe.microbatch
    for i, stage in enumerate(run.decoder.stages()):
        optim, is_trained = recipe.optims[stage.name], i in run.trained
        network = NetworkCost(settings, trainee=stage.name, optim=optim)
        held = network.training_bytes(batch) if is_trained else 4 * network.parameters
        total += held
        rows.append(
            [
                stage.name,
                f"{stage.image_size}",
                f"{network.parameters / 1e6:,.1f}",
                f"{network.flops(network.size) / 1e9:,.1f}",
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
