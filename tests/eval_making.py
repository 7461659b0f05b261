"""Images, a feature network, and small stand-ins of the packages of the extra ``eval`` with the names and layouts that
we rely on."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

N = 24
QUARTERS = f"{__name__}:quarters"
EVERY = {
    "FID": {"feature": QUARTERS},
    "IS": {"feature": QUARTERS, "splits": 3},
    "KID": {"feature": QUARTERS, "subset_size": 10, "subsets": 4},
    "precision_recall": {"feature": QUARTERS},
    "density_coverage": {"feature": QUARTERS},
}


def quarters():
    """A feature network: the means of the four quarters of an image, of each color."""
    return lambda images: nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1)


def pair(count=N, size=32):
    """Real and generated images, uint8."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, size, size)
    return tuple(
        torch.randint(low, high, shape, dtype=torch.uint8, generator=generator) for low, high in ((0, 200), (60, 255))
    )


def chunks(real, generated, size):
    """As ``GeneratedMetrics.measure`` takes them."""
    return [
        (real[s : s + size], generated[s : s + size], range(s, min(s + size, len(real)))) for s in range(0, N, size)
    ]


# ---------------------------------------------------------------------------------------------------------- stand-ins

# Channels after each slice of LPIPS' networks, and the indices of the layers of torchvision's at which slices begin.
LAYOUTS = {
    "alexnet": ([64, 192, 384, 256, 256], [0, 2, 5, 8, 10], 13),
    "vgg16": ([64, 128, 256, 512, 512], [0, 4, 9, 16, 23], 31),
    "squeezenet1_1": ([64, 128, 256, 384, 384, 512, 512], [0, 2, 5, 8, 10, 11, 12], 13),
}
NAMES = {"alex": "alexnet", "vgg": "vgg16", "squeeze": "squeezenet1_1"}


class Inception(nn.Module):
    """torchmetrics' NoTrainInceptionV3: layers of few channels, of which one feature is returned."""

    ORDER = ("64", "192", "768", "2048", "logits_unbiased")

    def __init__(self, name, features_list, feature_extractor_weights_path=None, antialias=True):
        super().__init__()
        self.asked, self.antialias = features_list[0], antialias
        self.MaxPool_1, self.MaxPool_2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 2)
        self.Mixed_6e, self.AvgPool = nn.Conv2d(5, 6, 2), nn.Sequential(nn.Conv2d(6, 7, 1), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(7, 10)
        if feature_extractor_weights_path is not None:
            self.load_state_dict(torch.load(feature_extractor_weights_path, weights_only=False))

    def forward(self, x):
        assert x.dtype == torch.uint8
        size = (9, 9) if self.antialias else (8, 8)
        x = nn.functional.interpolate(x.float(), size, mode="bilinear", antialias=self.antialias) / 128 - 1
        for name, layer in zip(self.ORDER, (self.MaxPool_1, self.MaxPool_2, self.Mixed_6e, self.AvgPool), strict=False):
            x = layer(x)
            if name == self.asked:
                return x.mean((2, 3))
        return x.flatten(1) @ self.fc.weight.T


def torchvision_network(name):
    """What ``torchvision.models.NAME(weights=None)`` gives, as far as LPIPS goes: its ``features``."""
    channels, starts, count = LAYOUTS[name]
    layers, width = [], 3
    for index in range(count):
        new = channels[starts.index(index)] if index in starts else width
        layers.append(nn.Conv2d(width, new, 1, 1 if index else 8) if index in (1, *starts) else nn.Identity())
        width = new
    network = nn.Module()
    network.features = nn.Sequential(*layers)
    return network


def _torchvision_network(name):
    def make(weights):
        assert weights is None, "weights would be downloaded"
        return torchvision_network(name)

    return make


def install(monkeypatch, hub):
    """Put the stand-ins in place of the packages, and torch's cache in the folder ``hub``."""
    import torchmetrics.functional.image.lpips as lpips
    import torchmetrics.image.fid as fid

    torchvision = types.ModuleType("torchvision")
    torchvision.models = types.SimpleNamespace(**{name: _torchvision_network(name) for name in LAYOUTS})
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.ModuleType("torch_fidelity"))
    monkeypatch.setattr(lpips, "_TORCHVISION_AVAILABLE", True)
    monkeypatch.setattr(fid, "NoTrainInceptionV3", Inception)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(hub))


def save_inception(path, seed=0):
    """A file of weights of the stand-in."""
    torch.manual_seed(seed)
    torch.save(Inception("", ["2048"]).state_dict(), path)


def save_lpips(path, net_type, seed=0):
    """A file of weights of the network ``net_type``, as torchvision publishes it."""
    torch.manual_seed(seed)
    torch.save(torchvision_network(NAMES[net_type]).state_dict(), path)
