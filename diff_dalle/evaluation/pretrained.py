"""Networks of other packages (the extra ``eval``), which are imported when one is asked for, and their weights."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch

from ..errors import InputError


def import_eval(module: str, purpose: str) -> ModuleType:
    """A module of a package of the extra ``eval``. InputError that says what to install."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise InputError(f"{purpose} cannot be had: {package} requires the package {error.name}") from error
        distribution = package.replace("_", "-")
        raise InputError(f"{purpose} requires the package {distribution}: pip install 'diff_dalle[eval]'") from None
    except Exception as error:  # torchvision raises RuntimeError, of operators that torch does not have
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{package} cannot be imported ({reason}), which {purpose} requires: torchvision must be built for the "
            f"installed torch {torch.__version__}; install both from one index, such as "
            "https://download.pytorch.org/whl/cpu"
        ) from error


def read_weights(path: str, url: str, setting: str) -> dict[str, Any]:
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
        weights = torch.load(found, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds on malformed archives and pickles
        raise InputError(f"{found} does not hold weights of a network, or is incomplete: get {url}") from error
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise InputError(f"{found} does not hold weights of a network: get {url}")
    return weights
