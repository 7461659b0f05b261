"""``guided_diffusion.dist_util``: the processes of a job, by this library's launchers (mpiexec, torchrun, srun)."""

from __future__ import annotations

import atexit
import contextlib
import io
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed

from . import storage
from .checkpoints.content import DamagedError
from .config import InputError, as_flag
from .distributed.launch import DistributedConfig, launch
from .distributed.world import ALONE, World

_job = contextlib.ExitStack()
_world = ALONE


def setup_dist() -> None:
    """Join the job that a launcher started, or become one of a single process, as torch.distributed's group.

    The job ends with the script, on all ranks together, also when one of them fails. InputError when it cannot start.
    """
    global _world
    if distributed.is_initialized():
        return
    _world = _job.enter_context(launch(DistributedConfig()))
    _job.callback(_leave)
    if _world.size == 1:
        backend = "cpu:gloo,cuda:nccl" if _world.device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
        _job.callback(distributed.destroy_process_group)
    sys.excepthook = _fail
    atexit.register(_job.close)


def _leave() -> None:
    global _world
    _world = ALONE
    sys.excepthook = sys.__excepthook__


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report what ends a script, to the other ranks too, which end with this one (see ``launch``)."""
    _job.__exit__(kind, error, trace)
    if isinstance(error, InputError):
        print(f"error: {error.message(as_flag)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def world() -> World:
    """The processes of the job that ``setup_dist`` joined; before, this process alone."""
    return _world


def dev() -> torch.device:
    """The device of this process."""
    if _world is ALONE and torch.cuda.is_available():
        return torch.device("cuda")
    return _world.device


def load_state_dict(path: str, **kwargs: Any) -> dict[str, Any]:
    """The state dict in a local or remote file of torch; each rank reads it, so that one alone can call this.

    kwargs: of torch.load, which reads plain data only (``weights_only``).

    Raises InputError for a file that is missing or damaged, and for a checkpoint of this library, which is more than a
    state dict.
    """
    data = storage.read_bytes(path)
    try:
        content = torch.load(io.BytesIO(data), **{**kwargs, "weights_only": True})
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DamagedError(f"{path} is not a file of weights: {reason:.200}") from error
    if isinstance(content, dict) and {"format", "role", "state"} <= content.keys():
        raise InputError(
            f"{path} is a checkpoint of diff_dalle, which diff-dalle sample and diff_dalle.load read as it is: for a "
            "script of Guided-Diffusion write its weights with diff-dalle convert --to guided_diffusion"
        )
    return content


@torch.no_grad()
def sync_params(params: Iterable[Tensor]) -> None:
    """Overwrite the parameters of all ranks with those of rank 0."""
    for parameter in params:
        _world.broadcast_tensor(parameter.data)
