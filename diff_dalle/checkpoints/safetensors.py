"""Files of named tensors and texts about them, in the safetensors format: eight bytes with the length of a JSON header,
the header, the elements. Read and written here, since such files are a core part and the format needs no package."""

from __future__ import annotations

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
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, as float32, and texts. The same content gives the same bytes."""
    header: dict[str, object] = {METADATA: dict(sorted(metadata.items()))}
    values, start = [], 0
    for name in sorted(tensors):
        value = tensors[name].detach().float().cpu().contiguous()
        end = start + 4 * value.numel()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, end]}
        values.append(value)
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for value in values:
        file.write(value.numpy().astype("<f4", copy=False).tobytes())


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
