"""What benchmarks of training steps share: loop, equal weights, a forward and backward pass, and how results differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from network_making import relative
from torch import Tensor, nn

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.distributed.world import World
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

SPREAD = 0.02  # of random numbers added to initial weights: zero-initialized layers would hide those before
Differences = dict[str, tuple[float, float]]


def loop_of(trainee: Trainee, config: TrainingConfig, world: World) -> TrainLoop:
    """The loop of all training commands, without data and files."""
    return TrainLoop(config, [trainee], None, RunFolder(Identity("benchmark", {}), path="unused"), world)


def copy_weights(network: nn.Module, values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), values, strict=True):
            parameter.copy_(value.view(parameter.shape))


def pass_through(network: nn.Module, x: Tensor, t: Tensor, cond: Conditioning, target: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward pass. Returns the mean squared error and the output."""
    network.zero_grad(set_to_none=True)
    output = network(x, t, cond=cond)
    loss = (output - target).square().mean()
    loss.backward()
    return loss.detach(), output.detach()


def adamw_step(network: nn.Module, problem: Callable[..., tuple]) -> Callable[..., Tensor]:
    """A function that takes a step on ``problem(…)`` and returns the loss."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step(*arguments: int) -> Tensor:
        loss, _ = pass_through(network, *problem(*arguments))
        optimizer.step()
        return loss

    return step


def gradients(network: nn.Module) -> list[Tensor]:
    """The gradients of all parameters. Every parameter has one after a backward pass."""
    return [cast(Tensor, parameter.grad) for parameter in network.parameters()]


def _worst(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Maximum relative error of a gradient; absolute where it should be 0."""
    pairs = [(a.view(b.shape), b) for a, b in zip(found, expected, strict=True)]
    return max(relative(a, b) if b.any() else a.norm().item() for a, b in pairs)


def same_function(outputs: Sequence[Tensor], found: Iterable[Tensor], expected: Iterable[Tensor]) -> Differences:
    """Of two networks: maximum difference of the outputs, and maximum relative error of a parameter's gradient."""
    difference = (outputs[0] - outputs[1]).abs().max().item()
    return {"outputs": (difference, 1e-5), "gradients": (_worst(found, expected), 1e-4)}


def same_step(losses: Sequence[Tensor], sides: Sequence[Iterable[Tensor]], most: float = 1e-6) -> Differences:
    """Of a step computed in two ways: relative error of the second one's losses, and maximum one of its gradients."""
    return {"losses": (relative(losses[1], losses[0]), 1e-6), "gradients": (_worst(sides[1], sides[0]), most)}
