"""Weights of networks of other packages."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..checkpoints.checkpoint import named_tensors
from ..config import InputError


def read_weights(path: str, url: str, setting: str) -> dict[str, Tensor]:
    """The weights of a local file, or, if ``path`` is empty, of torch's cache, where packages keep what they have
    downloaded from ``url``. Nothing is downloaded.

    setting: as what a user gives the path, for messages. InputError for a file that is missing or holds anything else.
    """
    found = path or os.path.join(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not os.path.isfile(found):
        if path:
            raise InputError(f"{setting} is {path}, which is not a local file")
        raise InputError(
            f"the weights are not in torch's cache, and nothing is downloaded unasked: get {url}, and give the file as "
            f"{setting}, or put it at {found}"
        )
    try:
        weights = named_tensors(found)
    except InputError:
        raise InputError(f"{found} does not hold weights of a network, or is incomplete: get {url}") from None
    if weights is None:
        raise InputError(f"{found} does not hold weights of a network: get {url}")
    return weights
