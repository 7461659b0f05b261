import builtins
import importlib
import sys
from dataclasses import replace

import pytest
import torch
from network_making import pixels, randomize
from refusing import refused
from released_making import stand_in_torchvision
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.latent.semantic import SEMANTIC_SIZES, Previewer, SemanticAutoencoder, SemanticConfig
from diff_dalle.models.norms import RunningNorm

TINY = SemanticConfig(stride=8, semantic_channels=5, encoder_width=8, encoder_blocks=1, previewer_width=16)


def make(config=TINY):
    torch.manual_seed(0)
    network = randomize(SemanticAutoencoder(config))
    for norm in network.modules():
        if isinstance(norm, RunningNorm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return network


def images(n=3, size=(32, 48), seed=0):
    return pixels(n, 3, *size, seed=seed)


@pytest.fixture
def torchvision(monkeypatch):
    stand_in_torchvision(monkeypatch, strided=True)


# ------------------------------------------------------------------------------------------------------------ previewer


def test_released_size_of_the_previewer():
    with torch.device("meta"):
        previewer = Previewer(16, 512)
    assert round(sum(p.numel() for p in previewer.parameters()) / 1e6, 2) == 3.98


def test_previewer_layer_by_layer():
    """GELU, then the norm, after every convolution but the last; eight times the resolution; [0, 1] inside."""
    previewer, h = make().previewer, torch.randn(2, 5, 2, 3)
    kinds = [type(conv) for conv in previewer.convs]
    assert kinds == [nn.Conv2d, nn.Conv2d] + [nn.ConvTranspose2d, nn.Conv2d] * 3
    out = previewer(h)
    for i, (conv, norm) in enumerate(zip(previewer.convs, previewer.norms, strict=True)):
        if isinstance(conv, nn.ConvTranspose2d):
            h = F.conv_transpose2d(h, conv.weight, conv.bias, stride=2)
        else:
            h = F.conv2d(h, conv.weight, conv.bias, padding=1 if i else 0)
        h = norm(F.gelu(h))
    h = F.conv2d(h, previewer.out_conv.weight, previewer.out_conv.bias)
    assert_close(out, 2 * h - 1)
    assert out.shape == (2, 3, 16, 24)


# -------------------------------------------------------------------------------------------------------------- encoder


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_strides(stride):
    network = make(replace(TINY, stride=stride))
    latents = network.encode(images(size=(64, 96)))
    assert latents.shape == (3, 5, 64 // stride, 96 // stride) and latents.dtype == torch.float32
    assert network.preview(latents).shape == (3, 3, 8 * 64 // stride, 8 * 96 // stride)
    assert network.backbone.channels == 8 * stride // 4
    with refused(f"96×60 pixels, but the semantic encoder takes multiples of {stride}"):
        network.encode(images(size=(60, 96)))


def test_the_latents_are_normalized():
    """The norm has no weights; after the running statistics have followed, every channel has mean 0 and variance 1,
    exactly so after calibration, which changes no preview."""
    torch.manual_seed(0)
    network, x = SemanticAutoencoder(TINY), images(8)
    assert not list(network.norm.parameters())
    for _ in range(3):
        moments = []
        network(x, moments)
        network.norm.update(moments[0])
    latents = network.encode(x)
    assert_close(latents.mean((0, 2, 3)), torch.zeros(5), atol=1e-4, rtol=0)
    assert_close(latents.var((0, 2, 3), correction=0), torch.ones(5), atol=1e-2, rtol=0)
    network.norm.running_mean += 1
    network.norm.running_var *= torch.linspace(0.5, 2, 5)
    for _ in range(2):  # also when it is calibrated already
        latents = network.encode(x)
        before = network.preview(latents)
        network.calibrate(latents.mean((0, 2, 3)), latents.std((0, 2, 3)))
        latents = network.encode(x)
        assert_close(latents.mean((0, 2, 3)), torch.zeros(5), atol=1e-4, rtol=0)
        assert_close(latents.std((0, 2, 3)), torch.ones(5))
        assert_close(network.preview(latents), before, rtol=1e-4, atol=1e-4)
        network.norm.running_mean -= 0.5
    other = SemanticAutoencoder(TINY)
    other.load_state_dict(network.state_dict())
    assert_close(other.encode(x), network.encode(x))


def test_the_previewer_starts_with_the_statistics_of_normal_latents():
    """Every layer of a new previewer has outputs of mean 0 and variance 1; no training changes the statistics."""
    torch.manual_seed(0)
    network = SemanticAutoencoder(TINY).train()
    previewer, h = network.previewer, torch.randn(64, 5, 8, 8)
    before = {name: value.clone() for name, value in previewer.named_buffers()}
    for conv, norm in zip(previewer.convs, previewer.norms, strict=True):
        h = norm(F.gelu(conv(h)))
        assert h.mean().abs() < 0.1 and abs(h.std() - 1) < 0.15
    moments = []
    network(images(), moments)
    assert len(moments) == 1 and len(previewer.norms) == 8
    assert all(torch.equal(before[name], value) for name, value in previewer.named_buffers())


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": "resnet"}, "backbone is 'resnet', but must be one of conv, efficientnet_v2_s"),
        ({"stride": 4}, "stride is 4, but must be 8, 16 or 32"),
        ({"backbone": "efficientnet_v2_s"}, "stride is 8, but must be 32 with backbone efficientnet_v2_s"),
        ({"semantic_channels": 0}, "semantic_channels is 0"),
        ({"encoder_width": 0}, "encoder_width is 0"),
        ({"encoder_blocks": 0}, "encoder_blocks is 0"),
        ({"previewer_width": 6}, "previewer_width is 6, but must be at least 4, at most 65,536 and a multiple of 4"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with refused(message):
        replace(TINY, **change)


# --------------------------------------------------------------------------------------------------------- EfficientNet


@pytest.mark.usefixtures("torchvision")
def test_efficientnet_is_frozen_and_sees_normalized_colors():
    """Its features stay in evaluation mode and without gradient; projection and previewer train."""
    network, x = make(replace(SEMANTIC_SIZES["released"], previewer_width=8)).train(), images(2, (64, 96))
    features = network.backbone.features
    assert not any(module.training for module in features.modules()) and network.norm.training
    before = {name: value.clone() for name, value in features.state_dict().items()}
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    colors = (((x + 1) / 2).permute(0, 2, 3, 1) - mean) / std
    expected = network.norm(network.mapper(features(colors.permute(0, 3, 1, 2))))
    latents = network.encode(x)
    assert_close(latents, expected, rtol=1e-4, atol=1e-3)
    assert latents.shape == (2, 16, 2, 3)
    network(x).square().mean().backward()
    without = [name for name, p in network.named_parameters() if p.grad is None]
    assert without == [f"backbone.features.{name}" for name, _ in features.named_parameters()]
    assert all(torch.equal(before[name], value) for name, value in features.state_dict().items())


def test_a_missing_torchvision_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with refused(r"requires the package torchvision: pip install 'diff_dalle\[vision\]'"):
        SemanticAutoencoder(SEMANTIC_SIZES["released"])


def test_a_broken_torchvision_is_named(monkeypatch):
    real = importlib.import_module

    def broken(name, *arguments):
        if name.startswith("torchvision"):
            raise RuntimeError("operator torchvision::nms does not exist\nmore")
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", broken)
    with refused(r"cannot be imported \(operator torchvision::nms does not exist\), which"):
        SemanticAutoencoder(SEMANTIC_SIZES["released"])


def test_the_own_encoder_needs_no_torchvision(monkeypatch):
    original = builtins.__import__

    def guarded(name, *arguments, **options):
        assert not name.startswith("torchvision")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", guarded)
    SemanticAutoencoder(TINY)


@pytest.mark.slow
def test_encoder_and_previewer_learn_together():
    torch.manual_seed(0)
    config = replace(TINY, semantic_channels=16, encoder_width=16, previewer_width=64)
    network, generator, errors = SemanticAutoencoder(config), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(110):
        x = (torch.rand(8, 3, 2, 2, generator=generator) * 2 - 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
        moments = []
        errors.append((network(x, moments) - x).square().mean())
        errors[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        network.norm.update(moments[0])
    assert torch.stack(errors[-5:]).mean() < 0.5 * x.var()
