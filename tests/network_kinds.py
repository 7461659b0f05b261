"""Tiny networks of every kind with random weights, each with its settings and a call of it on some of three samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from clip_making import CONFIG, make_batch, make_clip
from decoder_making import TINY, decoder_conditions
from latent_making import B, C, conditioning, latents, own_text
from latent_making import make as make_latent
from network_making import TEXT, TRANSFORMER, VOCABULARY, captions, make_generator, noisy, pixels, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from diff_dalle.batch import Conditioning
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.generator import LowResConfig
from diff_dalle.models.latent.discriminator import Discriminator, DiscriminatorConfig
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import StageA, StageAConfig
from diff_dalle.models.norms import RunningNorm
from diff_dalle.models.text_encoder import TextEncoder
from diff_dalle.models.transformer import DenoiserConfig

Call = Callable[..., Tensor]  # of the rows, and whether dropout has keys
ALL = (0, 1, 2)
SIZE = (8, 24)  # of images of the generators and decoders
KEYS = torch.tensor([5, -7, 2**40])
STAGE_A = StageAConfig(levels=2, width=12, bottleneck_blocks=2, latent_channels=3, codebook_size=20)
SEMANTIC = SemanticConfig(stride=8, semantic_channels=5, encoder_width=8, encoder_blocks=1, previewer_width=16)
DISCRIMINATOR = DiscriminatorConfig(discriminator_depth=3, discriminator_width=16)


#: Settings of a decoder that act together.
COMBINED = {
    "early": {"memory_efficient": True, "init_dim": 12, "dim_mults": (3, 1, 2), "combine_upsample_fmaps": True,
              "scale_skip_connection": True},
    "attending": {"memory_efficient": True, "pixel_shuffle_upsample": False, "cross_embed_downsample": True,
                  "self_attn": (False, True), "sparse_attn": (True,)},
    "standardized": {"resnet_weight_standardization": True, "cosine_sim_self_attn": True,
                     "cosine_sim_cross_attn": True, "sparse_attn": (True,), "self_cond": True},
}  # fmt: skip


def with_statistics(network: nn.Module) -> nn.Module:
    """Random weights and running statistics."""
    for norm in randomize(network).modules():
        if isinstance(norm, RunningNorm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return network


def called(network: nn.Module, x: Tensor, t: Tensor, cond: Conditioning, learned_variance: bool = False) -> Call:
    def call(rows: Sequence[int] = ALL, keyed: bool = True) -> Tensor:
        rows = list(rows)
        given = replace(cond, dropout_keys=KEYS if keyed else None).select(rows)
        out = network(x[rows], t[rows], given)
        assert out.shape == (len(rows), x.shape[1] * (1 + learned_variance), *x.shape[2:])
        return out

    return call


def generator(learned_variance: bool = False, **settings: Any) -> tuple[nn.Module, Call]:
    network = make_generator(learned_variance=learned_variance, **settings)
    (x, t), level = noisy(size=SIZE), torch.tensor([0.0, 0.1, 0.5])
    cond = replace(captions(), labels=torch.tensor([0, 4, 5]), low_res=noisy(size=(2, 6))[0])
    cond = replace(cond, low_res_level=level, low_res_blur=level)
    return network, called(network, x, t, cond, learned_variance)


def transformer(**settings: Any) -> tuple[nn.Module, Call]:
    return generator(**{**TRANSFORMER, **settings})


def upsampler(**settings: Any) -> tuple[nn.Module, Call]:
    return generator(True, low_res=LowResConfig(4, True), **settings)


def text_encoder(**settings: Any) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    network, (tokens, mask) = TextEncoder(replace(TEXT, **settings), VOCABULARY), captions().caption
    return network, lambda rows=ALL: network(tokens[list(rows)], mask[list(rows)], KEYS[list(rows)])[0]


def classifier(**settings: Any) -> tuple[nn.Module, Call]:
    network, batch, t = make_clip(**settings), make_batch(ALL), torch.tensor([0, 300, 999])
    images, cond = F.interpolate(batch.images, [network.config.image_size] * 2), batch.cond

    def call(rows: Sequence[int] = ALL, keyed: bool = True) -> Tensor:
        rows = list(rows)
        keys = KEYS[rows] if keyed else None
        text = network.encode_text(cond.tokens[rows], cond.mask[rows], keys)
        return torch.stack([network.encode_image(images[rows], t[rows], keys), text], 1)

    return network, call


def decoder(low_res: bool = False, learned_variance: bool = False, **settings: Any) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    config = replace(TINY, **settings)
    network = randomize(DecoderUnet(config, True, low_res, low_res, learned_variance))
    x, t = noisy(size=SIZE, channels=config.channels)
    return network, called(network, x, t, decoder_conditions(config, size=SIZE), learned_variance)


def stage(config: Any, **settings: Any) -> tuple[nn.Module, Call]:
    config = replace(config, **settings)
    network = make_latent(config)
    return network, called(network, *latents(config), conditioning(config))


def stage_a(**settings: Any) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    network: Any = with_statistics(StageA(replace(STAGE_A, **settings)))
    images = pixels(3, 3, 16, 24)

    def call(rows: Sequence[int] = ALL) -> Tensor:
        latents = network.encode(images[list(rows)])
        return torch.cat([latents.flatten(1), network.decode(latents).flatten(1)], 1)

    return network, call


def semantic(**settings: Any) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    network: Any = with_statistics(SemanticAutoencoder(replace(SEMANTIC, **settings)))
    images = pixels(3, 3, 32, 48)

    def call(rows: Sequence[int] = ALL) -> Tensor:
        latents = network.encode(images[list(rows)])
        return torch.cat([latents.flatten(1), network.preview(latents).flatten(1)], 1)

    return network, call


def discriminator(**settings: Any) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    network, images = randomize(Discriminator(replace(DISCRIMINATOR, **settings))), pixels(3, 3, 16, 24)
    return network, lambda rows=ALL: network(images[list(rows)])


@dataclass(frozen=True)
class Kind:
    """make:     changed settings → a network and its call.
    config:        its settings without changes.
    other:         for every setting another value; ``elsewhere``: settings that other tests are about.
    together:      settings that act only together with another.
    checkpointing: the setting of activation checkpointing; "" = none.
    dropout:       settings of dropout.
    untrained:     beginnings of the names of parameters that have no gradient from the call.
    """

    make: Callable[..., tuple[nn.Module, Call]]
    config: Any
    other: Mapping[str, Any]
    elsewhere: tuple[str, ...] = ()
    together: Mapping[str, str] = field(default_factory=dict)
    checkpointing: str = "use_checkpoint"
    dropout: Mapping[str, Any] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()


#: For every setting another value.
_OTHER: dict[str, dict[str, Any]] = {
    "both": {"num_heads": 4, "num_head_channels": 4, "dropout": 0.5, "num_classes": 5, "use_checkpoint": True},
    "U-Net": {
        "image_size": 32, "num_channels": 16, "num_res_blocks": 2, "channel_mult": (1, 3),
        "attention_resolutions": (16,),
        "num_heads_upsample": 4, "use_scale_shift_norm": False, "resblock_updown": True, "conv_resample": False,
        "text_attention": "joint", "patch_size": 2, "output_conv": 4,
    },
    "transformer": {
        "num_channels": 32, "patch_size": 8, "depth": 5, "separate_blocks": 0, "patch_channels": 0, "output_conv": 0,
        "position_patches": 0, "network": "unet",
    },
    "latent": {
        "channels": 5, "patch_size": 4, "widths": (6, 9), "heads": (2, 1), "levels": ("CF", "TA"),
        "down_blocks": (2, 1),
        "up_blocks": (1, 3), "down_repeats": (1, 2), "up_repeats": (1, 1), "dropout": (0.5, 0.0), "kernel_size": 5,
        "cond_width": 7, "vector_tokens": 3, "time_width": 8, "micro_conditions": ("x", "y", "z"),
        "text": own_text(C).text,
        "pooled_width": 0, "use_checkpoint": True, "coordinates": True, "text_modulation": True,
    },
    "decoder": {
        "dim": 16, "dim_mults": (3, 1, 2), "image_embed_dim": 4, "text_embed_dim": 3, "cond_on_text_encodings": None,
        "cond_dim": None, "channels": 1, "self_attn": (False, True), "attn_dim_head": 3, "attn_heads": 3,
        "init_cross_embed": False, "num_image_tokens": 3, "num_time_tokens": 1, "self_cond": True,
        "sparse_attn": (True,),
        "cosine_sim_cross_attn": True, "cosine_sim_self_attn": True, "attend_at_middle": False, "as_published": True,
        "max_text_len": 3, "add_image_embeds_to_time": False, "init_dim": 12, "init_conv_kernel_size": 3,
        "init_cross_embed_kernel_sizes": (1, 5), "resnet_groups": (2, 4), "resnet_weight_standardization": True,
        "num_resnet_blocks": (1, 2), "cross_embed_downsample": True, "cross_embed_downsample_kernel_sizes": (2,),
        "memory_efficient": True, "scale_skip_connection": True, "pixel_shuffle_upsample": False,
        "final_conv_kernel_size": 3, "combine_upsample_fmaps": True, "checkpoint_during_training": True,
    },
    "classifier": {
        "image_size": 16, "classifier_width": 24, "classifier_depth": 2, "classifier_channel_mult": (1, 3),
        "classifier_attention_resolutions": (8,), "classifier_num_heads": 4, "classifier_num_head_channels": 4,
        "classifier_text_padding": "zeros", "classifier_enc_norm": False, "classifier_use_scale_shift_norm": False,
        "classifier_resblock_updown": False, "classifier_dropout": 0.5, "classifier_patch_size": 2,
        "classifier_enc_attn_dim": 24, "classifier_enc_depth": 1, "classifier_enc_heads": 2, "dropout_text": 0.5,
        "classifier_use_checkpoint": True,
    },
}  # fmt: skip
_ROUTES = ("route_share", "route_blocks", "route_until")
_WITH = {"init_conv_kernel_size": "init_cross_embed", "cross_embed_downsample_kernel_sizes": "cross_embed_downsample"}


def _unet_config() -> DenoiserConfig:
    return make_generator().config.unet


KINDS = {
    "U-Net": Kind(
        generator,
        _unet_config(),
        _OTHER["both"] | _OTHER["U-Net"],
        (*_OTHER["transformer"].keys() - _OTHER["U-Net"].keys(), *_ROUTES),
        dropout={"dropout": 0.3},
    ),
    "transformer": Kind(
        transformer,
        replace(_unet_config(), **TRANSFORMER),
        _OTHER["both"] | _OTHER["transformer"],
        (*_OTHER["U-Net"].keys() - _OTHER["transformer"].keys(), *_ROUTES),
        dropout={"dropout": 0.3},
    ),
    "text encoder": Kind(
        text_encoder,
        TEXT,
        {
            "enc_attn_dim": 24,
            "enc_depth": 3,
            "enc_heads": 2,
            "text_length": 12,
            "dropout_text": 0.5,
            "enc_conv": 3,
            "text_padding": "learned",
            "enc_norm": False,
        },
        checkpointing="",
        untrained=("pool.",),
    ),
    "classifier": Kind(
        classifier,
        CONFIG,
        _OTHER["classifier"],
        ("text_length",),
        checkpointing="classifier_use_checkpoint",
        dropout={"classifier_dropout": 0.3, "dropout_text": 0.3},
        untrained=("scale_logit",),
    ),
    "decoder": Kind(
        decoder, TINY, _OTHER["decoder"], ("cond_on_image_embeds",), _WITH, checkpointing="checkpoint_during_training"
    ),
    "stage B": Kind(
        lambda **changed: stage(B, **changed),
        B,
        _OTHER["latent"] | {"semantic_channels": 4, "pixel_channels": 0},
        dropout={"dropout": (0.3, 0.2)},
    ),
    "stage C": Kind(
        lambda **changed: stage(C, **changed),
        C,
        _OTHER["latent"] | {"switch_level": (False,), "text_width": 0, "image_width": 0},
        dropout={"dropout": (0.3, 0.2)},
    ),
    "stage A": Kind(
        stage_a,
        STAGE_A,
        {
            "levels": 3,
            "width": 8,
            "bottleneck_blocks": 1,
            "latent_channels": 4,
            "codebook_size": 9,
            "scale_factor": 2.0,
            "use_checkpoint": True,
        },
        untrained=("quantizer.",),
    ),
    "semantic": Kind(
        semantic,
        SEMANTIC,
        {
            "stride": 16,
            "semantic_channels": 3,
            "encoder_width": 6,
            "encoder_blocks": 2,
            "previewer_width": 8,
            "use_checkpoint": True,
        },
        ("backbone",),
    ),
    "discriminator": Kind(
        discriminator, DISCRIMINATOR, {"discriminator_depth": 2, "discriminator_width": 8}, checkpointing=""
    ),
}
