"""Networks of other packages, with their published weights: features of Inception-v3 as FID defines them, and LPIPS."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import named_tensors
from ..config import InputError
from ..images.plugins import import_package
from .generated_config import INCEPTION_FEATURES

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


_TORCHVISION = "https://download.pytorch.org/models/"
# Weights of torchvision's networks, which torchmetrics compares images with.
URLS = {
    "alex": _TORCHVISION + "alexnet-owt-7be5be79.pth",
    "vgg": _TORCHVISION + "vgg16-397923af.pth",
    "squeeze": _TORCHVISION + "squeezenet1_1-b8a52dc0.pth",
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
