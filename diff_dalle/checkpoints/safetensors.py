"""Files of named tensors and texts about them, in the safetensors format: eight bytes with the length of a JSON header,
the header, the elements. Read and written here, since such files are a core part and the format needs no package."""

from __future__ import annotations

import hashlib
import json
import math
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
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype = torch.float32
) -> None:
    """Write tensors, as ``dtype``, float32 or float16, and texts, with a checksum of the elements. The same content
    gives the same bytes."""
    header: dict[str, object] = {}
    values, start, checksum = [], 0, hashlib.sha256()
    kind = next(name for name, known in _DTYPES.items() if known == dtype)
    for name in sorted(tensors):
        value = tensors[name].detach().to("cpu", dtype).contiguous()
        end = start + value.element_size() * value.numel()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [start, end]}
        values.append(value.numpy().astype(value.numpy().dtype.newbyteorder("<"), copy=False).tobytes())
        checksum.update(values[-1])
        start = end
    texts = {**metadata, CHECKSUM: checksum.hexdigest()}
    text = json.dumps({METADATA: dict(sorted(texts.items())), **header}, ensure_ascii=False, separators=(",", ":"))
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % 8)  # elements begin at a multiple of 8
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for data in values:
        file.write(data)


def read_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, as float32, and its texts. DamagedError for a file of anything else."""
    data = storage.read_bytes(path)
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
        tensors[name] = raw.view(_DTYPES[header[name]["dtype"]]).float().view(header[name]["shape"])
    return tensors, metadata


def _span(entry: object) -> tuple[int, int]:
    """Where a tensor's elements are. ValueError for a header that does not say it."""
    if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
        raise ValueError("it holds something else than floating-point numbers of 16 or 32 bits")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    for each in (shape, offsets):
        if not isinstance(each, list) or not all(type(number) is int and 0 <= number < 2**48 for number in each):
            raise ValueError("its header is malformed")
    size = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize  # type: ignore[arg-type]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:  # type: ignore[arg-type,index]
        raise ValueError("its header is malformed")
    return offsets[0], offsets[1]  # type: ignore[index]
