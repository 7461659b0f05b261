"""Data parallelism: modules whose gradients are averaged over ranks, and tensors that may be sharded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .devices import with_memory, without_values
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
