"""A training step: our network and loop against Guided-Diffusion's as published; how long training waits for a
checkpoint, for all of its files or for the copy that they are written from; and what it costs a step to be watched, by
the flight recorder and by the lifeline between the ranks.

The network is Guided-Diffusion's 64-pixel model (``--attention_resolutions 32,16,8 --num_head_channels 64
--num_res_blocks 3 --resblock_updown True``) with 64 or 128 channels instead of 192, without classes and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from network_making import randomize, relative
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.distributed.devices import reuse_freed_memory
from diff_dalle.distributed.lifeline import Lifeline
from diff_dalle.distributed.rendezvous import ProcessInfo
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.precision import autocast, training_precision
from diff_dalle.models.unet import UNet, UNetConfig
from diff_dalle.randomness import Draw
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.settings import OptimConfig, TrainingConfig
from diff_dalle.training.task import Task
from diff_dalle.training.trainee import Trainee

from .baseline_unet import BaselineUNet, to_baseline
from .regression import SPREAD, Differences, copy_weights, gradients, loop_of, same_function
from .timing import Unfinished, temporary_folder

NETWORK = UNetConfig(
    image_size=64,
    num_channels=64,
    num_res_blocks=3,
    attention_resolutions=(32, 16, 8),
    num_head_channels=64,
    resblock_updown=True,
)
CHANNELS, BATCH_SIZE, LR, EMA_RATE = 64, 4, 3e-4, 0.9999
CPU = torch.device("cpu")


def config_of(channels: int, use_checkpoint: bool = False) -> UNetConfig:
    return replace(NETWORK, num_channels=channels, use_checkpoint=use_checkpoint)


def problem(batch_size: int = BATCH_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, timesteps and regression targets."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, batch_size, 3, NETWORK.image_size, NETWORK.image_size, generator=generator)
    return x, torch.linspace(0, 999, batch_size), target


def networks(channels: int = CHANNELS, use_checkpoint: bool = False) -> tuple[UNet, BaselineUNet]:
    """The two networks with equal weights, none of them 0 (zero-initialized layers would hide differences)."""
    config = config_of(channels, use_checkpoint)
    ours, baseline = randomize(to_channels_last(UNet(config)), spread=SPREAD), BaselineUNet(config)
    copy_weights(baseline, to_baseline(ours, list(ours.parameters())))
    return ours, baseline


def losses_of(network: nn.Module, x: Tensor, t: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(mean squared errors [N], output)."""
    output = network(x, t)
    return (output - target).square().flatten(1).mean(1), output


def gate(channels: int = CHANNELS, use_checkpoint: bool = False) -> Differences:
    ours, baseline = networks(channels, use_checkpoint)
    outputs = []
    for network in (ours, baseline):
        losses, output = losses_of(network, *problem())
        losses.mean().backward()
        outputs.append(output.detach())
    return same_function(outputs, to_baseline(ours, gradients(ours)), gradients(baseline))


def auto_gate(channels: int = CHANNELS) -> Differences:
    """Relative RMS error of the outputs and of all gradients in the precision that ``auto`` trains in on this CPU."""
    ours, baseline = networks(channels)
    outputs = []
    for network, precision in ((ours, training_precision("auto", CPU)), (baseline, "fp32")):
        with autocast(precision, CPU):
            losses, output = losses_of(network, *problem())
        losses.mean().backward()
        outputs.append(output.detach().float())
    found, expected = to_baseline(ours, gradients(ours)), gradients(baseline)
    gradient = relative(*(torch.cat([each.flatten() for each in side]) for side in (found, expected)))
    return {"outputs": (relative(*outputs), 0.02), "gradients": (gradient, 0.05)}


class Regression(Task):
    """Maps the problem's images to its targets."""

    recorded = ("t",)

    def __init__(self, config: UNetConfig, batch_size: int):
        super().__init__()
        self.model = to_channels_last(UNet(config))
        _, self.t, self.target = problem(batch_size)

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return {"loss": losses_of(self.model, batch.images, self.t, self.target)[0], "t": self.t}


def training_loop(
    channels: int = CHANNELS, batch_size: int = BATCH_SIZE, use_checkpoint: bool = False, precision: str = "fp32"
) -> tuple[TrainLoop, Batch]:
    """The loop of all training commands, and the batch of each step."""
    task, optim = Regression(config_of(channels, use_checkpoint), batch_size), OptimConfig(lr=LR, ema_rate=(EMA_RATE,))
    trainee = Trainee(task, optim, training_precision(precision, CPU), ALONE)
    loop = loop_of(trainee, TrainingConfig(batch_size=batch_size), ALONE)
    return loop, Batch(problem(batch_size)[0], Conditioning(), torch.arange(batch_size))


