"""Networks of Improved Diffusion, Guided-Diffusion and GLIDE as functions of their weights, under the names and in the
shapes that these projects publish: the reference for what is made of their checkpoints. Written from their papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


@dataclass
class Other:
    """How a network is built. heads: (channels) → number; text: vocabulary, length, width, depth, heads."""

    channels: int = 32
    mults: Sequence[float] = (1, 2)
    blocks: int = 1
    attention: Sequence[bool] = (False, True)
    inputs: int = 3
    outputs: int = 6
    classes: int = 0
    scale_shift: bool = True
    updown: bool = True
    learned_resampling: bool = True
    head_channels: int = 16
    upsample_head_channels: int = 0  # of the decoder; 0 = the same
    pool: str = "attention"
    xf_padding: bool = True
    xf_final_ln: bool = True
    new_order: bool = False
    text: tuple[int, int, int, int, int] | None = None
    pooled: int = 0  # classes of a classifier; the network is an encoder then
    final_size: int = 8  # of a classifier's last feature map
    state: State = field(default_factory=dict)

    def __post_init__(self):
        torch.manual_seed(0)
        c = self.channels
        self._linear("time_embed.0", c, 4 * c)
        self._linear("time_embed.2", 4 * c, 4 * c)
        if self.classes:
            self._add("label_emb.weight", self.classes, 4 * c)
        if self.text:
            self._text()
        widths = [round(mult * c) for mult in self.mults]
        self._conv("input_blocks.0.0", self.inputs, widths[0])
        width, skips, i = widths[0], [widths[0]], 1
        for level, wide in enumerate(widths):
            for _ in range(self.blocks):
                self._res(f"input_blocks.{i}.0", width, wide)
                width = wide
                if self.attention[level]:
                    self._attention(f"input_blocks.{i}.1", width)
                skips.append(width)
                i += 1
            if level < len(widths) - 1:
                if self.updown:
                    self._res(f"input_blocks.{i}.0", width, width)
                elif self.learned_resampling:
                    self._conv(f"input_blocks.{i}.0.op", width, width)
                skips.append(width)
                i += 1
        self._res("middle_block.0", width, width)
        self._attention("middle_block.1", width)
        self._res("middle_block.2", width, width)
        if self.pooled:
            if self.pool != "attention":
                return self._head(width, sum(skips) + width)
            self._norm("out.0", width)
            self._add("out.2.positional_embedding", width, self.final_size**2 + 1)
            self._linear("out.2.qkv_proj", width, 3 * width, axes=1)
            self._linear("out.2.c_proj", width, self.pooled, axes=1)
            return
        i = 0
        for level, wide in reversed(list(enumerate(widths))):
            for block in range(self.blocks + 1):
                self._res(f"output_blocks.{i}.0", width + skips.pop(), wide)
                width, layer = wide, 1
                if self.attention[level]:
                    self._attention(f"output_blocks.{i}.1", width)
                    layer = 2
                if level and block == self.blocks:
                    if self.updown:
                        self._res(f"output_blocks.{i}.{layer}", width, width)
                    elif self.learned_resampling:
                        self._conv(f"output_blocks.{i}.{layer}.conv", width, width)
                i += 1
        self._norm("out.0", width)
        self._conv("out.2", width, self.outputs)

    def _head(self, width: int, features: int) -> None:
        """Of a classifier without attention pooling."""
        if self.pool == "adaptive":
            self._norm("out.0", width)
            return self._linear("out.3", width, self.pooled, axes=2)
        self._linear("out.0", features, 2048)
        if self.pool == "spatial":
            return self._linear("out.2", 2048, self.pooled)
        self._norm("out.1", 2048)
        self._linear("out.3", 2048, self.pooled)

    @property
    def file(self) -> State:
        """The weights as published."""
        return self.state

    # ------------------------------------------------------------------------------------------------------- weights

    def _add(self, name: str, *shape: int) -> None:
        self.state[name] = torch.randn(*shape) / math.sqrt(max(1, math.prod(shape[1:])))

    def _linear(self, name: str, inputs: int, outputs: int, axes: int = 0) -> None:
        self._add(f"{name}.weight", outputs, inputs, *[1] * axes)
        self._add(f"{name}.bias", outputs)

    def _conv(self, name: str, inputs: int, outputs: int) -> None:
        self._add(f"{name}.weight", outputs, inputs, 3, 3)
        self._add(f"{name}.bias", outputs)

    def _norm(self, name: str, width: int) -> None:
        self.state[f"{name}.weight"], self.state[f"{name}.bias"] = 1 + 0.1 * torch.randn(width), torch.randn(width)

    def _res(self, name: str, inputs: int, outputs: int) -> None:
        self._norm(f"{name}.in_layers.0", inputs)
        self._conv(f"{name}.in_layers.2", inputs, outputs)
        self._linear(f"{name}.emb_layers.1", 4 * self.channels, (1 + self.scale_shift) * outputs)
        self._norm(f"{name}.out_layers.0", outputs)
        self._conv(f"{name}.out_layers.3", outputs, outputs)
        if inputs != outputs:
            self._linear(f"{name}.skip_connection", inputs, outputs, axes=2)

    def _attention(self, name: str, width: int) -> None:
        self._norm(f"{name}.norm", width)
        self._linear(f"{name}.qkv", width, 3 * width, axes=1)
        if self.text:
            self._linear(f"{name}.encoder_kv", self.text[2], 2 * width, axes=1)
        self._linear(f"{name}.proj_out", width, width, axes=1)

    def _text(self) -> None:
        assert self.text
        vocabulary, length, width, depth, _ = self.text
        for i in range(depth):
            block = f"transformer.resblocks.{i}"
            self._linear(f"{block}.attn.c_qkv", width, 3 * width)
            self._linear(f"{block}.attn.c_proj", width, width)
            self._norm(f"{block}.ln_1", width)
            self._linear(f"{block}.mlp.c_fc", width, 4 * width)
            self._linear(f"{block}.mlp.c_proj", 4 * width, width)
            self._norm(f"{block}.ln_2", width)
        if self.xf_final_ln:
            self._norm("final_ln", width)
        self._add("token_embedding.weight", vocabulary, width)
        self._add("positional_embedding", length, width)
        if self.xf_padding:
            self._add("padding_embedding", length, width)
        self._linear("transformer_proj", width, 4 * self.channels)

    # ------------------------------------------------------------------------------------------------------- function

    def __call__(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        tokens: Tensor | None = None,
        mask: Tensor | None = None,
        low_res: Tensor | None = None,
        inpaint_image: Tensor | None = None,
        inpaint_mask: Tensor | None = None,
    ) -> Tensor:
        """tokens, mask: [N, length]; inpaint_mask: [N, 1, H, W], 1 = known. Returns the denoiser's output, or a
        classifier's logits."""
        half = self.channels // 2
        angles = t.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        emb = torch.cat([angles.cos(), angles.sin()], 1)
        emb = self._apply("time_embed.2", F.silu(self._apply("time_embed.0", emb)))
        if y is not None:
            emb = emb + self.state["label_emb.weight"][y]
        text = None
        if tokens is not None and mask is not None:
            states = self._encode(tokens, mask)
            emb, text = emb + self._summary(states), states.transpose(1, 2)
        size = x.shape[2:]
        if inpaint_image is not None and inpaint_mask is not None:
            x = torch.cat([x, inpaint_image * inpaint_mask, inpaint_mask], 1)
        if low_res is not None:
            x = torch.cat([x, F.interpolate(low_res, size, mode="bilinear")], 1)
        skips, h, levels = [], x, len(self.mults)
        for i in range(levels * (self.blocks + 1)):
            name, down = f"input_blocks.{i}", i > 0 and i % (self.blocks + 1) == 0
            if i == 0:
                h = self._convolve(f"{name}.0", h)
            elif down and self.updown:
                h = self._residual(f"{name}.0", h, emb, lambda x: F.avg_pool2d(x, 2))
            elif down and self.learned_resampling:
                h = self._convolve(f"{name}.0.op", h, stride=2)
            elif down:
                h = F.avg_pool2d(h, 2)
            else:
                h = self._attended(f"{name}.1", self._residual(f"{name}.0", h, emb), text)
            skips.append(h)
        h = self._residual("middle_block.0", h, emb)
        h = self._residual("middle_block.2", self._attended("middle_block.1", h, text), emb)
        if self.pool.startswith("spatial"):
            means = self._apply("out.0", torch.cat([each.mean((2, 3)) for each in (*skips, h)], 1))
            if self.pool == "spatial":
                return self._apply("out.2", F.relu(means))
            return self._apply("out.3", F.silu(self._normalize("out.1", means)))
        if self.pool == "adaptive":
            return self._apply("out.3", F.silu(self._normalize("out.0", h)).mean((2, 3)))
        if self.pooled:
            return self._pool(F.silu(self._normalize("out.0", h)))
        for i in range(levels * (self.blocks + 1)):
            name, last = f"output_blocks.{i}", i % (self.blocks + 1) == self.blocks
            h = self._residual(f"{name}.0", torch.cat([h, skips.pop()], 1), emb)
            h = self._attended(f"{name}.1", h, text)
            layer = 1 + self._has_attention(f"{name}.1")
            if last and skips:
                if self.updown:
                    h = self._residual(f"{name}.{layer}", h, emb, _double)
                else:
                    h = _double(h)
                    h = self._convolve(f"{name}.{layer}.conv", h) if self.learned_resampling else h
        return self._convolve("out.2", F.silu(self._normalize("out.0", h)))

    def _apply(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"].flatten(1), self.state[f"{name}.bias"])

    def _convolve(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        return F.conv2d(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"], stride, padding=1)

    def _normalize(self, name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 32, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def _residual(self, name: str, x: Tensor, emb: Tensor, resample=lambda x: x) -> Tensor:
        h = resample(F.silu(self._normalize(f"{name}.in_layers.0", x)))
        h, x = self._convolve(f"{name}.in_layers.2", h), resample(x)
        signal = self._apply(f"{name}.emb_layers.1", F.silu(emb))[:, :, None, None]
        if self.scale_shift:
            scale, shift = signal.chunk(2, 1)
            h = self._normalize(f"{name}.out_layers.0", h) * (1 + scale) + shift
        else:
            h = self._normalize(f"{name}.out_layers.0", h + signal)
        h = self._convolve(f"{name}.out_layers.3", F.silu(h))
        if f"{name}.skip_connection.weight" in self.state:
            x = F.conv2d(x, self.state[f"{name}.skip_connection.weight"], self.state[f"{name}.skip_connection.bias"])
        return x + h

    def _has_attention(self, name: str) -> bool:
        return f"{name}.qkv.weight" in self.state

    def _attended(self, name: str, x: Tensor, text: Tensor | None) -> Tensor:
        if not self._has_attention(name):
            return x
        n, c = x.shape[:2]
        own = self.upsample_head_channels if name.startswith("output") else 0
        heads = c // (own or self.head_channels)
        qkv = self._apply(f"{name}.qkv", self._normalize(f"{name}.norm", x).flatten(2).transpose(1, 2)).transpose(1, 2)
        if self.new_order:
            q, k, v = (part.reshape(n * heads, c // heads, -1) for part in qkv.chunk(3, 1))
        else:
            q, k, v = qkv.reshape(n * heads, 3 * c // heads, -1).chunk(3, 1)
        if text is not None:
            kv = self._apply(f"{name}.encoder_kv", text.transpose(1, 2)).transpose(1, 2)
            more_k, more_v = kv.reshape(n * heads, 2 * c // heads, -1).chunk(2, 1)
            k, v = torch.cat([more_k, k], 2), torch.cat([more_v, v], 2)
        h = _attend(q, k, v).reshape(n, c, -1)
        return x + self._apply(f"{name}.proj_out", h.transpose(1, 2)).transpose(1, 2).reshape(x.shape)

    def _summary(self, states: Tensor) -> Tensor:
        return self._apply("transformer_proj", states[:, -1])

    def _encode(self, tokens: Tensor, mask: Tensor) -> Tensor:
        assert self.text
        heads = self.text[4]
        if not self.xf_padding:  # its tokenizer pads with the end token, the last one
            tokens = tokens.where(mask, self.text[0] - 1)
        x = self.state["token_embedding.weight"][tokens] + self.state["positional_embedding"]
        if self.xf_padding:
            x = torch.where(mask[:, :, None], x, self.state["padding_embedding"])
        n, length, width = x.shape
        for i in range(self.text[3]):
            name = f"transformer.resblocks.{i}"
            qkv = self._apply(f"{name}.attn.c_qkv", self._layer_norm(f"{name}.ln_1", x)).view(n, length, heads, -1)
            q, k, v = (part.permute(0, 2, 3, 1).flatten(0, 1) for part in qkv.chunk(3, -1))
            h = _attend(q, k, v).view(n, heads, width // heads, length).permute(0, 3, 1, 2).reshape(n, length, width)
            x = x + self._apply(f"{name}.attn.c_proj", h)
            h = F.gelu(self._apply(f"{name}.mlp.c_fc", self._layer_norm(f"{name}.ln_2", x)))
            x = x + self._apply(f"{name}.mlp.c_proj", h)
        return self._layer_norm("final_ln", x) if self.xf_final_ln else x

    def _pool(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        x, heads = x.flatten(2), c // self.head_channels
        x = torch.cat([x.mean(2, keepdim=True), x], 2) + self.state["out.2.positional_embedding"]
        qkv = self._apply("out.2.qkv_proj", x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (part.reshape(n * heads, c // heads, -1) for part in qkv.chunk(3, 1))
        return self._apply("out.2.c_proj", _attend(q, k, v).reshape(n, c, -1)[:, :, 0])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, channels, length] each."""
    weights = torch.einsum("bct,bcs->bts", q, k) / math.sqrt(q.shape[1])
    return torch.einsum("bts,bcs->bct", weights.softmax(-1), v)


def _double(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)
