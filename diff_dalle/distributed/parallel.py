"""Data parallelism: modules whose gradients are averaged over ranks, and weights, gradients, optimizer states and
averages that are divided among them (torch's FSDP2)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .devices import with_memory, without_values
from .sharding_config import ShardingConfig
from .world import World


class Replicas:
    """A module replicated on every rank (DistributedDataParallel); on one process the module itself.

    parameters: those whose gradients are exchanged, a subset of the module's.
    init_sync:  give every rank rank 0's values; False where they are known to be equal.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], world: World, init_sync: bool = True):
        self.module, self.world = module, world
        self.parallel: nn.Module = module
        if world.size > 1:
            exchanged = {id(parameter) for parameter in parameters}
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            others = [parameter for parameter in trained if id(parameter) not in exchanged]
            for parameter in others:  # DDP exchanges what requires a gradient when it is constructed
                parameter.requires_grad_(False)
            ids = [world.device.index] if world.device.type == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(
                module, device_ids=ids, init_sync=init_sync, gradient_as_bucket_view=True
            )
            _arrange_buckets(self.parallel)
            for parameter in others:
                parameter.requires_grad_(True)

    def __call__(self, *arguments: Any, sync: bool) -> Any:
        """The module's output; ``sync`` requests the exchange of gradients in the following backward pass."""
        if isinstance(self.parallel, nn.parallel.DistributedDataParallel):
            self.parallel.require_backward_grad_sync = sync  # what its own no_sync() sets
        return self.parallel(*arguments)


def _arrange_buckets(parallel: nn.parallel.DistributedDataParallel) -> None:
    """Give the buckets of gradients the arrangement that they keep.

    After its first backward pass, DistributedDataParallel arranges them anew, and the sums of three and more ranks are
    then rounded otherwise, so that a resumed run would differ from one that went on. Here a backward pass of gradients
    of 0, in the order of the parameters, takes the place of the first one.
    """
    exchanged = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    parallel.reducer.prepare_for_backward([])
    torch.stack([0 * parameter.flatten()[0] for parameter in exchanged]).sum().backward()
    parallel.reducer._rebuild_buckets()
    for parameter in exchanged:
        parameter.grad = None


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Its module takes half a second to import; the code that shards imports it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Iterable[Any]) -> list[Tensor]:
    """This rank's shard of each tensor: the tensor itself unless it is sharded. Shares its memory."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def own_rows(tensor: Any) -> tuple[int, Tensor]:
    """This rank's share of a tensor, which is divided along its first dimension if at all, and the number of the
    share's first row. Shares its memory."""
    if not is_sharded(tensor):
        return 0, tensor
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size(mesh.ndim - 1))  # of every share but the last ones
    return min(len(tensor), rows * mesh.get_local_rank(mesh.ndim - 1)), tensor.to_local()


def is_written(tensor: Any, world: World) -> bool:
    """Whether this rank writes its share of a tensor in a checkpoint, of which other ranks may have copies."""
    return not any(tensor.device_mesh.get_coordinate()[:-1]) if is_sharded(tensor) else world.is_main


def gathered(state: Mapping[str, Any], world: World) -> dict[str, Tensor]:
    """A state dict with whole tensors, on the CPU of rank 0; nothing on the others. Every rank calls it."""
    found = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if world.is_main:
            found[name] = whole.cpu()
    return found


@torch.no_grad()
def place(target: Tensor, whole: Tensor | None, world: World) -> None:
    """Overwrite ``target``, of which each rank may have a share, with rank 0's ``whole`` of the same shape."""
    sent = torch.empty(target.shape, dtype=target.dtype, device=world.device)
    if whole is not None:
        sent.copy_(whole)
    world.broadcast_tensor(sent.view(-1).view(torch.uint8))  # as bytes, which every backend exchanges
    first, own = own_rows(target)
    own.copy_(sent[first : first + len(own)] if own.ndim else sent)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, over all shards: the same scalar on every rank."""
    sharded: list[Any] = [each for each in gradients if is_sharded(each)]
    whole = [each for each in gradients if not is_sharded(each)]
    norms = [torch.nn.utils.get_total_norm(whole)] if whole else []
    if sharded:
        # Not of the sharded tensors themselves, whose dispatch takes seconds the first time.
        squared = torch.nn.utils.get_total_norm(local(sharded)).square()
        mesh = sharded[0].device_mesh
        torch.distributed.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))
        norms.append(squared.sqrt())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def discard_gathered(module: nn.Module) -> None:
    """Free the weights that a sharded module has gathered, so that it gathers them again after a change."""
    for each in module.modules():
        if reshard := getattr(each, "reshard", None):
            reshard()


def build_shared(build: Callable[[], nn.Module], world: World) -> nn.Module:
    """The module that ``build`` makes, with rank 0's initial values on every rank.

    The other ranks build it on the meta device, so that no random number is drawn and nothing is initialized twice,
    and receive the values tensor by tensor. All tensors of the module must be parameters or buffers.
    """
    if world.is_main:
        module = build()
    else:
        with without_values():
            module = build()
        module = with_memory(module, "cpu")
    for tensor in [*module.parameters(), *module.buffers()]:
        world.broadcast_tensor(tensor.data)
    return module


# --------------------------------------------------------------------------------------- shards of networks (FSDP2)


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
