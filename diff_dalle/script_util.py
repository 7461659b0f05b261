"""``guided_diffusion.script_util``: the settings of its scripts by name, and what is built from them.

Together with the modules ``dist_util``, ``logger``, ``resample``, ``respace``, ``gaussian_diffusion``, ``unet`` and
``nn`` it lets a script with a loop and data of its own run with ``guided_diffusion`` replaced by ``diff_dalle``. The
library itself imports none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from .diffusion import diffusion_config
from .diffusion.diffusion_config import DiffusionConfig
from .diffusion.gaussian_diffusion import SpacedDiffusion
from .models.unet import CHANNEL_MULTS
from .unet import EncoderUNetModel, SuperResModel, UNetModel

NUM_CLASSES = 1000  # of class-conditional networks and of classifiers: ImageNet's

_CLASSIFIER_HEADS = 64  # channels of each
#: Upsamplers to 512 are not as wide at the top as generators of this size.
_UPSAMPLER_MULTS = {**CHANNEL_MULTS, 512: CHANNEL_MULTS[256]}


def diffusion_defaults() -> dict[str, Any]:
    """Settings of a diffusion process."""
    return {
        "learn_sigma": False,
        "diffusion_steps": 1000,
        "noise_schedule": "linear",
        "timestep_respacing": "",
        "use_kl": False,
        "predict_xstart": False,
        "rescale_timesteps": False,
        "rescale_learned_sigmas": False,
    }


def classifier_defaults() -> dict[str, Any]:
    """Settings of a classifier."""
    return {
        "image_size": 64,
        "classifier_use_fp16": False,
        "classifier_width": 128,
        "classifier_depth": 2,
        "classifier_attention_resolutions": "32,16,8",
        "classifier_use_scale_shift_norm": True,
        "classifier_resblock_updown": True,
        "classifier_pool": "attention",
    }


def model_and_diffusion_defaults() -> dict[str, Any]:
    """Settings of a generator and its process."""
    return {
        "image_size": 64,
        "num_channels": 128,
        "num_res_blocks": 2,
        "num_heads": 4,
        "num_heads_upsample": -1,
        "num_head_channels": -1,
        "attention_resolutions": "16,8",
        "channel_mult": "",
        "dropout": 0.0,
        "class_cond": False,
        "use_checkpoint": False,
        "use_scale_shift_norm": True,
        "resblock_updown": False,
        "use_fp16": False,
        "use_new_attention_order": False,
        **diffusion_defaults(),
    }


def classifier_and_diffusion_defaults() -> dict[str, Any]:
    """Settings of a classifier and its process."""
    return {**classifier_defaults(), **diffusion_defaults()}


def sr_model_and_diffusion_defaults() -> dict[str, Any]:
    """Settings of an upsampler and its process."""
    found = model_and_diffusion_defaults()
    for name in ("image_size", "channel_mult", "use_new_attention_order"):
        del found[name]
    return {**found, "large_size": 256, "small_size": 64}


def create_model_and_diffusion(**settings: Any) -> tuple[UNetModel, SpacedDiffusion]:
    """A generator and its process, from all settings of ``model_and_diffusion_defaults``."""
    network, process = _parted(settings, model_and_diffusion_defaults())
    return create_model(learn_sigma=process["learn_sigma"], **network), _process(process)


def create_classifier_and_diffusion(**settings: Any) -> tuple[EncoderUNetModel, SpacedDiffusion]:
    """A classifier and its process, from all settings of ``classifier_and_diffusion_defaults``. ``learn_sigma`` is of
    the process alone."""
    network, process = _parted(settings, classifier_and_diffusion_defaults())
    return create_classifier(**network), _process(process)


def sr_create_model_and_diffusion(**settings: Any) -> tuple[SuperResModel, SpacedDiffusion]:
    """An upsampler and its process, from all settings of ``sr_model_and_diffusion_defaults``."""
    network, process = _parted(settings, sr_model_and_diffusion_defaults())
    return sr_create_model(learn_sigma=process["learn_sigma"], **network), _process(process)


def _parted(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a network and of its process. TypeError unless they are those of ``defaults``."""
    if odd := settings.keys() ^ defaults.keys():
        name = sorted(odd)[0]
        raise TypeError(f"{name} is {'no such setting' if name in settings else 'missing'}")
    process = {name: settings[name] for name in diffusion_defaults()}
    return {name: value for name, value in settings.items() if name not in process}, process


def _process(settings: Mapping[str, Any]) -> SpacedDiffusion:
    others = {name: value for name, value in settings.items() if name != "diffusion_steps"}
    return create_gaussian_diffusion(steps=settings["diffusion_steps"], **others)


