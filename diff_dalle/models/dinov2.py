"""DINOv2's vision transformer (Oquab et al. 2024), with or without registers (Darcet et al. 2024), as an encoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import SelfAttention
from .layers import Linear, to_image, to_tokens
from .norms import LayerNorm32

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of colors in [0, 1]
HEAD_CHANNELS = 64  # of every released size; the shapes of weights do not say it
NORM_EPS = 1e-6
OFFSET = 0.1  # positions by which models without registers enlarge the grid that they interpolate to

PATCHES, POSITIONS, REGISTERS = "patch_embed.proj.weight", "pos_embed", "register_tokens"
UNUSED = "mask_token"  # only pretraining reads it


class Dinov2(nn.Module):
    """Modules and weights have the names of the released files.

    width, patch: channels, and the side of a patch in pixels.
    side:         of the square grid of position embeddings; they are interpolated to another.
    registers:    number of register tokens.
    hidden:       channels inside the MLPs, of the product where these are ``gated``, as SwiGLUs (Shazeer 2020).
    """

    def __init__(self, width: int, depth: int, patch: int, side: int, registers: int, hidden: int, gated: bool):
        super().__init__()
        self.patch, self.side = patch, side
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + side**2, width))
        self.register_tokens = nn.Parameter(torch.zeros(1, registers, width)) if registers else None
        self.blocks = nn.ModuleList(_Block(width, hidden, gated) for _ in range(depth))
        self.norm = LayerNorm32(width, NORM_EPS)

    @classmethod
    def fits(cls, names: object) -> bool:
        """Whether weights of these names are a DINOv2's."""
        return isinstance(names, (list, Mapping)) and PATCHES in names and POSITIONS in names

    @classmethod
    def shaped(cls, state: Mapping[str, Tensor]) -> Dinov2:
        """The network whose weights have the shapes of a file's. Raises KeyError or ValueError for others."""
        width, _, patch, _ = state[PATCHES].shape
        depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        gated = "blocks.0.mlp.w3.weight" in state
        hidden = state[f"blocks.0.mlp.{'w3' if gated else 'fc2'}.weight"].shape[1]
        side = round((state[POSITIONS].shape[1] - 1) ** 0.5)
        registers = state[REGISTERS].shape[1] if REGISTERS in state else 0
        if width % HEAD_CHANNELS:
            raise ValueError(f"its width {width} is no multiple of {HEAD_CHANNELS}, the channels of a head")
        return cls(width, depth, patch, side, registers, hidden, gated)

    def feature_map(self, images: Tensor) -> Tensor:
        """The states of the patches after the last norm.

        images: [N, 3, H, W] in [-1, 1], H and W multiples of ``patch``. Returns [N, width, H / patch, W / patch].
        """
        mean, std = (images.new_tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
        patches = self.patch_embed["proj"](((images + 1) / 2 - mean) / std)
        size, first = (patches.shape[2], patches.shape[3]), self.pos_embed[:, :1]
        before = [(self.cls_token + first).expand(len(images), -1, -1)]
        if self.register_tokens is not None:
            before.append(self.register_tokens.expand(len(images), -1, -1))
        h = torch.cat([*before, to_tokens(patches).float() + self._positions(size)], 1)
        for block in self.blocks:
            h = block(h)
        return to_image(self.norm(h)[:, -size[0] * size[1] :], size)

    def _positions(self, size: tuple[int, int]) -> Tensor:
        """[1, H · W, width] for a grid of this size, by bicubic interpolation as the released models do it."""
        own = self.pos_embed[:, 1:]
        if size == (self.side, self.side):
            return own
        grid = to_image(own, (self.side, self.side))
        if self.register_tokens is not None:
            return to_tokens(F.interpolate(grid, size, mode="bicubic", antialias=True))
        factors = [(length + OFFSET) / self.side for length in size]
        return to_tokens(F.interpolate(grid, scale_factor=factors, mode="bicubic"))


class _Scale(nn.Module):
    """Layer scale (Touvron et al. 2021): a learned factor for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(width, hidden), Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w12, self.w3 = Linear(width, 2 * hidden), Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, gated: bool):
        super().__init__()
        self.norm1, self.attn = LayerNorm32(width, NORM_EPS), SelfAttention(width, width // HEAD_CHANNELS)
        self.ls1, self.ls2 = _Scale(width), _Scale(width)
        self.norm2, self.mlp = LayerNorm32(width, NORM_EPS), (_SwiGlu if gated else _Mlp)(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))
