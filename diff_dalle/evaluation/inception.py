"""Features of Inception-v3 as FID defines them, through torchmetrics and torch-fidelity."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config import InputError
from ..images.plugins import import_package
from .generated_config import INCEPTION_FEATURES
from .pretrained import read_weights

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
_PURPOSE = f"Inception-v3 (with the weights {URL})"
# The modules whose outputs, averaged over the image, are the features; the last ones are what the network returns.
_LAYERS = dict(zip(INCEPTION_FEATURES, ("MaxPool_1", "MaxPool_2", "Mixed_6e", "AvgPool", ""), strict=True))


class Inception:
    """uint8 [N, 3, H, W] → features [N, D] float32 by name, of several layers in one pass.

    features: of ``INCEPTION_FEATURES``. antialias: how images are resized to 299 pixels, see the setting of that name.
    Raises InputError for packages that are missing or broken, and for weights that are missing or of another network.
    """

    def __init__(self, features: Iterable[str], weights: str, antialias: bool, device: torch.device, setting: str):
        import_package("torch_fidelity", "eval", _PURPOSE)
        make = import_package("torchmetrics.image.fid", "eval", _PURPOSE).NoTrainInceptionV3
        *earlier, self.last = sorted(features, key=INCEPTION_FEATURES.index)
        # The package unpickles its file without restriction: give it one that holds nothing but these tensors.
        file = io.BytesIO()
        torch.save(read_weights(weights, URL, setting), file)
        file.seek(0)
        try:
            self.network: nn.Module = make("inception-v3-compat", [self.last], file, antialias)
        except RuntimeError as error:  # of load_state_dict
            raise InputError(f"{setting} holds the weights of another network than Inception-v3 of {URL}") from error
        self.network.requires_grad_(False).eval().to(device)

        self.found: dict[str, Tensor] = {}
        for name in earlier:
            self.network.get_submodule(_LAYERS[name]).register_forward_hook(functools.partial(self._keep, name))

    def _keep(self, name: str, layer: nn.Module, inputs: object, output: Tensor) -> None:
        self.found[name] = output.mean((2, 3))

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        self.found[self.last] = self.network(images)
        found, self.found = self.found, {}
        return found