def create_model(
    image_size: int,
    num_channels: int,
    num_res_blocks: int,
    channel_mult: str = "",
    learn_sigma: bool = False,
    class_cond: bool = False,
    attention_resolutions: str = "16",
    **others: Any,
) -> UNetModel:
    """A generator of RGB images, class-conditional of ``NUM_CLASSES`` with ``class_cond``.

    channel_mult:          multipliers of the levels, as "1,2,3,4"; empty = those of ``image_size``.
    attention_resolutions: sides of the feature maps with attention, as "16,8".
    learn_sigma:           twice the output channels, for a learned variance.
    others:                ``dropout`` and further arguments of ``UNetModel``.
    """
    mults = tuple(map(float, channel_mult.split(","))) if channel_mult else _mults(image_size)
    return UNetModel(
        image_size,
        3,
        num_channels,
        6 if learn_sigma else 3,
        num_res_blocks,
        _factors(image_size, attention_resolutions),
        channel_mult=mults,
        num_classes=NUM_CLASSES if class_cond else None,
        **others,
    )


def create_classifier(
    image_size: int,
    classifier_use_fp16: bool,
    classifier_width: int,
    classifier_depth: int,
    classifier_attention_resolutions: str,
    classifier_use_scale_shift_norm: bool,
    classifier_resblock_updown: bool,
    classifier_pool: str,
) -> EncoderUNetModel:
    """A classifier of RGB images into ``NUM_CLASSES``."""
    return EncoderUNetModel(
        image_size,
        3,
        classifier_width,
        NUM_CLASSES,
        classifier_depth,
        _factors(image_size, classifier_attention_resolutions),
        channel_mult=_mults(image_size),
        use_fp16=classifier_use_fp16,
        num_head_channels=_CLASSIFIER_HEADS,
        use_scale_shift_norm=classifier_use_scale_shift_norm,
        resblock_updown=classifier_resblock_updown,
        pool=classifier_pool,
    )


def sr_create_model(
    large_size: int,
    small_size: int,
    num_channels: int,
    num_res_blocks: int,
    learn_sigma: bool,
    class_cond: bool,
    attention_resolutions: str,
    **others: Any,
) -> SuperResModel:
    """An upsampler of RGB images. ``small_size`` is what the scripts resize images to: the network takes any size.

    others: as of ``create_model``.
    """
    return SuperResModel(
        large_size,
        3,
        num_channels,
        6 if learn_sigma else 3,
        num_res_blocks,
        _factors(large_size, attention_resolutions),
        channel_mult=_UPSAMPLER_MULTS.get(large_size, _mults(large_size)),
        num_classes=NUM_CLASSES if class_cond else None,
        **others,
    )


def _mults(image_size: int) -> tuple[float, ...]:
    return next(mults for least, mults in CHANNEL_MULTS.items() if image_size >= least)


def _factors(image_size: int, resolutions: str) -> tuple[int, ...]:
    """Factors of downsampling at which feature maps have these sides."""
    return tuple(image_size // int(side) for side in resolutions.split(","))


def create_gaussian_diffusion(
    *,
    steps: int = 1000,
    learn_sigma: bool = False,
    sigma_small: bool = False,
    noise_schedule: str = "linear",
    use_kl: bool = False,
    predict_xstart: bool = False,
    rescale_timesteps: bool = False,
    rescale_learned_sigmas: bool = False,
    timestep_respacing: Any = "",
) -> SpacedDiffusion:
    """The process that these settings describe. timestep_respacing: see ``space_timesteps``; empty = all steps."""
    fixed = "fixed_small" if sigma_small else "fixed_large"
    error = "rescaled_mse" if rescale_learned_sigmas else "mse"
    config = DiffusionConfig(
        diffusion_steps=steps,
        noise_schedule=noise_schedule,
        rescale_timesteps=rescale_timesteps,
        prediction="x_start" if predict_xstart else "eps",
        variance="learned_range" if learn_sigma else fixed,
        loss_type="rescaled_kl" if use_kl else error,
    )
    return diffusion_config.create_gaussian_diffusion(config, timestep_respacing)


def add_dict_to_argparser(parser: argparse.ArgumentParser, default_dict: Mapping[str, Any]) -> None:
    """A flag for each setting, of its default's type; booleans also without a value, as ``--class_cond``."""
    for name, default in default_dict.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", type=str2bool, default=default, nargs="?", const=True)
        else:
            parser.add_argument(f"--{name}", type=str if default is None else type(default), default=default)


def args_to_dict(args: argparse.Namespace, keys: Iterable[str]) -> dict[str, Any]:
    """The values of these flags."""
    return {key: getattr(args, key) for key in keys}


def str2bool(v: str | bool) -> bool:
    """yes, true, t, y, 1 or no, false, f, n, 0 in any case. argparse.ArgumentTypeError for other texts."""
    text = str(v).lower()
    if text not in ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"{v!r} is neither true nor false")
    return text in ("yes", "true", "t", "y", "1")
