"""Files of named tensors and texts about them, in the safetensors format: eight bytes with the length of a JSON header,
the header, the elements. The package of that name reads them; it would write the texts in another order each time, and
needs the memory for all tensors at once.

A file of weights has the header of the checkpoint that they are from among its texts: half the size, and readable by
any program that reads the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..config import InputError, cut, named
from .content import DamagedError, as_local_file, check_names, is_shape

WEIGHTS = ".safetensors"  # how the names of such files end
FORMAT = "diff_dalle weights 1"  # of files of weights
LORA_FORMAT = "diff_dalle LoRA 1"  # of LoRAs, which end alike; see lora_file.py
HEADER = ("format", "role", "step", "samples", "trainee", "kind", "config", "tokenizer", "vocabulary")
MAX_HEADER = 2**23  # bytes; 20,000 tensors and a vocabulary have half of it
METADATA = "__metadata__"
CHECKSUM = "sha256"  # of the elements, among the texts; other writers leave it out
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}  # the counts of norms are whole numbers
_TYPES = (*_NAMES.values(), "BF16")


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype = torch.float32
) -> None:
    """Write tensors, as ``dtype``, float32 or float16 (int64 ones as they are), and texts, with a checksum of the
    elements. The same content gives the same bytes."""
    header: dict[str, object] = {}
    start, checksum = 0, hashlib.sha256()
    for name in sorted(tensors):
        elements = _elements(tensors[name], dtype)
        kind = tensors[name].dtype if tensors[name].dtype == torch.int64 else dtype
        span = [start, start + elements.nbytes]
        header[name] = {"dtype": _NAMES[kind], "shape": list(tensors[name].shape), "data_offsets": span}
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
    try:
        header = json.loads(storage.read_bytes(path, 8, _header_size(path)))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _damaged(path, "it has no header")
    return header


def _header_size(path: str) -> int:
    size = int.from_bytes(storage.read_bytes(path, 0, 8), "little")
    if size > MAX_HEADER:
        raise _damaged(path, f"its header has more than {MAX_HEADER:,} bytes")
    return size


def _damaged(path: str, why: object) -> DamagedError:
    return DamagedError(f"{path} is damaged or no safetensors file: {why}")


def read_safetensors(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, floating-point ones as float32, and its texts. DamagedError for a file of anything
    else."""
    from safetensors import SafetensorError, safe_open

    begin, tensors = 8 + _header_size(path), {}
    with as_local_file(path) as local:
        try:
            with safe_open(local, "pt") as file:
                texts, names = file.metadata() or {}, file.keys()
                check_names(names, path)
                for name in names:
                    if (dtype := file.get_slice(name).get_dtype()) not in _TYPES:
                        raise _damaged(path, f"{name} is {dtype}, but only {', '.join(_TYPES)} are known")
                    if not is_shape(shape := file.get_slice(name).get_shape()):
                        raise _damaged(path, f"{name} has the shape {cut(str(shape))}, which no weight has")
                    value = file.get_tensor(name)  # mapped
                    tensors[name] = value.to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        except SafetensorError as error:
            raise _damaged(path, error) from None
        expected = texts.pop(CHECKSUM, None)
        if expected is not None and expected != _checksum(local, begin):
            raise _damaged(path, "the checksum of its tensors is wrong")
    return tensors, texts


def _checksum(path: str, begin: int) -> str:
    checksum = hashlib.sha256()
    with storage.open_read(path) as file:
        file.seek(begin)
        while data := file.read(1 << 20):
            checksum.update(data)
    return checksum.hexdigest()


def write_weights_file(
    file: BinaryIO, content: Mapping[str, Any], path: str, dtype: torch.dtype = torch.float16
) -> None:
    """Write the weights and the header of a checkpoint (``load_file``), from ``path``, into an open file, as ``dtype``.

    Raises InputError for weights that are neither floating-point numbers nor int64, or, as ``dtype``, not finite.
    """
    for name, value in content["state"].items():
        if not value.is_floating_point() and value.dtype != torch.int64:
            raise InputError(f"{path} has {name} of {value.dtype}, but only floating-point weights can be written")
        if value.is_floating_point() and not value.to(dtype).isfinite().all():
            remedy = "" if dtype == torch.float32 else ": write float32"
            raise InputError(f"{path} has values in {name} that {dtype} cannot hold{remedy}")
    header = json.dumps({name: content[name] for name in HEADER}, ensure_ascii=False)
    write_safetensors(file, content["state"], {"format": FORMAT, "header": header}, dtype)


def read_weights_file(path: str) -> dict[str, Any]:
    """What ``load_file`` gives for such a file, in fp32; of one with weights in others' layout, these. DamagedError for
    any other one."""
    from .foreign.layouts import find_layout

    if not storage.exists(path):
        raise DamagedError(f"checkpoint {path} does not exist")
    state, texts = read_safetensors(path)
    if texts.get("format") != FORMAT:
        if find_layout(state):
            return dict(state)
        if texts.get("format") == LORA_FORMAT:
            takes = f"which {named('lora')} takes"
            raise InputError(f"{path} is a LoRA, {takes}, but a checkpoint of a network is required here")
        raise DamagedError(f"{path} was not written by diff_dalle: its metadata do not say the format {FORMAT!r}")
    try:
        header = json.loads(texts["header"])
    except (KeyError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.keys() != set(HEADER):
        raise DamagedError(f"{path} is damaged: its metadata do not describe a network")
    return {**header, "state": state}
