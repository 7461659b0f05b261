"""A training step: our network and loop against Guided-Diffusion's as published.

The network is Guided-Diffusion's 64-pixel model (``--attention_resolutions 32,16,8 --num_head_channels 64
--num_res_blocks 3 --resblock_updown True``) with 64 or 128 channels instead of 192, without classes and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..batch import Batch, Conditioning
from ..checkpoints.checkpoint import Identity
from ..checkpoints.run_folder import RunFolder
from ..distributed.host_memory import reuse_freed_memory
from ..distributed.world import SINGLE, World
from ..models.layers import to_channels_last
from ..models.precision import autocast, training_precision
from ..models.unet import UNet, UNetConfig
from ..randomness import Draw
from ..training.loop import TrainLoop
from ..training.optim_config import OptimConfig
from ..training.settings import TrainingConfig
from ..training.task import Task
from ..training.trainee import Trainee
from .baseline_unet import BaselineUNet, to_baseline

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
    ours, baseline = to_channels_last(UNet(config)), BaselineUNet(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        for parameter, value in zip(baseline.parameters(), to_baseline(ours, list(ours.parameters())), strict=True):
            parameter.copy_(value)
    return ours, baseline


def losses_of(network: nn.Module, x: Tensor, t: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(mean squared errors [N], output)."""
    output = network(x, t)
    return (output - target).square().flatten(1).mean(1), output


def gradients(network: nn.Module) -> list[Tensor]:
    """The gradients of all parameters. Every parameter has one after a backward pass."""
    return [cast(Tensor, parameter.grad) for parameter in network.parameters()]


def gate(channels: int = CHANNELS, use_checkpoint: bool = False) -> dict[str, tuple[float, float]]:
    """Maximum difference of the outputs, and maximum relative error of a parameter's gradient."""
    ours, baseline = networks(channels, use_checkpoint)
    outputs = []
    for network in (ours, baseline):
        losses, output = losses_of(network, *problem())
        losses.mean().backward()
        outputs.append(output.detach())
    pairs = zip(to_baseline(ours, gradients(ours)), gradients(baseline), strict=True)
    gradient = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return {"outputs": ((outputs[0] - outputs[1]).abs().max().item(), 1e-5), "gradients": (gradient, 1e-4)}


def auto_gate(channels: int = CHANNELS) -> dict[str, tuple[float, float]]:
    """Relative RMS error of the outputs and of all gradients in the precision that ``auto`` trains in on this CPU."""
    ours, baseline = networks(channels)
    outputs = []
    for network, precision in ((ours, training_precision("auto", CPU)), (baseline, "fp32")):
        with autocast(precision, CPU):
            losses, output = losses_of(network, *problem())
        losses.mean().backward()
        outputs.append(output.detach().float())
    pairs = list(zip(to_baseline(ours, gradients(ours)), gradients(baseline), strict=True))
    different = torch.cat([(a - b).flatten() for a, b in pairs])
    gradient = different.norm() / torch.cat([b.flatten() for _, b in pairs]).norm()
    output = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    return {"outputs": (output.item(), 0.02), "gradients": (gradient.item(), 0.05)}


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
    world, task = World(SINGLE, CPU), Regression(config_of(channels, use_checkpoint), batch_size)
    trainee = Trainee(task, OptimConfig(lr=LR, ema_rate=(EMA_RATE,)), training_precision(precision, CPU), world)
    folder = RunFolder("unused", Identity("benchmark", {}))
    loop = TrainLoop(TrainingConfig(batch_size=batch_size), [trainee], None, folder, world)
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
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, foreach=False, fused=False)
    ema = [parameter.detach().clone() for parameter in parameters]

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = losses_of(network, *batch)[0].mean()
        loss.backward()
        pairs = zip(parameters, gradients(network), strict=True)
        norms = [(p.detach().norm().item() ** 2, gradient.norm().item() ** 2) for p, gradient in pairs]
        optimizer.step()
        for average, parameter in zip(ema, parameters, strict=True):
            average.mul_(EMA_RATE).add_(parameter.detach(), alpha=1 - EMA_RATE)
        return loss.item(), norms

    return step
