"""Files of named tensors and texts about them, in the safetensors format: eight bytes with the length of a JSON header,
the header, the elements. Read and written here, since such files are a core part and the format needs no package."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..data.safetensors_header import header_of
from .content import DamagedError

MAX_HEADER = 2**24  # bytes; 10^5 tensors have as many
METADATA = "__metadata__"
CHECKSUM = "sha256"  # of the elements, among the texts; other writers leave it out
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**_FLOATS, "I64": torch.int64}  # the counts of norms are whole numbers


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype = torch.float32
) -> None:
    """Write tensors, as ``dtype``, float32 or float16 (int64 ones as they are), and texts, with a checksum of the
    elements. The same content gives the same bytes."""
    header: dict[str, object] = {}
    start, checksum = 0, hashlib.sha256()
    for name in sorted(tensors):
        elements = _elements(tensors[name], dtype)
        kind = "I64" if tensors[name].dtype == torch.int64 else next(key for key in _FLOATS if _FLOATS[key] == dtype)
        span = [start, start + elements.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": span}
        checksum.update(elements)
        start = span[1]
    texts = {**metadata, CHECKSUM: checksum.hexdigest()}
    text = json.dumps({METADATA: dict(sorted(texts.items())), **header}, ensure_ascii=False, separators=(",", ":"))
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % 8)  # elements begin at a multiple of 8
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for name in sorted(tensors):
        file.write(_elements(tensors[name], dtype))  # made again, since all of them need as much memory as the file


def _elements(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The bytes of a tensor's elements."""
    value = tensor.detach().to("cpu", torch.int64 if tensor.dtype == torch.int64 else dtype).contiguous().numpy()
    return value.astype(value.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data


def tensor_names(path: str) -> list[str]:
    """The names of the tensors in a file, whose header alone is read. DamagedError for a file of anything else."""
    return [name for name in _header(path) if name != METADATA]


def text_of(path: str, name: str) -> str:
    """One of the texts in a file, whose header alone is read; "" = it has none. Errors as for ``tensor_names``."""
    texts = _header(path).get(METADATA)
    found = texts.get(name) if isinstance(texts, dict) else None
    return found if isinstance(found, str) else ""


def _header(path: str) -> dict:
    size = int.from_bytes(storage.read_bytes(path, 0, 8), "little")
    try:
        return header_of(storage.read_bytes(path, 0, 8 + min(size, MAX_HEADER)), MAX_HEADER)[0]
    except ValueError as error:
        raise DamagedError(f"{path} is damaged or no safetensors file: {error}") from None


def read_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, floating-point ones as float32, and its texts. DamagedError for a file of anything
    else."""
    data = _content(path)
    try:
        header, begin = header_of(data, MAX_HEADER)
        metadata = header.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not texts")
        spans = {name: _span(entry) for name, entry in header.items()}
        end = 0
        for start, stop in sorted(spans.values()):
            if start != end:
                raise ValueError("its tensors overlap or leave gaps")
            end = stop
        if end != len(data) - begin:
            raise ValueError(f"its tensors have {end:,} bytes, but {len(data) - begin:,} follow its header")
        if metadata.pop(CHECKSUM, None) not in (None, hashlib.sha256(memoryview(data)[begin:]).hexdigest()):
            raise ValueError("the checksum of its tensors is wrong")
    except ValueError as error:
        raise DamagedError(f"{path} is damaged or no safetensors file: {error}") from None
    tensors = {}
    for name, (start, stop) in spans.items():
        raw = torch.from_numpy(np.frombuffer(data, np.uint8, stop - start, begin + start).copy())
        dtype = _DTYPES[header[name]["dtype"]]
        value = raw.view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
        tensors[name] = (value.float() if value.is_floating_point() else value).view(header[name]["shape"])
    return tensors, metadata


def _content(path: str) -> bytes | mmap.mmap:
    """A file's bytes; those of a local one are mapped, since there may be as many as the memory has."""
    if storage.is_remote(path) or not storage.size_and_tag(path)[0]:
        return storage.read_bytes(path)
    with storage.open_read(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _span(entry: object) -> tuple[int, int]:
    """Where a tensor's elements are. ValueError for a header that does not say it."""
    if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
        raise ValueError("it holds something else than floating-point numbers of 16 or 32 bits and whole ones of 64")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    for each in (shape, offsets):
        if not isinstance(each, list) or not all(type(number) is int and 0 <= number < 2**48 for number in each):
            raise ValueError("its header is malformed")
    size = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize  # type: ignore[arg-type]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:  # type: ignore[arg-type,index]
        raise ValueError("its header is malformed")
    return offsets[0], offsets[1]  # type: ignore[index]
