"""Classifiers of noised images: a noised CLIP, the similarity of an image and a caption at every noise level, and one
of classes (Dhariwal & Nichol 2021, §4)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, InputError, faults_of, named, option, section, settings, spelled
from ..config.bounds import MAX_BLOCKS, MAX_FACTOR, MAX_ROWS, MAX_SIDE, MAX_WIDTH
from .attention import attend
from .dropout import number_dropouts
from .layers import Linear, to_tokens
from .norms import GroupNorm32
from .options import text_length_option, width_option
from .precision import autocast_disabled
from .text_encoder import TextEncoder, TextEncoderConfig
from .unet import UNetConfig, UNetEncoder

INITIAL_SCALE = 1 / 0.07  # logit scale at initialization (Radford et al. 2021, §2.5)
MAX_SCALE = 100.0  # upper bound of the logit scale (same section; there by clipping)


def classifier_flag(setting: str) -> str:
    """The classifier's name for a setting of one of its two towers."""
    if setting in ("image_size", "text_length", "dropout_text"):
        return setting
    return f"classifier_{({'num_channels': 'width', 'num_res_blocks': 'depth'}).get(setting, setting)}"


@settings
class NoisedClipConfig:
    """Classifier (noised CLIP)"""

    image_size: int = option(64, "image resolution in pixels; the classifier accepts no other", most=MAX_SIDE)
    classifier_width: int = option(
        128, "base channels of the image tower: those of a level with multiplier 1", most=MAX_WIDTH
    )
    classifier_depth: int = option(2, "residual blocks per level of the image tower", most=MAX_BLOCKS)
    classifier_channel_mult: tuple[float, ...] = option(
        (),
        "channel multiplier of each level of the image tower; empty = Guided-Diffusion's for image_size / patch size",
        most=MAX_FACTOR,
    )
    classifier_attention_resolutions: tuple[int, ...] = option(
        (32, 16, 8), "feature-map resolutions with attention in the image tower", most=MAX_SIDE
    )
    classifier_num_heads: int = option(4, "attention heads of the image tower", most=MAX_WIDTH)
    classifier_num_head_channels: int = option(
        -1,
        "channels per attention head of the image tower, overrides classifier_num_heads; -1 = use classifier_num_heads",
        most=MAX_WIDTH,
    )
    classifier_use_scale_shift_norm: bool = option(
        True,
        "adaptive group norm in the image tower: the timestep embedding scales and shifts the normalized activations; "
        "False = it is added before the norm",
    )
    classifier_resblock_updown: bool = option(True, "downsample inside residual blocks of the image tower")
    classifier_dropout: float = option(0.0, "dropout rate in residual blocks of the image tower")
    classifier_use_checkpoint: bool = option(
        False,
        "activation checkpointing: recompute the image tower's activations in the backward pass to save memory",
        free=True,
    )
    classifier_patch_size: int = option(
        1, "patch size in pixels: space-to-depth at the image tower's input", most=MAX_SIDE
    )
    classifier_enc_attn_dim: int = width_option(
        512, "width of the text tower and dimension of the joint embedding space"
    )
    classifier_enc_depth: int = option(6, "transformer layers of the text tower", most=MAX_BLOCKS)
    classifier_enc_heads: int = option(8, "attention heads of the text tower", most=MAX_WIDTH)
    classifier_text_padding: str = option(
        "masked",
        "padding of captions: masked, or zeros: token 0, attended to like a word (Diff-DALLE)",
        choices=("masked", "zeros"),
    )
    classifier_enc_norm: bool = option(True, "layer norm of the text tower's states; False = none (Diff-DALLE)")
    text_length: int = text_length_option()
    dropout_text: float = option(0.0, "dropout rate in the text tower")

    def faults(self) -> Iterator[Fault]:
        for tower in (UNetConfig, TextEncoderConfig):
            for fault in faults_of(functools.partial(self._tower, tower)):
                rule = spelled(fault.rule, lambda name: named(classifier_flag(name)))
                yield replace(fault, setting=classifier_flag(fault.setting), rule=rule)

    def _tower(self, config_class: type):
        """The config of a tower, from the settings that this config has for it."""
        own = {field.name for field in fields(self)}
        flags = {field.name: classifier_flag(field.name) for field in fields(config_class)}
        return config_class(**{name: getattr(self, flag) for name, flag in flags.items() if flag in own})

    @property
    def image_tower(self) -> UNetConfig:
        return self._tower(UNetConfig)

    @property
    def text_tower(self) -> TextEncoderConfig:
        return self._tower(TextEncoderConfig)