def ours(
    channels: int = CHANNELS, batch_size: int = BATCH_SIZE, use_checkpoint: bool = False, precision: str = "fp32"
) -> Callable[[], object]:
    """The loop's own update: fused AdamW; clipping and EMA by foreach operations; no waiting for the device; memory
    reused as in every training command."""
    reuse_freed_memory()
    loop, batch = training_loop(channels, batch_size, use_checkpoint, precision)
    return lambda: loop.update(batch)


def flops(channels: int = CHANNELS, batch_size: int = BATCH_SIZE) -> int:
    """FLOPs of a step's forward and backward pass, nothing computed twice; a multiply-add counts as two."""
    with torch.device("meta"):
        network = UNet(config_of(channels))
    batch = [each.to("meta") for each in problem(batch_size)]
    with FlopCounterMode(display=False) as counter:
        losses_of(network, *batch)[0].mean().backward()
    return counter.get_total_flops()


def baseline(channels: int = CHANNELS, batch_size: int = BATCH_SIZE) -> Callable[[], object]:
    """AdamW and EMA parameter by parameter; the loss and two norms per parameter are read back at each step."""
    network, batch = BaselineUNet(config_of(channels)), problem(batch_size)
    return published_step(network, lambda: losses_of(network, *batch)[0].mean())


def published_step(network: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], object]:
    """Guided-Diffusion's: see ``baseline``."""
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, foreach=False, fused=False)
    ema = [parameter.detach().clone() for parameter in parameters]

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()
        norms = [(p.detach().norm().item(), p.grad.norm().item()) for p in parameters if p.grad is not None]
        optimizer.step()
        for average, parameter in zip(ema, parameters, strict=True):
            average.mul_(EMA_RATE).add_(parameter.detach(), alpha=1 - EMA_RATE)
        return loss.item(), norms

    return step


# ----------------------------------------------------------------------------------------------------------- saving


def _trained() -> TrainLoop:
    """A loop after two updates, so that the optimizer has a state, with a folder of its own."""
    reuse_freed_memory()  # as in every training command
    torch.manual_seed(0)
    loop, batch = training_loop()
    loop.saving.run = RunFolder(Identity("benchmark", {}), path=str(temporary_folder()))
    for _ in range(2):
        loop.update(batch)
    return loop


def waiting() -> Callable[[], object]:
    """Save, and wait for the files."""
    loop = _trained()

    def save() -> TrainLoop:
        loop.save()
        loop.saving.finish()
        return loop

    return save


def in_background() -> Callable[[], Unfinished]:
    """The loop's own save; the files are waited for outside of the time."""
    loop = _trained()

    def save() -> Unfinished:
        loop.save()
        return Unfinished(loop.saving.finish)

    return save


def saving_gate() -> dict[str, tuple[float, float]]:
    """Maximum difference of the saved weights and averages: none, though training goes on before they are written."""
    found = []
    for goes_on in (False, True):
        loop = _trained()
        _, batch = training_loop()
        loop.save()
        if goes_on:
            loop.update(batch)
        loop.saving.finish()
        run = loop.saving.run
        states = [
            run.load(run.checkpoints[-1], "", role)[0]["state"] for role in ("model", loop.trainees[0].emas[0].role)
        ]
        found.append(torch.cat([value.flatten() for state in states for value in state.values()]))
    return {"saved values": ((found[0] - found[1]).abs().max().item(), 0.0)}


# --------------------------------------------------------------------------------------------------------- watching


def _watched_loop(recorded: bool) -> tuple[TrainLoop, Batch]:
    torch.manual_seed(0)
    loop, batch = training_loop()
    for trainee in () if recorded else loop.trainees:
        trainee.flight.record = lambda *_: None  # type: ignore[method-assign]
    return loop, batch


def unwatched() -> Callable[[], object]:
    """The loop's update without its flight recorder."""
    loop, batch = _watched_loop(recorded=False)
    return lambda: loop.update(batch)


def watched() -> Callable[[], object]:
    """The loop's update in a process that holds both ends of a lifeline: of rank 0 and of rank 1."""
    store = torch.distributed.HashStore()
    places = [ProcessInfo("single", rank, 2) for rank in (0, 1)]
    ends = [Lifeline(place, "127.0.0.1", store, 10.0, 100.0, lambda news: None) for place in places]
    if ends[0].wait_for_all(10.0):
        raise RuntimeError("the two ends of the lifeline do not meet")
    loop, batch = _watched_loop(recorded=True)

    def step() -> list[Lifeline]:
        loop.update(batch)
        return ends

    return step


def watching_gate() -> dict[str, tuple[float, float]]:
    """Maximum difference of the weights after two steps: none."""
    weights = []
    for recorded in (False, True):
        loop, batch = _watched_loop(recorded)
        loop.update(batch)
        loop.update(batch)
        weights.append(torch.cat([p.detach().flatten() for p in loop.trainees[0].task.model.parameters()]))
    return {"weights": ((weights[0] - weights[1]).abs().max().item(), 0.0)}
