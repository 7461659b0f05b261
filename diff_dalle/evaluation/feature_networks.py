"""Networks whose features ``metrics.METRICS`` compare: Inception, or one of any installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import Fault, InputError, named
from .inception import Inception

INCEPTION = "inception"
FeatureNetwork = Callable[[Tensor], Tensor]


def load_feature_network(name: str, device: torch.device, logits: bool = False) -> FeatureNetwork:
    """The network that ``name``, PACKAGE.MODULE:FUNCTION, returns when it is called without arguments, in evaluation
    mode on ``device``. It maps uint8 [N, 3, H, W] to features [N, D]. InputError when there is no such function.

    ``inception`` and ``inception:FILE`` are Inception-v3, with weights of torch's cache or of a local file: its 2048
    features or, if ``logits``, its logits.

    Importing the module runs its code: the name must come from the user.
    """
    module, colon, function = name.partition(":")
    if module == INCEPTION:
        feature = "logits_unbiased" if logits else "2048"
        network = Inception([feature], function, True, device, f"{named('feature_network')} inception:FILE")
        return lambda images: network(images)[feature]
    if not (module and colon and function.isidentifier()):
        raise InputError(Fault("feature_network", f"must be {INCEPTION} or PACKAGE.MODULE:FUNCTION", name))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(Fault("feature_network", f"{name} cannot be imported: {error}")) from error
    made = make()
    return made.eval().to(device) if isinstance(made, nn.Module) else made


@torch.no_grad()
def extract_features(network: FeatureNetwork, images: np.ndarray, device: torch.device, batch_size: int = 64) -> Tensor:
    """Features [N, D] float32 of images, uint8 [N, H, W, 3]. InputError when the network returns something else."""
    parts = torch.from_numpy(images).permute(0, 3, 1, 2).split(batch_size)
    return torch.cat([checked_features(network(part.contiguous().to(device)), len(part)) for part in parts])


def checked_features(found: object, count: int) -> Tensor:
    """What a network returned for ``count`` images, in float32. InputError if it is not [count, D], or not finite."""
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != count:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"the network of features returned {shape} for {count} images, but must return [N, D]")
    if not found.isfinite().all():
        raise InputError("the network of features returned values that are not finite: use other weights or precision")
    return found.float()
