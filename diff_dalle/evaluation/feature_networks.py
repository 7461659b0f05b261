"""Networks whose features ``metrics.METRICS`` compare, from any installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError

FeatureNetwork = Callable[[Tensor], Tensor]


def load_feature_network(name: str, device: torch.device) -> FeatureNetwork:
    """The network that ``name``, PACKAGE.MODULE:FUNCTION, returns when it is called without arguments, in evaluation
    mode on ``device``. It maps uint8 [N, 3, H, W] to features [N, D]. InputError when there is no such function.

    Importing the module runs its code: the name must come from the user.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function.isidentifier()):
        raise InputError(f"feature_network is {name!r}, but must be PACKAGE.MODULE:FUNCTION")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"feature_network {name} cannot be imported: {error}") from error
    network = make()
    return network.eval().to(device) if isinstance(network, nn.Module) else network


@torch.no_grad()
def extract_features(network: FeatureNetwork, images: np.ndarray, device: torch.device, batch_size: int = 64) -> Tensor:
    """Features [N, D] float32 of images, uint8 [N, H, W, 3]. InputError when the network returns something else."""
    parts = []
    for part in torch.from_numpy(images).permute(0, 3, 1, 2).split(batch_size):
        found = network(part.contiguous().to(device))
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(part):
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"feature_network returned {shape} for {len(part)} images, but must return [N, D]")
        parts.append(found.float())
    return torch.cat(parts)
