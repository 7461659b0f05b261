"""Networks of the original Diff-DALLE as functions of their weights, like those of ``others``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from others import Other, State, _attend
from torch import Tensor
from torch.nn import functional as F

POSITIONS = 5000
SCALE = 3.2  # the logarithm that a classifier holds


def encodings(width: int) -> Tensor:
    table = torch.zeros(POSITIONS, width)
    place = torch.arange(POSITIONS).float()[:, None]
    rates = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    table[:, 0::2], table[:, 1::2] = torch.sin(place * rates), torch.cos(place * rates)
    return table[None]


@dataclass
class Original(Other):
    """A generator, or with ``pooled`` a CLIP with as many dimensions; ``text`` as for ``Other``, where the length is
    that of captions in training. The tokens of a caption begin with a start token and end with the highest one; the
    rest are 0."""

    def _attention(self, name: str, width: int) -> None:
        self._norm(f"{name}.attn1.norm", width)
        self._linear(f"{name}.attn1.qkv", width, 3 * width, axes=1)
        self._linear(f"{name}.attn1.proj_out", width, width, axes=1)
        if self.text and not self.pooled:
            self._norm(f"{name}.attn2.norm", width)
            self._linear(f"{name}.attn2.qkv", width, width, axes=1)
            self._linear(f"{name}.attn2.proj_out", width, width, axes=1)
            if width != self.text[2]:
                self._linear(f"{name}.attn2.adjust_kv_dim", self.text[2], width, axes=1)

    def _text(self) -> None:
        assert self.text
        vocabulary, _, width, depth, _ = self.text
        for i in range(0, 2 * depth, 2):
            attention, mlp = f"text_encoder.encoder.{i}.attn1", f"text_encoder.encoder.{i + 1}.ffn"
            self._norm(f"{attention}.norm", width)
            self._linear(f"{attention}.qkv", width, 3 * width, axes=1)
            self._linear(f"{attention}.proj_out", width, width, axes=1)
            self._norm(f"{mlp}.0", width)
            self._linear(f"{mlp}.1", width, 4 * width, axes=1)
            self._linear(f"{mlp}.4", 4 * width, width, axes=1)
        self._add("text_encoder.emb.weight", vocabulary, width)
        self.state["text_encoder.pos_enc.pe"] = encodings(width)
        if self.pooled:
            self._linear("text_encoder.clip_proj", width, width, axes=1)

    @property
    def file(self) -> State:
        """The weights as published."""
        if not self.pooled:
            return self.state
        images = {name if "text_encoder" in name else f"image_encoder.{name}": v for name, v in self.state.items()}
        return {**images, "logit_scale.logit_scale": torch.tensor(SCALE)}

    @property
    def scale(self) -> float:
        """Of the classifier's cosines."""
        most = math.log(100)
        return math.exp(most - math.log1p(math.exp(most - SCALE)))

    def encode_image(self, x: Tensor, t: Tensor) -> Tensor:
        return F.normalize(self(x, t), dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        states = self._encode(tokens, tokens > 0)
        last = states[torch.arange(len(tokens)), tokens.argmax(1)]
        return F.normalize(self._apply("text_encoder.clip_proj", last), dim=-1)

    def _has_attention(self, name: str) -> bool:
        return f"{name}.attn1.qkv.weight" in self.state

    def _attended(self, name: str, x: Tensor, text: Tensor | None) -> Tensor:
        if not self._has_attention(name):
            return x
        n, c = x.shape[:2]
        heads = c // self.head_channels
        h = self._normalize(f"{name}.attn1.norm", x).flatten(2).transpose(1, 2)
        h = self._self_attention(f"{name}.attn1", h, heads)
        x = x + h.transpose(1, 2).reshape(x.shape)
        if text is None:
            return x
        h = self._normalize(f"{name}.attn2.norm", x).flatten(2).transpose(1, 2)
        q = self._apply(f"{name}.attn2.qkv", h).transpose(1, 2).reshape(n * heads, c // heads, -1)
        if f"{name}.attn2.adjust_kv_dim.weight" in self.state:
            text = self._apply(f"{name}.attn2.adjust_kv_dim", text.transpose(1, 2)).transpose(1, 2)
        kv = text.reshape(n * heads, c // heads, -1)
        h = _attend(q, kv, kv).reshape(n, c, -1).transpose(1, 2)
        return x + self._apply(f"{name}.attn2.proj_out", h).transpose(1, 2).reshape(x.shape)

    def _self_attention(self, name: str, x: Tensor, heads: int) -> Tensor:
        """Of tokens [N, T, C]."""
        n, length, c = x.shape
        qkv = self._apply(f"{name}.qkv", x).transpose(1, 2).reshape(n * heads, 3 * c // heads, length)
        h = _attend(*qkv.chunk(3, 1)).reshape(n, c, length).transpose(1, 2)
        return self._apply(f"{name}.proj_out", h)

    def _summary(self, states: Tensor) -> Tensor:
        return torch.zeros(())

    def _encode(self, tokens: Tensor, mask: Tensor) -> Tensor:
        assert self.text
        x = self.state["text_encoder.emb.weight"][tokens] + self.state["text_encoder.pos_enc.pe"][0, : tokens.shape[1]]
        for i in range(0, 2 * self.text[3], 2):
            attention, mlp = f"text_encoder.encoder.{i}.attn1", f"text_encoder.encoder.{i + 1}.ffn"
            x = x + self._self_attention(attention, self._layer_norm(f"{attention}.norm", x), self.text[4])
            h = F.gelu(self._apply(f"{mlp}.1", self._layer_norm(f"{mlp}.0", x)))
            x = x + self._apply(f"{mlp}.4", h)
        return x
