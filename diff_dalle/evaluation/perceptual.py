"""LPIPS, the perceptual distance of two images (Zhang et al. 2018), through torchmetrics and torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import InputError
from ..images.plugins import import_package
from .pretrained import read_weights

_URL = "https://download.pytorch.org/models/"
# Weights of torchvision's networks, which torchmetrics compares images with.
URLS = {
    "alex": _URL + "alexnet-owt-7be5be79.pth",
    "vgg": _URL + "vgg16-397923af.pth",
    "squeeze": _URL + "squeezenet1_1-b8a52dc0.pth",
}
# Pixels below which the network has nothing left after its pooling.
LEAST_SIZES = {"alex": 31, "vgg": 16, "squeeze": 17}


class Lpips:
    """Pairs of images in [-1, 1], [N, 3, H, W] each → distances [N] float32.

    Raises InputError for packages that are missing or broken, and for weights that are missing or of another network.
    """

    def __init__(self, net_type: str, weights: str, device: torch.device, setting: str):
        purpose = f"LPIPS (with the weights {URLS[net_type]})"
        import_package("torchvision", "eval", purpose)
        make = import_package("torchmetrics.functional.image.lpips", "eval", purpose)._LPIPS
        self.net_type = net_type
        self.network: nn.Module = make(net=net_type, pnet_rand=True)  # the linear layers come with the package
        backbone = self.network.get_submodule("net")
        # slice2.3.weight or slices.1.3.weight there is features.3.weight in torchvision's file.
        names = {name: f"features.{_after_slice(name)}" for name in backbone.state_dict()}
        given = read_weights(weights, URLS[net_type], setting)
        try:
            backbone.load_state_dict({name: given[source] for name, source in names.items()})
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{setting} holds the weights of another network than {URLS[net_type]}") from error
        self.network.requires_grad_(False).eval().to(device)

    def __call__(self, real: Tensor, generated: Tensor) -> Tensor:
        if min(real.shape[2:]) < (least := LEAST_SIZES[self.net_type]):
            size = f"{real.shape[3]}×{real.shape[2]}"
            raise InputError(
                f"images of {size} are too small for LPIPS with {self.net_type}, which needs {least}×{least}"
            )
        return self.network(real, generated).flatten()


def _after_slice(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[2:] if parts[0] == "slices" else parts[1:])
