"""Files of tiny networks in DINOv2's layout, and the forward pass written out from the paper, tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, PATCH, SIDE, DEPTH = 64, 4, 3, 2


def make_state(registers: int = 2, gated: bool = False, depth: int = DEPTH) -> dict[str, Tensor]:
    """Random weights under the names of the released files."""
    generator = torch.Generator().manual_seed(registers + gated)

    def random(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.2 * torch.randn(*shape, generator=generator)

    state = {
        "cls_token": random(1, 1, WIDTH),
        "pos_embed": random(1, 1 + SIDE**2, WIDTH),
        "mask_token": random(1, WIDTH),
        "patch_embed.proj.weight": random(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random(WIDTH),
        "norm.weight": random(WIDTH, mean=1.0),
        "norm.bias": random(WIDTH),
    }
    if registers:
        state["register_tokens"] = random(1, registers, WIDTH)
    hidden = 40
    layers = {"w12": (2 * hidden, WIDTH), "w3": (WIDTH, hidden)} if gated else {"fc1": (80, WIDTH), "fc2": (WIDTH, 80)}
    for i in range(depth):
        shapes = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        shapes |= {f"mlp.{name}": shape for name, shape in layers.items()}
        for name, shape in shapes.items():
            state |= {f"blocks.{i}.{name}.weight": random(*shape), f"blocks.{i}.{name}.bias": random(shape[0])}
        for name in ("norm1", "norm2"):
            state |= {f"blocks.{i}.{name}.weight": random(WIDTH, mean=1.0), f"blocks.{i}.{name}.bias": random(WIDTH)}
        state |= {f"blocks.{i}.ls{j}.gamma": random(WIDTH, mean=0.5) for j in (1, 2)}
    return state


def reference(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The normalized states of the patches, [N, patches, width]. images in [0, 1], normalized already."""
    w = state
    patches = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH)
    height, width = patches.shape[2:]
    x = patches.flatten(2).transpose(1, 2)
    grid = w["pos_embed"][:, 1:].reshape(1, SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
    if (height, width) != (SIDE, SIDE):
        if "register_tokens" in w:
            grid = F.interpolate(grid, size=(height, width), mode="bicubic", antialias=True)
        else:
            scale = ((height + 0.1) / SIDE, (width + 0.1) / SIDE)
            grid = F.interpolate(grid, scale_factor=scale, mode="bicubic", antialias=False)
    x = torch.cat([(w["cls_token"] + w["pos_embed"][:, :1]).expand(len(x), 1, WIDTH), x + grid.flatten(2).mT], 1)
    if "register_tokens" in w:
        x = torch.cat([x[:, :1], w["register_tokens"].expand(len(x), -1, -1), x[:, 1:]], 1)
    depth = sum(name.endswith("ls1.gamma") for name in w)
    for i in range(depth):

        def p(name: str, i: int = i) -> Tensor:
            return w[f"blocks.{i}.{name}"]

        h = F.layer_norm(x, (WIDTH,), p("norm1.weight"), p("norm1.bias"), eps=1e-6)
        qkv = F.linear(h, p("attn.qkv.weight"), p("attn.qkv.bias")).reshape(*x.shape[:2], 3, WIDTH // 64, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        h = (((q @ k.mT) / 8).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + p("ls1.gamma") * F.linear(h, p("attn.proj.weight"), p("attn.proj.bias"))
        h = F.layer_norm(x, (WIDTH,), p("norm2.weight"), p("norm2.bias"), eps=1e-6)
        if f"blocks.{i}.mlp.w12.weight" in w:
            gate, value = F.linear(h, p("mlp.w12.weight"), p("mlp.w12.bias")).chunk(2, -1)
            h = F.linear(gate * gate.sigmoid() * value, p("mlp.w3.weight"), p("mlp.w3.bias"))
        else:
            h = F.linear(h, p("mlp.fc1.weight"), p("mlp.fc1.bias"))
            h = F.linear(0.5 * h * (1 + torch.erf(h / 2**0.5)), p("mlp.fc2.weight"), p("mlp.fc2.bias"))
        x = x + p("ls2.gamma") * h
    x = F.layer_norm(x, (WIDTH,), w["norm.weight"], w["norm.bias"], eps=1e-6)
    return x[:, -height * width :]