class AttentionPool(nn.Module):
    """Attention pooling: the feature map's mean attends to all positions (Radford et al. 2021, §2.4).

    resolution: height and width of the feature map; sets the number of learned position embeddings.
    """

    def __init__(self, resolution: int, channels: int, heads: int, out_channels: int):
        super().__init__()
        self.heads = heads
        self.position_emb = nn.Parameter(torch.randn(resolution**2 + 1, channels) / math.sqrt(channels))
        self.q, self.kv = Linear(channels, channels), Linear(channels, 2 * channels)
        self.proj = nn.Linear(channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, resolution, resolution] → [N, out_channels]."""
        tokens = to_tokens(x)
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.position_emb.to(x.dtype)
        k, v = self.kv(tokens).chunk(2, dim=-1)
        return self.proj(attend(self.q(tokens[:, :1]), k, v, self.heads, None).squeeze(1))


class NoisedClip(nn.Module):
    """An image tower (the encoder half of the diffusion U-Net with attention pooling) and a text tower.

    Both return L2-normalized features, so that their inner product is a cosine. Trained like CLIP (Radford et al.
    2021), but on noised images and conditioned on the timestep (Dhariwal & Nichol 2021, §4; Nichol et al. 2022, GLIDE,
    §2.4), ``scale × cosine`` approaches log p(caption | x_t) up to a constant that does not depend on x_t.
    """

    entries = ("encode_image", "encode_text")  # see ``units``

    def __init__(self, config: NoisedClipConfig, vocab_size: int, in_channels: int = 3):
        super().__init__()
        self.config = config
        image, width = config.image_tower, config.classifier_enc_attn_dim
        self.image_tower = UNetEncoder(image, in_channels)
        channels = self.image_tower.channels
        self.norm = GroupNorm32(channels)
        self.pool = AttentionPool(image.image_size // image.divisor, channels, image.heads(channels), width)
        self.text_tower = TextEncoder(config.text_tower, vocab_size, summary="end")
        share = INITIAL_SCALE / MAX_SCALE
        self.scale_logit = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        number_dropouts(self)

    @property
    def scale(self) -> Tensor:
        """The logit scale (inverse softmax temperature), a scalar below 100."""
        # A sigmoid, because a clamp has no gradient at the bound.
        return MAX_SCALE * torch.sigmoid(self.scale_logit)

    def encode_image(self, x: Tensor, t: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Image features.

        x: [N, C, image_size, image_size]; t: [N], steps of the original process, as for a denoiser.
        Returns [N, classifier_enc_attn_dim] float32, L2-normalized. Raises InputError for images of the wrong size.
        """
        check_image_size(x, self.config.image_size)
        return normalized(self.pool(self.feature_map(x, t, dropout_keys)))

    def feature_map(self, x: Tensor, t: Tensor | None = None, dropout_keys: Tensor | None = None) -> Tensor:
        """What is pooled: [N, C, H, W] → [N, channels, H / divisor, W / divisor]. t: None = 0, of clean images."""
        t = x.new_zeros(len(x)) if t is None else t
        return self.norm(self.image_tower(x, t, Conditioning(dropout_keys=dropout_keys))[0], silu=True)

    def encode_text(self, tokens: Tensor, mask: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Text features. tokens, mask: [N, L]. Returns [N, classifier_enc_attn_dim] float32, L2-normalized."""
        return self.encode_tokens(tokens, mask, dropout_keys)[0]

    def encode_tokens(self, tokens: Tensor, mask: Tensor, dropout_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``encode_text``, and the states of all tokens, [N, L, classifier_enc_attn_dim], as ``TextEncoder`` gives
        them."""
        states, summary = self.text_tower(tokens, mask, dropout_keys)
        return normalized(summary), states


def check_image_size(images: Tensor, size: int) -> None:
    """InputError for images of another size than the classifier's."""
    if tuple(images.shape[2:]) != (size, size):
        found = "×".join(map(str, reversed(images.shape[2:])))
        raise InputError(f"the classifier takes images of {size}×{size} pixels (image_size), not of {found}")


def normalized(features: Tensor) -> Tensor:
    """float32 and L2-normalized, under autocast too."""
    with autocast_disabled(features.device):
        return F.normalize(features.float(), dim=-1)


POOLS = ("attention", "adaptive", "spatial", "spatial_v2")
HIDDEN = 2048  # channels of the MLP of spatial pools


@settings
class NoisyClassifierConfig:
    """Classifier of classes"""

    tower: UNetConfig = section(UNetConfig)
    classes: int = option(1000, "number of classes", least=2, most=MAX_ROWS)
    pool: str = option(
        "attention",
        "classification head: attention pooling; average pooling and a linear layer (adaptive); or average-pooled "
        "feature maps of all layers and an MLP, with a group norm (spatial_v2) or without (spatial)",
        choices=POOLS,
    )


class NoisyClassifier(nn.Module):
    """The encoder half of the diffusion U-Net with a pool: log p(class | x_t) up to a constant."""

    def __init__(self, config: NoisyClassifierConfig):
        super().__init__()
        self.config = config
        self.tower = UNetEncoder(config.tower)
        channels = self.tower.channels
        kind = config.pool
        self.norm = {"spatial": nn.Identity(), "spatial_v2": GroupNorm32(HIDDEN)}.get(kind) or GroupNorm32(channels)
        if kind == "attention":
            size = config.tower.image_size // config.tower.divisor
            self.pool: nn.Module = AttentionPool(size, channels, config.tower.heads(channels), config.classes)
        else:
            is_spatial = kind != "adaptive"
            self.hidden = nn.Linear(sum(self.tower.skip_channels) + channels, HIDDEN) if is_spatial else None
            self.pool = nn.Linear(HIDDEN if is_spatial else channels, config.classes)
        number_dropouts(self)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x: [N, 3, image_size, image_size]; t: [N], steps of the original process. Returns logits [N, classes]
        float32."""
        h, skips, _ = self.tower(x, t, Conditioning())
        if self.config.pool == "attention":
            return self.pool(self.norm(h, silu=True)).float()
        if self.hidden is None:
            return self.pool(self.norm(h, silu=True).mean((2, 3))).float()
        means = self.hidden(torch.cat([each.mean((2, 3)) for each in (*skips, h)], 1))
        if self.config.pool == "spatial":
            return self.pool(means.relu()).float()
        return self.pool(self.norm(means[:, :, None, None], silu=True).flatten(1)).float()
