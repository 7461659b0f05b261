"""ControlNets and LoRAs in the layout of Stable Cascade's trainings, at any width, written after its description."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.utils import parametrize


class PositionNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.rand(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        normed = (x - mean) / ((x - mean).square().mean(1, keepdim=True) + 1e-5).sqrt()
        return normed * self.weight[:, None, None] + self.bias[:, None, None]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        halves = ((PositionNorm(width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2))
        self.blocks = nn.Sequential(*(layer for half in halves for layer in half))

    def forward(self, x):
        return x + self.blocks(x)


class OtherControlNet(nn.Module):
    """mode: effnet with the features of the (stand-in) torchvision, simple, or large with a width of 8 and 2 blocks."""

    def __init__(self, mode, channels, widths, blocks):
        super().__init__()
        if mode == "effnet":
            from torchvision.models import efficientnet_v2_s

            self.backbone, out = efficientnet_v2_s(weights=None).features.eval(), 1280
            first = self.backbone[0][0]
            if channels != 3:
                self.backbone[0][0] = nn.Conv2d(channels, first.out_channels, 3, stride=2, bias=False)
        elif mode == "simple":
            out = channels
            convs = nn.Conv2d(out, 4 * out, 3, padding=1), nn.Conv2d(4 * out, out, 3, padding=1)
            self.backbone = nn.Sequential(convs[0], nn.LeakyReLU(0.2), convs[1])
        else:
            convs, out = [nn.Conv2d(channels, 128, 1), nn.Conv2d(128, 8, 1), nn.Conv2d(8, 10, 1)], 10
            residuals = [Residual(8) for _ in range(2)]
            self.backbone = nn.Sequential(convs[0], nn.LeakyReLU(0.2), convs[1], *residuals, convs[2])
        self.blocks = blocks
        self.projections = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(out, out, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(out, widths[block], 1, bias=False)
            )
            for block in blocks
        )

    def forward(self, control):
        found = [None] * (max(self.blocks) + 1)
        for block, projection in zip(self.blocks, self.projections, strict=True):
            found[block] = projection(self.backbone(control))
        return found


class LowRank(nn.Module):
    """A change of a weight that is the same at all positions of a kernel, times 1 / rank."""

    def __init__(self, weight, rank):
        super().__init__()
        self.lora_down, self.lora_up = (nn.Parameter(torch.randn(shape)) for shape in shapes_of(weight, rank))

    def forward(self, weight):
        change = self.lora_up @ self.lora_down / len(self.lora_down)
        return weight + change.view(*change.shape, *[1] * (weight.ndim - 2))


def shapes_of(weight, rank):
    return (rank, weight.shape[1]), (weight.shape[0], rank)


class Tree(nn.Module):
    """Modules by their dotted names, in an order of definition."""

    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            *parents, leaf = name.split(".")
            module = self
            for parent in parents:
                if parent not in module._modules:
                    module.add_module(parent, Tree({}))
                module = module._modules[parent]
            module.register_parameter(leaf, nn.Parameter(value.float()))


#: The order in which the parts of a stage C, and of its blocks, are defined there.
DEFINED = ["clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper", "embedding", "down_blocks"]
DEFINED += ["down_downscalers", "down_repeat_mappers", "up_blocks", "up_upscalers", "up_repeat_mappers", "clf"]
IN_BLOCKS = ("depthwise", "channelwise", "attention", "kv_mapper")


def defined(state):
    """The weights of a stage C there in that order: its parts; the blocks of each level in turn."""

    def place(name):
        part, *rest = name.split(".")
        layer = IN_BLOCKS.index(rest[2]) if rest[2:] and rest[2] in IN_BLOCKS else len(IN_BLOCKS)
        return DEFINED.index(part), [int(each) for each in rest if each.isdigit()][:2], layer

    return dict(sorted(state.items(), key=lambda pair: place(pair[0])))


def make_lora(state, filters, rank, indices=(), width=1280, seed=0):
    """The file of a LoRA of a stage C with these weights, and the weights with it."""
    torch.manual_seed(seed)
    tree = Tree(defined(state))
    for name, module in list(tree.named_modules()):
        if any(text in name for text in filters):
            for parameter in ("weight", "in_proj_weight"):
                if isinstance(getattr(module, parameter, None), nn.Parameter):
                    pair = LowRank(getattr(module, parameter), rank)
                    parametrize.register_parametrization(module, parameter, pair, unsafe=True)
                    break
    pairs = [module for module in tree.modules() if isinstance(module, LowRank)]
    file = {f"weights.{k}.{name}": value for k, pair in enumerate(pairs) for name, value in pair.state_dict().items()}
    file |= {"embeddings.embeddings": torch.randn(len(indices), width)}
    file |= {"embeddings.indices": torch.tensor(indices, dtype=torch.int64)}
    for module in tree.modules():
        for parameter in ("weight", "in_proj_weight"):
            if parametrize.is_parametrized(module, parameter):
                parametrize.remove_parametrizations(module, parameter)
    merged = {name: value.detach() for name, value in tree.state_dict().items()}
    assert merged.keys() == state.keys() and not math.isnan(float(merged["clf.1.weight"].sum()))
    return file, merged
