"""Files of the public networks of a latent cascade, name by name, at any width, and a stand-in for torchvision."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn


def layer(name, *shape, bias=True):
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def transposed(name, channels, out_channels, size):
    return {f"{name}.weight": (channels, out_channels, size, size), f"{name}.bias": (out_channels,)}


def norm(name, channels, affine=True):
    names = ["running_mean", "running_var", *(["weight", "bias"] if affine else [])]
    return {f"{name}.{each}": (channels,) for each in names} | {f"{name}.num_batches_tracked": ()}


def block(name, letter, width, skip, config):
    size = config.kernel_size
    if letter == "T":
        names = ["mapper", *(f"mapper_{each}" for each in config.micro_conditions)]
        found = {}
        for each in names:
            found |= layer(f"{name}.{each}", 2 * width, config.time_width)
        return found
    if letter == "A":
        attention = {f"{name}.attention.attn.in_proj_weight": (3 * width, width)}
        attention |= {f"{name}.attention.attn.in_proj_bias": (3 * width,)}
        attention |= layer(f"{name}.attention.attn.out_proj", width, width)
        return attention | layer(f"{name}.kv_mapper.1", width, config.cond_width)
    mlp = layer(f"{name}.channelwise.0", 4 * width, width + skip) | layer(f"{name}.channelwise.4", width, 4 * width)
    mlp |= {f"{name}.channelwise.2.{each}": (1, 1, 1, 4 * width) for each in ("gamma", "beta")}
    return mlp if letter == "F" else mlp | layer(f"{name}.depthwise", width, 1, size, size)


def unet(config):
    """What stages B and C have in common: names and shapes."""
    widths, deepest = config.widths, config.depth - 1
    found = layer("embedding.1", widths[0], config.channels * config.patch_size**2, 1, 1)
    found |= layer("clf.1", config.channels * config.patch_size**2, widths[0], 1, 1)
    for side, blocks, repeats in (
        ("down", config.down_blocks, config.down_repeats), ("up", config.up_blocks, config.up_repeats)
    ):  # fmt: skip
        for i in range(config.depth):
            level = i if side == "down" else deepest - i
            for j, letter in enumerate(config.levels[level] * blocks[i]):
                skip = widths[level] if side == "up" and i and not j else 0
                found |= block(f"{side}_blocks.{i}.{j}", letter, widths[level], skip, config)
            for j in range(repeats[i] - 1):
                found |= layer(f"{side}_repeat_mappers.{i}.{j}", widths[level], widths[level], 1, 1)
    return found


def stage_b(config):
    widths, deepest, found = config.widths, config.depth - 1, unet(config)
    for name, channels in (("effnet", config.semantic_channels), ("pixels", config.pixel_channels)):
        found |= layer(f"{name}_mapper.0", 4 * widths[0], channels, 1, 1)
        found |= layer(f"{name}_mapper.2", widths[0], 4 * widths[0], 1, 1)
    for i in range(deepest):
        found |= layer(f"down_downscalers.{i + 1}.1", widths[i + 1], widths[i], 2, 2)
        found |= transposed(f"up_upscalers.{i}.1", widths[deepest - i], widths[deepest - i - 1], 2)
    return found | layer("clip_mapper", config.vector_tokens * config.cond_width, config.pooled_width)


def stage_c(config):
    widths, deepest, found = config.widths, config.depth - 1, unet(config)
    for i in range(deepest):
        found |= layer(f"down_downscalers.{i + 1}.1.blocks.0", widths[i + 1], widths[i], 1, 1)
        found |= layer(f"up_upscalers.{i}.1.blocks.1", widths[deepest - i - 1], widths[deepest - i], 1, 1)
    tokens = config.vector_tokens * config.cond_width
    found |= layer("clip_txt_mapper", config.cond_width, config.states_width)
    found |= layer("clip_txt_pooled_mapper", tokens, config.vector_width)
    return found | layer("clip_img_mapper", tokens, config.image_width)


def stage_a(config):
    widths, channels, k = config.widths, config.latent_channels, 0

    def gated(name, width):
        found = {f"{name}.gammas": (6,)} | layer(f"{name}.depthwise.1", width, 1, 3, 3)
        return (
            found | layer(f"{name}.channelwise.0", 4 * width, width) | layer(f"{name}.channelwise.2", width, 4 * width)
        )

    found = layer("in_block.1", widths[0], 12, 1, 1) | layer("out_block.0", 12, widths[0], 1, 1)
    for i, width in enumerate(widths):
        if i:
            found, k = found | layer(f"down_blocks.{k}", width, widths[i - 1], 4, 4), k + 1
        found, k = found | gated(f"down_blocks.{k}", width), k + 1
    found |= layer(f"down_blocks.{k}.0", channels, widths[-1], 1, 1, bias=False) | norm(f"down_blocks.{k}.1", channels)
    found |= {"vquantizer.codebook.weight": (config.codebook_size, channels)}
    found, k = found | layer("up_blocks.0.0", widths[-1], channels, 1, 1), 1
    for i, width in enumerate(reversed(widths)):
        for _ in range(1 if i else config.bottleneck_blocks):
            found, k = found | gated(f"up_blocks.{k}", width), k + 1
        if width > widths[0]:
            found, k = found | transposed(f"up_blocks.{k}", width, width // 2, 4), k + 1
    return found


def previewer(channels, width):
    found, before = layer("blocks.0", width, channels, 1, 1) | norm("blocks.2", width), width
    found |= layer("blocks.3", width, width, 3, 3) | norm("blocks.5", width)
    for i, each in enumerate((width // 2, width // 4, width // 4)):
        k = 6 * (i + 1)
        found |= transposed(f"blocks.{k}", before, each, 2) | norm(f"blocks.{k + 2}", each)
        found |= layer(f"blocks.{k + 3}", each, each, 3, 3) | norm(f"blocks.{k + 5}", each)
        before = each
    return found | layer("blocks.24", 3, before, 1, 1)


def file_of(shapes, dtype=torch.bfloat16, seed=0):
    """Random weights; in half precision, as released files are."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(7) if name.endswith("tracked") else torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


def stand_in_torchvision(monkeypatch, strided=False):
    """A package whose EfficientNet is one convolution and its norm, or has stride 32 and a dropout too. Its argument
    ``weights`` must be None, else it would download."""

    class StandIn(nn.Module):
        def __init__(self):
            super().__init__()
            if strided:
                first = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24))
                self.features = nn.Sequential(first, nn.Conv2d(24, 1280, 16, stride=16), nn.Dropout(0.5))
            else:
                norm = nn.BatchNorm2d(1280)
                self.features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 1280, 4, bias=False), norm))

    models = types.ModuleType("torchvision.models")
    models.efficientnet_v2_s = lambda weights: StandIn() if weights is None else 1 / 0
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


BACKBONE = layer("0.0", 1280, 3, 4, 4, bias=False) | norm("0.1", 1280)
ENCODER = {f"backbone.{name}": shape for name, shape in BACKBONE.items()}
ENCODER |= layer("mapper.0", 5, 1280, 1, 1, bias=False) | norm("mapper.1", 5, affine=False)
