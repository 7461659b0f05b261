"""A whole training step: Guided-Diffusion's network and loop as published, against ours.

The network is that of its 64-pixel model (flags ``--attention_resolutions 32,16,8 --num_head_channels 64
--num_res_blocks 3 --resblock_updown True``) at 64 channels instead of 192, without classes and dropout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..models.layers import to_channels_last
from ..models.unet import UNet, UNetConfig
from ..training.ema import Ema
from ..training.optim import OptimConfig, build_optimizer
from .baseline_unet import BaselineUNet, to_baseline

NETWORK = UNetConfig(
    image_size=64, num_channels=64, num_res_blocks=3, attention_resolutions=(32, 16, 8), num_head_channels=64,
    resblock_updown=True,
)  # fmt: skip
BATCH_SIZE, LR, EMA_RATE = 4, 3e-4, 0.9999


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, timesteps, and what the network should say about them."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, BATCH_SIZE, 3, NETWORK.image_size, NETWORK.image_size, generator=generator)
    return x, torch.linspace(0, 999, BATCH_SIZE), target


def networks() -> tuple[UNet, BaselineUNet]:
    """The two networks with the same weights, none of them 0 (a new network is, and would hide every difference)."""
    ours, baseline = to_channels_last(UNet(NETWORK)), BaselineUNet(NETWORK)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        for parameter, value in zip(baseline.parameters(), to_baseline(ours, list(ours.parameters())), strict=True):
            parameter.copy_(value)
    return ours, baseline


def loss_of(network: nn.Module, x: Tensor, t: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(mean squared error, output)."""
    output = network(x, t)
    return (output - target).square().mean(), output


def gate() -> dict[str, tuple[float, float]]:
    """Largest difference of the outputs, and of any parameter's gradient relative to its norm."""
    ours, baseline = networks()
    outputs = []
    for network in (ours, baseline):
        loss, output = loss_of(network, *problem())
        loss.backward()
        outputs.append(output.detach())
    own = to_baseline(ours, [parameter.grad for parameter in ours.parameters()])
    pairs = [(a, p.grad) for a, p in zip(own, baseline.parameters(), strict=True)]
    gradient = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return {"outputs": ((outputs[0] - outputs[1]).abs().max().item(), 1e-5), "gradients": (gradient, 1e-4)}


def ours() -> Callable[[], object]:
    """Fused AdamW; the gradient's norm and the EMA computed on lists of tensors; nothing read back."""
    network, batch = to_channels_last(UNet(NETWORK)), problem()
    optimizer, ema = build_optimizer(OptimConfig(lr=LR), network), Ema(EMA_RATE, network)
    parameters = list(network.parameters())

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(network, *batch)[0]
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        optimizer.step()
        ema.update(1)
        return loss, norm

    return step


def baseline() -> Callable[[], object]:
    """AdamW and EMA tensor by tensor; the loss and every parameter's two norms are read back at each step."""
    network, batch = BaselineUNet(NETWORK), problem()
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, foreach=False, fused=False)
    averages = [parameter.detach().clone() for parameter in parameters]

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(network, *batch)[0]
        loss.backward()
        norms = [(p.detach().norm().item() ** 2, p.grad.norm().item() ** 2) for p in parameters]
        optimizer.step()
        for average, parameter in zip(averages, parameters, strict=True):
            average.mul_(EMA_RATE).add_(parameter.detach(), alpha=1 - EMA_RATE)
        return loss.item(), norms

    return step
