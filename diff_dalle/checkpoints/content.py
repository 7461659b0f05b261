"""What a checkpoint file must be, checked before anything is made of it: its archive, its header, its state.

A file may be damaged, foreign or hostile. Every check is bounded in memory and time, and fails with an InputError.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickletools
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from .. import storage
from ..config import InputError

MAX_PICKLE = 16 * 2**20  # bytes of everything but the tensors' values; a network of 10^9 weights has under 1 MiB
MAX_VALUES = 500_000  # of a state or config; the optimizer of a network with 10^5 weight tensors has as many
MAX_DEPTH = 32
MAX_TENSORS = 20_000  # of a network or LoRA; our largest cascade has a tenth
MAX_NAME = 500  # characters, of a tensor
MAX_DIMENSIONS = 8  # our networks have at most five
MAX_ELEMENTS = 2**40  # of a tensor, dimensions of zero left out: none is larger, and strides fit 64 bits
MAX_COUNT = 2**63 - 1  # of steps and samples

MAX_OPERATIONS = 2_000_000  # the optimizer of a network with 10,000 weight tensors needs 1.6 million
_CALLS = {"REDUCE", "NEWOBJ"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # an object below what they take
_GETS, _PUTS = {"GET", "BINGET", "LONG_BINGET"}, {"PUT", "BINPUT", "LONG_BINPUT"}
_PLAIN = {each.name for each in pickletools.opcodes if each.stack_after and not each.stack_before} - {"MARK"} - _GETS
# The number of values in an object, repeated ones included; in a list if more may be put into the object.
_Object: TypeAlias = "int | list[int]"

LEGACY = b"l\xfc\x9cF\xf9 j\xa8P\x19."  # the end of the first of a file's pickles, before torch 1.6: a number
_LEGACY_PICKLES = 5  # that number, the version, the machine, what was saved, and the order of the values, which follow


class DamagedError(InputError):
    """A checkpoint file that is missing, truncated or malformed, so that an earlier checkpoint may serve instead."""


@contextlib.contextmanager
def as_local_file(path: str) -> Iterator[str]:
    """A local file with the content of ``path``, for the duration of the block; what is mapped from it stays."""
    if not storage.is_remote(path):
        yield storage.local_path(path)
        return
    with tempfile.TemporaryDirectory(prefix="diff_dalle-", ignore_cleanup_errors=True) as folder:
        local = os.path.join(folder, "checkpoint")
        with storage.explained(path), storage.open_read(path) as source, open(local, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        yield local


def read_archive(path: str, values: bool) -> tuple[Any, int]:
    """What torch saved in a file, on the CPU and memory-mapped, and the file's size in bytes. A file of torch before
    version 1.6 is read whole.

    values: compare all of the file with its checksums, where it has any.

    DamagedError when it is missing, is not what torch writes, or holds anything but plain data.
    """
    if not storage.exists(path):
        raise DamagedError(f"checkpoint {path} does not exist")
    with as_local_file(path) as local:
        try:
            with storage.open_read(local) as file:
                if legacy := file.read(4 + len(LEGACY)).endswith(LEGACY):
                    _check_legacy(file, path)
                else:
                    _check_archive(file, path, values)
                size = file.seek(0, os.SEEK_END)
        except InputError as error:  # a folder, no permission
            raise DamagedError(str(error)) from None
        try:
            content = torch.load(local, map_location="cpu", weights_only=True, mmap=not legacy)
        except Exception:  # torch raises many kinds on malformed archives and pickles
            raise DamagedError(f"{path} is truncated or is not a PyTorch file of plain tensors") from None
    return content, size


def _check_archive(file: BinaryIO, path: str, values: bool) -> None:
    """DamagedError unless the file is an uncompressed zip archive, as torch writes them, whose entries lie within it.

    values: read the whole file and compare it with its checksums. torch believes the sizes that the archive claims, and
            ignores the checksums that it writes.
    """
    size, data = file.seek(0, 2), b""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # torch finds names in any case
            pickles = [entry for entry in entries if entry.filename.rpartition("/")[2].lower() == "data.pkl"]
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or len(pickles) != 1 or sum(entry.file_size for entry in entries) > size:
                raise ValueError
            wrong, length = archive.testzip() if values else None, pickles[0].file_size
            if wrong is None and length <= MAX_PICKLE:
                data = archive.read(pickles[0])
    except Exception:  # zipfile raises many kinds on malformed headers
        raise DamagedError(f"{path} is truncated or is not a PyTorch file of plain tensors") from None
    if wrong is not None:
        raise DamagedError(f"{path} is damaged: the checksum of its entry {short(wrong)} is wrong")
    if length > MAX_PICKLE:
        raise DamagedError(f"{path} holds {length:,} bytes beside its tensors, more than {MAX_PICKLE:,}")
    _check_pickles(io.BytesIO(data), 1, path, f"{path} is truncated or is not a PyTorch file of plain tensors")


def _check_legacy(file: BinaryIO, path: str) -> None:
    """DamagedError unless such a file has few bytes beside its tensors. It has no checksums."""
    file.seek(0)
    malformed = f"{path} is truncated, or holds more than {MAX_PICKLE:,} bytes beside its tensors"
    _check_pickles(io.BytesIO(file.read(MAX_PICKLE)), _LEGACY_PICKLES, path, malformed)


def _check_pickles(file: BinaryIO, count: int, path: str, malformed: str) -> None:
    try:
        needed = operations(file, count)
    except Exception:  # pickletools raises many kinds
        raise DamagedError(malformed) from None
    if needed > MAX_OPERATIONS:
        raise DamagedError(f"{path} needs more than {MAX_OPERATIONS:,} operations to be read")


def operations(file: BinaryIO, pickles: int = 1) -> int:
    """The operations of consecutive pickles, and the values in the arguments of the functions that they call: a shape
    of many dimensions costs each tensor that repeats it. Any number above ``MAX_OPERATIONS`` if there are more.

    Raises exceptions of many kinds for malformed pickles.
    """
    total = 0
    for _ in range(pickles):
        stack: list[_Object] = []
        marks: list[int] = []
        memo: dict[Any, _Object] = {}
        for operation, argument, _ in pickletools.genops(file):
            total += 1
            name = operation.name
            if name in _GETS:
                stack.append(memo[argument])
            elif name in _PUTS:
                memo[argument] = stack[-1]
            elif name in _PLAIN:
                stack.append([1] if name.startswith("EMPTY") else 1)
            elif name == "MARK":
                marks.append(len(stack))
            else:
                values = _combine(operation, stack, marks)
                total += values if name in _CALLS else 0
            if total > MAX_OPERATIONS:
                return total
    return total


def _combine(operation: pickletools.OpcodeInfo, stack: list[_Object], marks: list[int]) -> int:
    """Do an operation that takes objects off the stack; the number of values in them."""
    name, takes = operation.name, operation.stack_before
    first = marks.pop() if pickletools.markobject in takes else len(stack) - len(takes) + (name in _FILLS)
    values = min(sum(each if isinstance(each, int) else each[0] for each in stack[first:]), MAX_OPERATIONS)
    del stack[first:]
    if name in _FILLS:
        filled = stack[-1]
        assert isinstance(filled, list)
        filled[0] = min(filled[0] + values, MAX_OPERATIONS)
    elif operation.stack_after:
        stack.append([1 + values] if name in _CALLS else 1 + values)
    return values


def is_whole_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_plain_text(value: Any) -> bool:
    return type(value) is str


#: Names of entries of a file, a test of their values, and what these must be.
Entries: TypeAlias = "tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...]"
_HEADER: Entries = (
    (("format", "step", "samples"), is_whole_number, "a whole number"),
    (("role", "kind", "trainee", "vocabulary"), is_plain_text, "a text"),
    (("tokenizer",), lambda value: value is None or type(value) is str, "a text"),
    (("state",), lambda value: type(value) is dict, "a mapping"),
)


def check_entries(content: Mapping[str, Any], entries: Entries, path: str) -> None:
    """DamagedError unless every one of the ``entries`` has its type and a possible value. KeyError for a missing
    one."""
    for names, fits, what in entries:
        for name in names:
            if not fits(content[name]):
                raise DamagedError(f"{path} is damaged: its {name} is {short(content[name])}, but must be {what}")


def check_header(content: Mapping[str, Any], path: str) -> None:
    """DamagedError unless every entry that ``save_file`` writes has its type and a possible value."""
    check_entries(content, _HEADER, path)
    if type(content["config"]) is not dict or not all(map(is_plain, leaves_of(content["config"], path, "config"))):
        raise DamagedError(f"{path} is damaged: its config must be a mapping of settings with plain values")


def leaves_of(value: Any, path: str, name: str) -> Iterator[Any]:
    """What the nested dicts and lists of a file hold. DamagedError when they are nested too deeply, hold too many
    values, repeated ones included, or have keys other than texts and whole numbers."""
    left = MAX_VALUES

    def visit(value: Any, depth: int) -> Iterator[Any]:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise DamagedError(
                f"{path} is damaged: its {name} holds more than {MAX_VALUES:,} values or {MAX_DEPTH} levels"
            )
        if type(value) is dict:
            for key, item in value.items():
                if type(key) not in (str, int):
                    raise DamagedError(f"{path} is damaged: its {name} has the key {short(key)}, which is no text")
                yield from visit(item, depth + 1)
        elif type(value) is list:
            for item in value:
                yield from visit(item, depth + 1)
        else:
            yield value

    return visit(value, 0)


def replaced(state: Any, call: Callable[[Tensor], Any]) -> Any:
    """A state of nested dicts and lists with ``call(tensor)`` in place of each tensor, in their order."""
    if isinstance(state, Tensor):
        return call(state)
    if isinstance(state, Mapping):
        return {key: replaced(value, call) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [replaced(value, call) for value in state]
    return state


def numbered(state: Any) -> tuple[Any, list[Tensor]]:
    """A state with a number in place of each tensor, and the tensors."""
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.tensor(len(tensors) - 1)

    return replaced(state, number), tensors


def is_plain(value: Any) -> bool:
    """Whether a value is a text, None, or a number of ordinary size."""
    if type(value) is int:
        return abs(value) <= MAX_COUNT
    return value is None or type(value) in (str, float, bool)


def is_shape(shape: Sequence[int]) -> bool:
    """Whether a tensor of a network may have a shape."""
    return (
        len(shape) <= MAX_DIMENSIONS and min(shape, default=0) >= 0 and math.prod(filter(None, shape)) <= MAX_ELEMENTS
    )


def check_names(names: Collection[Any], path: str) -> None:
    """DamagedError for more tensors, or for longer names of them, than networks have."""
    if len(names) > MAX_TENSORS:
        raise DamagedError(f"{path} is damaged: it has {len(names):,} tensors, more than {MAX_TENSORS:,}")
    for name in names:
        if type(name) is str and len(name) > MAX_NAME:
            rule = f"whose name has more than {MAX_NAME} characters"
            raise DamagedError(f"{path} is damaged: it has a tensor {short(name)}…, {rule}")


def is_whole(value: Any) -> bool:
    """Whether a value is an ordinary tensor that has stored as many numbers as its shape says."""
    return (
        type(value) is Tensor
        and is_shape(value.shape)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def check_state(content: Mapping[str, Any], path: str, size: int) -> None:
    """DamagedError unless the state of a file of ``size`` bytes consists of tensors and plain values, and a model's of
    named tensors; and unless they fit into the file: tensors may share values, and copies of them need more memory."""
    total = 0
    for value in leaves_of(content["state"], path, "state"):
        if is_whole(value):
            total += value.numel() * value.element_size()
        elif not is_plain(value):
            raise DamagedError(f"{path} is damaged: its state holds {short(value)}, which is no tensor of plain values")
    if total > size:
        raise DamagedError(f"{path} is damaged: it has {size:,} bytes, but its tensors would need {total:,}")
    if content["role"] not in ("model", "ema"):
        return
    check_names(content["state"], path)
    for name, value in content["state"].items():
        if type(name) is not str or type(value) is not Tensor:
            raise DamagedError(f"{path} is damaged: its weight {short(name)} is {short(value)}, but must be a tensor")


def check_like(own: Any, given: Any, name: str) -> None:
    """InputError unless ``given`` has the structure of ``own``: the same keys, shapes, dtypes and kinds of numbers. An
    optimizer in ``own`` stands for its state."""
    if isinstance(own, torch.optim.Optimizer):
        _check_optimizer(own, given, name)
    elif isinstance(own, Tensor):
        if not _is_tensor(given) or given.shape != own.shape or given.dtype != own.dtype:
            raise InputError(f"{name} is {short(given)}, but must be {short(own)}")
    elif isinstance(own, Mapping):
        if not isinstance(given, Mapping) or given.keys() != own.keys():
            raise InputError(f"{name} is {short(given)}, but must have {', '.join(map(str, own)) or 'no entries'}")
        for key, value in own.items():
            check_like(value, given[key], f"{name}.{key}")
    elif isinstance(own, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(own):
            raise InputError(f"{name} is {short(given)}, but must have {len(own)} entries")
        for i, value in enumerate(own):
            check_like(value, given[i], f"{name}[{i}]")
    elif type(given) is not type(own):
        raise InputError(f"{name} is {short(given)}, but must be a {type(own).__name__}")


def _check_optimizer(optimizer: torch.optim.Optimizer, given: Any, name: str) -> None:
    """InputError unless ``given`` can be a state of ``optimizer``: its groups have as many parameters, and what it
    keeps for each has the parameter's shape or is one number."""
    groups = given.get("param_groups") if isinstance(given, Mapping) else None
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(groups, list) or [_parameters(group) for group in groups] != counts:
        raise InputError(f"{name}.param_groups must hold {' + '.join(map(str, counts))} parameters")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(parameters))):
        raise InputError(f"{name}.param_groups must number the parameters from 0 on")
    kept = given.get("state")
    if not isinstance(kept, Mapping) or not set(kept) <= set(numbers):
        raise InputError(f"{name}.state must hold the state of some of the {len(parameters)} parameters")
    for number, entry in kept.items():
        if not isinstance(entry, Mapping):
            raise InputError(f"{name}.state[{number}] is {short(entry)}, but must be a mapping")
        for key, value in entry.items():
            where = f"{name}.state[{number}].{key}"
            if not _is_tensor(value) or value.shape not in (parameters[number].shape, torch.Size()):
                shape = tuple(parameters[number].shape)
                raise InputError(f"{where} is {short(value)}, but must be a number or a tensor of shape {shape}")
            if key == "step" and (value.ndim or not (value.is_meta or 0 <= float(value) < math.inf)):
                raise InputError(f"{where} must be one number that is finite and not negative")


def _is_tensor(value: Any) -> bool:
    """Whether a value is an ordinary tensor, or stands for one whose values are elsewhere."""
    return isinstance(value, Tensor) and (value.is_meta or is_whole(value))


def _parameters(group: Any) -> int:
    """The number of parameters in a group of a saved optimizer; -1 if it is none."""
    numbers = group.get("params") if isinstance(group, Mapping) else None
    return len(numbers) if isinstance(numbers, list) and all(type(number) is int for number in numbers) else -1


def short(value: Any) -> str:
    """A value for a message: the shape of a tensor, the kind of a container."""
    if isinstance(value, Tensor):
        many = f"with {value.ndim:,} dimensions"
        return f"a {value.dtype} tensor {many if value.ndim > MAX_DIMENSIONS else f'of shape {tuple(value.shape)}'}"
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        return "a number of 2^63 or more"  # Python refuses to write some as text
    if isinstance(value, (str, int, float)) or value is None:
        return repr(value[:60] if isinstance(value, str) else value)
    return f"a {type(value).__name__}"
