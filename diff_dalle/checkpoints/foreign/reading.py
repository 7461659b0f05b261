"""Others' weights as the content of a checkpoint of ours, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...config import to_dict
from ...diffusion.diffusion_config import DiffusionConfig, NoiseConfig
from ...diffusion.resample import DenoisingConfig
from ...errors import InputError
from ...models.generator import GeneratorConfig
from ...models.noisy_classifier import NoisyClassifierConfig
from ...models.super_resolution import LowResConfig
from ...models.text_encoder import TextEncoderConfig
from ...models.unet import UNetConfig
from ..content import short
from ..kinds import GeneratorSettings, NoisyClassifierSettings, find_kind
from .names import Weight, weights_of
from .releases import Release, Unseen, find_release
from .structure import Structure, is_unet, structure_of

TOKENS = "gpt2"  # the vocabulary that GLIDE's networks read
FLAGS = ", ".join(f"--{field.name}" for field in dataclasses.fields(Unseen))
_INPAINTING = (7, 10)  # input channels: image, or image and low-resolution image; known image and its mask


@dataclass(frozen=True)
class Recognized:
    """A checkpoint of another project.

    release: the published one that it has the structure of; None = another.
    unseen:  what its shapes do not tell, from the release or from flags.
    """

    structure: Structure
    release: Release | None
    unseen: Unseen
    settings: GeneratorSettings | NoisyClassifierSettings
    vocab_size: int

    def weights(self) -> list[Weight]:
        with torch.device("meta"):
            network = find_kind(self.structure.kind).build(self.settings, self.vocab_size, "")
        return list(weights_of(network, self.unseen.use_new_attention_order))

    def __str__(self) -> str:
        if self.release is None:
            return f"has the layout of Guided-Diffusion, and is taken with {self.unseen}"
        return f"has the shapes of {self.release.project}'s {self.release.name}, and is taken with {self.unseen}"


def is_foreign(content: Any) -> bool:
    """Whether what a file holds are weights in the layout of Improved Diffusion, Guided-Diffusion or GLIDE."""
    return isinstance(content, Mapping) and all(isinstance(name, str) for name in content) and is_unet(content)


def recognize(state: Mapping[str, Tensor], path: str, given: Mapping[str, Any] | None = None) -> Recognized:
    """What weights in such a layout are of.

    given: fields of ``Unseen`` that are said by flags.

    Raises InputError for networks that we do not have, and where something is neither told by the shapes, known of a
    release, nor given.
    """
    given = given or {}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    try:
        structure = structure_of(shapes)
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        raise InputError(
            f"{path} has weights named as in Guided-Diffusion, but in shapes of no network of this kind: it may be of "
            "a changed version"
        ) from None
    if structure.in_channels in _INPAINTING:
        raise InputError(
            f"{path} is an inpainting network with {structure.in_channels} input channels, which this library does not "
            "have: give the one without"
        )
    release = find_release(structure)
    if release is None and not {"image_size", "noise_schedule"} <= set(given):
        raise InputError(
            f"{path} has the layout of Guided-Diffusion, but the shapes of none of the published networks: run "
            f"scripts/convert.py --model_path {path} with what they do not tell ({FLAGS})"
        )
    unseen = dataclasses.replace(release.unseen, **given) if release else Unseen(**given)
    if not structure.classes and structure.is_upsampler and not unseen.small_size:
        raise InputError(f"{path} is an upsampler: say by --small_size how large the images are that it enlarges")
    settings = _classifier(structure, unseen) if structure.classes else _generator(structure, unseen)
    vocab_size = shapes["token_embedding.weight"][0] if structure.text else 0
    return Recognized(structure, release, unseen, settings, vocab_size)


def _unet(structure: Structure, unseen: Unseen) -> UNetConfig:
    return UNetConfig(
        image_size=unseen.image_size,
        num_channels=structure.num_channels,
        num_res_blocks=structure.num_res_blocks,
        channel_mult=structure.channel_mult,
        attention_resolutions=structure.attention_resolutions(unseen.image_size),
        num_heads=unseen.num_heads,
        num_head_channels=unseen.num_head_channels,
        use_scale_shift_norm=structure.use_scale_shift_norm,
        resblock_updown=structure.resblock_updown,
        conv_resample=structure.conv_resample,
        num_classes=structure.num_classes,
        text_attention="joint" if structure.text else UNetConfig.text_attention,
    )


def _classifier(structure: Structure, unseen: Unseen) -> NoisyClassifierSettings:
    model = NoisyClassifierConfig(_unet(structure, unseen), structure.classes)
    noise = NoiseConfig(unseen.diffusion_steps, unseen.noise_schedule, unseen.rescale_timesteps)
    return NoisyClassifierSettings(model, noise)


def _generator(structure: Structure, unseen: Unseen) -> GeneratorSettings:
    text = TextEncoderConfig(enc_attn_dim=0)
    if structure.text:
        text = TextEncoderConfig(
            enc_attn_dim=structure.text.width,
            enc_depth=structure.text.depth,
            enc_heads=unseen.enc_heads,
            text_length=structure.text.length + 1,
            text_padding="learned",
        )
    low_res = LowResConfig(unseen.small_size, low_res_levels=False) if structure.is_upsampler else LowResConfig()
    model = GeneratorConfig(_unet(structure, unseen), text, low_res, structure.image_channels)
    diffusion = DiffusionConfig(
        diffusion_steps=unseen.diffusion_steps,
        noise_schedule=unseen.noise_schedule,
        rescale_timesteps=unseen.rescale_timesteps,
        variance="learned_range" if structure.variance_is_learned else DiffusionConfig.variance,
    )
    # Classes were never dropped, captions were. The row for "no class" is 0 until it is trained.
    dropping = DenoisingConfig(caption_dropout=DenoisingConfig.caption_dropout if structure.text else 0.0)
    return GeneratorSettings(model, diffusion=diffusion, denoising=dropping)


def content_of(found: Recognized, state: Mapping[str, Tensor], path: str) -> dict[str, Any]:
    """The content of a checkpoint of ours with weights that were recognized. InputError for a weight too many, too few
    or of another shape."""
    own: dict[str, Tensor] = {}
    left = dict.fromkeys(state)
    for weight in found.weights():
        value = state.get(weight.other)
        if type(value) is not Tensor or not value.is_floating_point():
            raise InputError(f"{path} has {'no' if value is None else 'an odd'} {weight.other}: {short(value)}")
        left.pop(weight.other, None)
        try:
            own[weight.own] = weight.take(value)
        except (RuntimeError, IndexError):
            own[weight.own] = value
        if own[weight.own].shape != weight.shape:
            raise InputError(
                f"{path} has {weight.other} of shape {tuple(value.shape)}, which does not fit a network with "
                f"{found.unseen}"
            )
    if left:
        raise InputError(f"{path} has an extra {next(iter(left))}, which Guided-Diffusion's and GLIDE's networks lack")
    return {
        "format": 1,
        "role": "model",
        "step": 0,
        "samples": 0,
        "trainee": "",
        "kind": found.structure.kind,
        "config": to_dict(found.settings),
        "tokenizer": f"{TOKENS}-{found.vocab_size}" if found.structure.text else None,
        "vocabulary": "",
        "state": own,
    }


def state_of(network: nn.Module, new_order: bool) -> dict[str, Tensor]:
    """The weights of one of our networks in the layout of the others."""
    state = network.state_dict()
    found: dict[str, Tensor] = {}
    for weight in weights_of(network, new_order):
        value = weight.give(state[weight.own])
        found[weight.other] = torch.cat([found[weight.other], value]) if weight.other in found else value.contiguous()
    return found


def check_layout(config: GeneratorConfig, path: str, whole: bool = True) -> None:
    """InputError for a generator, from ``path``, that their layout cannot hold. whole: not only the U-Net of a base
    generator."""
    text, low_res = config.text, config.low_res
    impossible = {
        "patch_size": config.unet.patch_size != 1,
        "low_res_skip": low_res.low_res_skip,
        "low_res_levels": config.is_upsampler and low_res.low_res_levels,
        "text_attention": bool(text.enc_attn_dim) and config.unet.text_attention != "joint",
        "text_padding": bool(text.enc_attn_dim) and text.text_padding != "learned",
    }
    for name, wrong in impossible.items() if whole else ():
        if wrong:
            value = getattr(config.unet, name, None) or getattr(text, name, None) or getattr(low_res, name, None)
            raise InputError(f"{path} has {name} {value}, which networks of Guided-Diffusion and GLIDE cannot have")
    if not whole and config.is_upsampler:
        raise InputError(f"{path} is an upsampler, but `unet` is for base generators")
