"""Weights, gradients, optimizer states and averages divided among processes (torch's FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .devices import without_values
from .parallel import is_sharded, place
from .sharding_config import ShardingConfig
from .world import World


@dataclass(frozen=True)
class Parts:
    """A network's modules as they are gathered.

    blocks:  those that are gathered one by one, in the order of their use.
    full:    of modules inside blocks: those whose weights are used in fp32 whatever the precision.
    methods: the methods beside ``forward`` by which others run the network.
    half:    what the weights of blocks are gathered in; None = fp32.
    """

    blocks: Sequence[Any]
    full: set[nn.Module]
    methods: Sequence[str]
    half: torch.dtype | None


def build_sharded(
    build: Callable[[], nn.Module], parts: Callable[[nn.Module], Parts], world: World, config: ShardingConfig
) -> nn.Module:
    """The network that ``build`` makes, with rank 0's initial values, sharded on the world's device.

    Only rank 0 ever holds all of it, on the CPU. All tensors of the network must be parameters or buffers.
    """
    with without_values():
        network = build()
    shard(network, parts(network), world, config)
    network.to_empty(device=world.device)
    whole = dict(_tensors(build())) if world.is_main else {}
    for name, tensor in _tensors(network):
        place(tensor, whole.pop(name, None), world)
    return network


def _tensors(network: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


def shard(network: nn.Module, parts: Parts, world: World, config: ShardingConfig) -> None:
    """Divide the parameters of a network, in place. Parameters that are one number stay whole on every rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    options: dict[str, Any] = {
        "mesh": _mesh(config.groups(world), world.device.type),
        "reshard_after_forward": config.reshard_after_forward,
        "ignored_params": {parameter for parameter in network.parameters() if not parameter.ndim},
    }
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(parts.half, torch.float32, cast_forward_inputs=False) if parts.half else exact
    for block in parts.blocks:
        kept = [each for each in block.modules() if each in parts.full and list(each.parameters(recurse=False))]
        if parts.half and kept:
            fully_shard(kept, mp_policy=exact, **options)
        fully_shard(block, mp_policy=half, **options)
    fully_shard(network, mp_policy=exact, **options)
    for name in parts.methods:
        register_fsdp_forward_method(network, name)
    for i, block in enumerate(parts.blocks):
        if config.forward_prefetch:
            block.set_modules_to_forward_prefetch(parts.blocks[i + 1 : i + 1 + config.forward_prefetch])
        if config.backward_prefetch:
            before = parts.blocks[max(0, i - config.backward_prefetch) : i]
            block.set_modules_to_backward_prefetch(list(reversed(before)))


def _mesh(groups: list[list[int]], device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh(device, groups[0], mesh_dim_names=("shard",))
    return DeviceMesh(device, groups, mesh_dim_names=("copy", "shard"))


class Shards:
    """A task whose network is sharded, called as ``Replicas`` is.

    Gradients are reduced to shards by the network's own hooks; those of parameters that are whole on every rank are
    averaged here.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], world: World):
        self.module, self.world, self.sync = module, world, True
        self.networks: list[Any] = [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
        for parameter in parameters:
            if not is_sharded(parameter):
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        if self.sync and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.world.size

    def __call__(self, *arguments: Any, sync: bool) -> Any:
        """The task's output; ``sync`` requests the reduction of gradients in the following backward pass."""
        self.sync = sync
        for network in self.networks:
            network.set_requires_gradient_sync(sync, recurse=False)
        return self.module(*arguments)
