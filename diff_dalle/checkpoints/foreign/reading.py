"""Others' weights as the content of a checkpoint of ours, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ...config import InputError, named, to_dict
from ...diffusion.diffusion_config import DiffusionConfig, NoiseConfig
from ...diffusion.resample import DenoisingConfig
from ...models.generator import GeneratorConfig, LowResConfig
from ...models.noised_clip import NoisedClipConfig, NoisyClassifierConfig
from ...models.text_encoder import TextEncoderConfig
from ...models.transformer import DenoiserConfig
from ...models.unet import UNetConfig
from ..checkpoint import Identity, file_content
from ..pixels import ClassifierSettings, GeneratorSettings, NoisyClassifierSettings
from .names import TEXTS, Weight, give_weights, take_weights, weights_of
from .structure import LATENTS, Release, Structure, Unseen, find_release, structure_of

Settings: TypeAlias = "GeneratorSettings | ClassifierSettings | NoisyClassifierSettings"
Config = TypeVar("Config", bound=UNetConfig)
TOKENS = {False: "gpt2", True: "clip"}  # the vocabularies that GLIDE's networks and Diff-DALLE's read
FLAGS = ", ".join(f"--{field.name}" for field in dataclasses.fields(Unseen))
_VOCABULARY = {False: "token_embedding.weight", True: f"{TEXTS}emb.weight"}
#: Settings of a U-Net that a noised CLIP has too, called classifier_….
_SAME = (
    "channel_mult", "attention_resolutions", "num_heads", "num_head_channels", "use_scale_shift_norm",
    "resblock_updown",
)  # fmt: skip


@dataclass(frozen=True)
class Recognized:
    """A checkpoint of another project.

    release: the published one that it has the structure of; None = another.
    unseen:  what its shapes do not tell, from the release or from flags.
    """

    structure: Structure
    release: Release | None
    unseen: Unseen
    settings: Settings
    vocab_size: int

    @property
    def vocabulary(self) -> str:
        """The name of the vocabulary that it reads; empty without text."""
        return TOKENS[self.structure.original] if self.structure.text else ""

    def weights(self) -> list[Weight]:
        with torch.device("meta"):
            network = self.settings.build(self.vocab_size)
        return list(weights_of(network, self.structure.original, self.unseen.use_new_attention_order))

    def __str__(self) -> str:
        if self.release is None:
            return f"has the layout of {_project(self.structure.original)}, and is taken with {self.unseen}"
        return f"has the shapes of {self.release.project}'s {self.release.name}, and is taken with {self.unseen}"


def _project(original: bool) -> str:
    return "Diff-DALLE" if original else "Guided-Diffusion"


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
    release = find_release(structure)
    if release is None and not {"image_size", "noise_schedule"} <= set(given):
        raise InputError(
            f"{path} has the layout of {_project(structure.original)}, but the shapes of none of the published "
            f"networks: run diff-dalle convert --model_path {path} with what they do not tell ({FLAGS})"
        )
    if structure.image_channels == LATENTS:
        raise InputError(
            f"{path} is a U-Net of latents with {LATENTS} channels, whose autoencoder this library does not have: give "
            "one of images"
        )
    if release is None and not structure.original:
        _check_heads(structure, path, given)
    if structure.original:
        unseen = Unseen.of_original(structure, given)
    else:
        unseen = dataclasses.replace(release.unseen, **given) if release else Unseen(**given)
    if not structure.classes and structure.is_upsampler and not unseen.small_size:
        raise InputError(
            f"{path} is an upsampler: say by {named('small_size')} how large the images are that it enlarges"
        )
    vocab_size = shapes[_VOCABULARY[structure.original]][0] if structure.text else 0
    return Recognized(structure, release, unseen, _SETTINGS[structure.kind](structure, unseen), vocab_size)


def _check_heads(structure: Structure, path: str, given: Mapping[str, Any]) -> None:
    """InputError where it is not said how many attention heads there are."""
    if given.get("num_head_channels", -1) != -1:
        return
    if "num_heads" not in given:
        raise InputError(
            f"the shapes of {path} do not tell its attention heads: say them by {named('num_heads')} or "
            f"{named('num_head_channels')}"
        )
    if not structure.classes and any(structure.attention) and "num_heads_upsample" not in given:
        raise InputError(
            f"the shapes of {path} do not tell the attention heads of its decoder: say them by "
            f"{named('num_heads_upsample')}, -1 = as {named('num_heads')}"
        )


def _unet(structure: Structure, unseen: Unseen, config_class: type[Config]) -> Config:
    known = vars(structure) | vars(unseen)
    return config_class(
        **{field.name: known[field.name] for field in dataclasses.fields(UNetConfig) if field.name in known},
        attention_resolutions=structure.attention_resolutions(unseen.image_size),
        text_attention="joint" if structure.text and not structure.original else "cross",
    )


def _noise(unseen: Unseen) -> NoiseConfig:
    return NoiseConfig(unseen.diffusion_steps, unseen.noise_schedule, unseen.rescale_timesteps)


def _classifier(structure: Structure, unseen: Unseen) -> NoisyClassifierSettings:
    return NoisyClassifierSettings(
        NoisyClassifierConfig(_unet(structure, unseen, UNetConfig), structure.classes, structure.pool), _noise(unseen)
    )


def _clip(structure: Structure, unseen: Unseen) -> ClassifierSettings:
    assert structure.text is not None
    unet = _unet(structure, unseen, UNetConfig)
    model = NoisedClipConfig(
        image_size=unet.image_size,
        classifier_width=unet.num_channels,
        classifier_depth=unet.num_res_blocks,
        **{f"classifier_{name}": getattr(unet, name) for name in _SAME},
        classifier_enc_attn_dim=structure.text.width,
        classifier_enc_depth=structure.text.depth,
        classifier_enc_heads=unseen.enc_heads,
        classifier_text_padding="zeros",
        classifier_enc_norm=False,
        text_length=unseen.text_length,
    )
    return ClassifierSettings(model, diffusion=_noise(unseen))


def _generator(structure: Structure, unseen: Unseen) -> GeneratorSettings:
    text = TextEncoderConfig(enc_attn_dim=0)
    if structure.text:
        text = TextEncoderConfig(
            enc_attn_dim=structure.text.width,
            enc_depth=structure.text.depth,
            enc_heads=unseen.enc_heads,
            text_length=unseen.text_length if structure.original else structure.text.length + 1,
            text_padding="zeros" if structure.original else "learned" if structure.text.padded else "end",
            enc_norm=structure.text.normed and not structure.original,
        )
    low_res = LowResConfig(unseen.small_size, low_res_levels=False) if structure.is_upsampler else LowResConfig()
    model = GeneratorConfig(
        _unet(structure, unseen, DenoiserConfig), text, low_res, structure.image_channels, structure.inpaints
    )
    diffusion = DiffusionConfig(
        **vars(_noise(unseen)),
        variance="learned_range" if structure.variance_is_learned else DiffusionConfig.variance,
    )
    # Only GLIDE's captions were ever dropped. The row for "no class" is 0 until it is trained.
    dropped = structure.text is not None and not structure.original
    dropping = DenoisingConfig(caption_dropout=DenoisingConfig.caption_dropout if dropped else 0.0)
    return GeneratorSettings(model, diffusion=diffusion, denoising=dropping)


_SETTINGS: dict[str, Callable[[Structure, Unseen], Settings]] = {
    "generator": _generator,
    "classifier": _clip,
    "noisy_classifier": _classifier,
}


def content_of(found: Recognized, state: Mapping[str, Tensor], path: str) -> dict[str, Any]:
    """The content of a checkpoint of ours with weights that were recognized. InputError as for ``take_weights``."""
    whose = f"a network of {_project(found.structure.original)} with {found.unseen}"
    own = take_weights(found.weights(), state, path, whose)
    tokenizer = f"{found.vocabulary}-{found.vocab_size}" if found.structure.text else None
    identity = Identity(found.structure.kind, to_dict(found.settings), tokenizer)
    return file_content("model", identity, 0, 0, own)


def state_of(network: nn.Module, path: str, original: bool, new_order: bool = False) -> dict[str, Tensor]:
    """The weights of one of our networks, from ``path``, in the layout of Diff-DALLE (``original``), or in that of
    Guided-Diffusion and GLIDE, which has none for "no class"; see ``check_no_class``. InputError for values that the
    layout of Diff-DALLE cannot hold."""
    return give_weights(weights_of(network, original, new_order), network, path, _project(original))


def check_no_class(network: nn.Module, path: str) -> None:
    """InputError for a network of ``path`` that was trained with an embedding for "no class"."""
    tables = [value for name, value in network.state_dict().items() if name.endswith("label_emb.weight")]
    if any(table[-1].any() for table in tables):
        raise InputError(
            f'{path} has a trained embedding for "no class", for guidance, which the layout of Guided-Diffusion cannot '
            f"hold: leave it out by {named('drop_no_class')} True"
        )


#: What networks in a layout have, and what those with a text encoder have.
_PLAIN: dict[str, Any] = {
    "network": "unet",
    "patch_size": 1,
    "output_conv": 0,
    "low_res_skip": False,
    "low_res_levels": False,
}
_GUIDED_TEXT: dict[str, Any] = {"text_attention": "joint", "text_padding": ("learned", "end"), "enc_conv": 0}
_ORIGINAL_TEXT: dict[str, Any] = {
    "text_attention": "cross",
    "text_padding": "zeros",
    "enc_norm": False,
    "enc_conv": 0,
    "inpaint": False,
}


def check_layout(config: GeneratorConfig | NoisedClipConfig, path: str, original: bool) -> None:
    """InputError for a network, from ``path``, that the layout of Diff-DALLE (``original``) or that of Guided-Diffusion
    and GLIDE cannot hold."""
    required, prefix = {**_PLAIN}, ""
    if isinstance(config, NoisedClipConfig):
        found = vars(config.image_tower) | vars(config.text_tower)
        required |= {"text_padding": "zeros", "enc_norm": False}
        prefix = "classifier_"
    else:
        found = {**vars(config.unet), **vars(config.text), **vars(config.low_res), "inpaint": config.inpaint}
        found["low_res_levels"] &= config.is_upsampler
        if config.text.enc_attn_dim:
            required |= {**_ORIGINAL_TEXT, "num_classes": 0} if original else _GUIDED_TEXT
    whose = "networks of the original Diff-DALLE" if original else "networks of Guided-Diffusion and GLIDE"
    for name, value in required.items():
        if name in found and found[name] not in (value if isinstance(value, tuple) else (value,)):
            shown = name if name in _PLAIN else prefix + name
            raise InputError(f"{path} has {shown} {found[name]}, which {whose} cannot have")
