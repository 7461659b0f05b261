"""What large networks need on many GPUs, computed: memory, communication and time of a step, under assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diff_dalle.commands.info import parse_info, preset_networks
from diff_dalle.config import InputError
from diff_dalle.distributed.sharding_config import MODES
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.recipes.planning.cluster import GPUS as KINDS
from diff_dalle.recipes.planning.cluster import Links, Traffic, sent_bytes
from diff_dalle.recipes.planning.cost import NetworkCost
from diff_dalle.recipes.planning.step import process_memory
from diff_dalle.recipes.recipe import Recipe

PRESETS = ("generator_64", "cascade_stage_c_3b")
GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Cluster(Links):
    """What is assumed about the machines. All rates are per GPU.

    peak: FLOP/s in bf16, of an H100 SXM.
    mfu:  the fraction of the peak that forward and backward pass reach.
    """

    peak: float = KINDS["h100"].peak
    mfu: float = 0.40

    def __str__(self) -> str:
        return (
            f"{self.local} GPUs a node; {self.peak / 1e12:g} TFLOP/s a GPU in bf16, of which {self.mfu:.0%} "
            f"are used; {self.within / 1e9:g} GB/s a GPU within a node, {self.between / 1e9:g} GB/s between nodes; a "
            "backward pass takes twice the FLOPs of the forward pass, checkpointing one forward pass more; ring "
            "algorithms at full rate and without latency, on several nodes between GPUs of the same place in each, and "
            "within each; gradients are exchanged in fp32, weights of blocks gathered in bf16 and the "
            "others in fp32, for the forward and the backward pass of each micro-batch; *apart*: nothing overlaps, *at "
            "once*: communication and computation overlap entirely; "
            "memory in fp32 with one set of EMA weights for each rate of the preset, as `info.py` prints it."
        )


def traffic(recipe: Recipe, cost: NetworkCost, mode: str, gpus: int, cluster: Cluster) -> Traffic:
    """What each GPU sends in a step of a preset's run."""
    pieces = -(-recipe.training.batch_size // recipe.microbatch)
    return sent_bytes(cost, pieces, mode, gpus, cluster.local)


def compute_seconds(recipe: Recipe, cost: NetworkCost, cluster: Cluster) -> float:
    """Of the forward and backward passes of one step."""
    passes = 4 if cost.probe.checkpointed else 3
    return passes * cost.flops(cost.size) * recipe.training.batch_size / (cluster.peak * cluster.mfu)


def on_gpus(preset: str, mode: str, gpus: int, cluster: Cluster) -> Recipe:
    """The run that ``info.py`` describes for a preset on so many GPUs, with this form of parallelism."""
    flags = ["--preset", preset, "--parallel", mode, "--processes", str(gpus)]
    if mode == "hsdp":
        flags += ["--shard_processes", str(cluster.local)]
    if mode == "ddp" and getattr(parse_info(["--preset", preset]), "use_fsdp", False):
        flags += ["--use_fsdp", "False"]  # some presets ask for it by this name
    return parse_info(flags).recipe(gpus)


def memory(recipe: Recipe, cost: NetworkCost, gpus: int) -> int:
    """Bytes on each GPU, as ``info.py`` says. InputError where the weights cannot be shared so."""
    if recipe.training.sharding.parallel == "ddp":
        return cost.training_bytes(recipe.microbatch)
    return process_memory(recipe, cost, gpus).total


def rows(preset: str, cluster: Cluster) -> Iterator[list[object]]:
    (cost,) = preset_networks(preset)[1]
    for gpus in GPUS:
        for mode in MODES:
            here = on_gpus(preset, mode, gpus, cluster)
            try:
                held = memory(here, cost, gpus)
            except InputError:
                continue  # hsdp on one node, which is fsdp
            sent, busy = traffic(here, cost, mode, gpus, cluster), compute_seconds(here, cost, cluster)
            wait = sent.seconds(cluster)
            batch, piece = here.training.batch_size, here.microbatch
            times = [f"{seconds:.3f}" for seconds in (busy, wait, busy + wait, max(busy, wait))]
            sizes = [f"{size / 1e9:,.2f}" for size in (sent.within, sent.between)]
            yield [gpus, mode, f"{batch} ({piece})", f"{held / 2**30:,.1f}", *sizes, *times]


def tables(cluster: Cluster) -> Iterator[str]:
    header = ["GPUs", "parallel", "images a GPU (micro-batch)", "GiB a GPU", "GB sent within a node", "to other nodes"]
    header += ["s computing", "s communicating", "s a step, apart", "at once"]
    for preset in PRESETS:
        parameters = preset_networks(preset)[1][0].parameters
        plan = markdown_table(header, list(rows(preset, cluster)))
        yield f"`{preset}`, {parameters / 1e6:,.0f} M parameters\n\n{plan}"
