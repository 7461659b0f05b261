"""Saving and loading sharded states: torch.distributed.checkpoint plans who writes and reads what, into the folders of
``shards.py``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import storage
from ..distributed.world import World
from ..errors import InputError
from .checkpoint import INDEX
from .shards import ShardedFolder, Stored, numbered


def save_sharded(folder: str, states: Mapping[str, Any], world: World, write_index: Callable[[dict], None]) -> None:
    """Write states by role, whose tensors may be sharded, into a folder. Every rank calls it.

    write_index: rank 0 calls it last, with the state of the index.

    InputError, on all ranks, when one of them cannot write.
    """
    outline, tensors = numbered(states)
    writer = _Writer(folder, world.rank, outline, write_index)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state = {str(number): tensor for number, tensor in enumerate(tensors)}
    _explained(lambda: dcp_save(state, storage_writer=writer, planner=planner))


def load_sharded(folder: ShardedFolder, targets: Mapping[int, Tensor]) -> None:
    """Fill sharded or whole tensors, by their number, with the values in a folder. Every rank calls it."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state = {str(number): tensor for number, tensor in targets.items()}
    _explained(lambda: dcp_load(state, storage_reader=_Reader(folder), planner=planner))


def _explained(call: Callable[[], object]) -> None:
    """Raise, on all ranks, the InputError that one of them met."""
    try:
        call()
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if isinstance(failure, InputError):
            raise type(failure)(f"rank {rank}: {failure}" if rank else str(failure)) from None
        raise


class _Plain:
    """What a reader and a writer need not do."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Writer(_Plain, StorageWriter):
    """One file for each rank that has something to write."""

    def __init__(self, folder: str, rank: int, outline: Any, write_index: Callable[[dict], None]):
        self.folder, self.name = folder, f"rank{rank:05d}.bin"
        self.outline, self.write_index = outline, write_index

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """An index of an earlier, interrupted attempt must not outlive its files."""
        storage.make_dirs(self.folder)
        if storage.exists(storage.join(self.folder, INDEX)):
            storage.remove(storage.join(self.folder, INDEX))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with storage.atomic_writer(storage.join(self.folder, self.name)) as file:
            for item in plan.items:
                tensor: Any = planner.resolve_data(item)
                own = tensor.detach().cpu().contiguous()
                data = own.reshape(-1).view(torch.uint8).numpy().data
                where = (self.name, file.tell(), len(data), zlib.crc32(data), own.shape)
                file.write(data)
                results.append(WriteResult(item.index, len(data), where))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: dict[str, list[tuple]] = {}
        for result in (each for part in results for each in part):
            written.setdefault(result.index.fqn, []).append((tuple(result.index.offset or ()), *result.storage_data))
        files = sorted({name for chunks in written.values() for _, name, *_ in chunks})
        numbers = {name: number for number, name in enumerate(files)}
        tensors = []
        for key in sorted(written, key=int):
            found: Any = metadata.state_dict_metadata[key]
            rows = [
                [offset[0] if offset else 0, shape[0] if shape else 1, numbers[name], *place]
                for offset, name, *place, shape in sorted(written[key])
            ]
            rows = [row for row in rows if row[1]]  # without those of ranks that have no share
            table = torch.tensor(rows, dtype=torch.int64).view(-1, 6)
            tensors.append(Stored(found.size, found.properties.dtype, table).plain())
        self.write_index({"states": self.outline, "tensors": tensors, "files": files})


class _Reader(_Plain, StorageReader):
    def __init__(self, folder: ShardedFolder):
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = {str(number): _described(stored) for number, stored in enumerate(self.folder.tensors)}
        return Metadata(dict(found))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            number, offset = int(item.storage_index.fqn), tuple(item.storage_index.offset or ())
            firsts = self.folder.tensors[number].rows[:, 0].tolist()
            found = self.folder.read_chunk(number, firsts.index(offset[0] if offset else 0))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                found = found.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _described(stored: Stored) -> TensorStorageMetadata:
    rest = stored.shape[1:]
    chunks = [
        ChunkStorageMetadata(torch.Size([first, *(0 for _ in rest)]), torch.Size([count, *rest]))
        if stored.shape
        else ChunkStorageMetadata(torch.Size(), torch.Size())
        for first, count, *_ in stored.rows.tolist()
    ]
    return TensorStorageMetadata(TensorProperties(stored.dtype), stored.shape, chunks)
