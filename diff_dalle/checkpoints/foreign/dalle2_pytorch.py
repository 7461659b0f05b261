"""Decoders of DALLE2-pytorch and their U-Nets as ours, and the reverse.

The file of their trainer holds the decoder as ``model``, its EMA weights as ``ema``, and optimizers; that of a decoder
has its weights, U-Nets under ``unets.0.…``; that of a U-Net has them alone. Settings are in the training's file only.
Weights that a U-Net has there but does not use are missing here, and 0 on the way back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...config import InputError, named, quantity, to_dict
from ...diffusion.parametrization import ModelMeanType, ModelVarType
from ...diffusion.process import Process
from ...diffusion.schedules import get_named_beta_schedule
from ...models.decoder.blocks import LinearAttention
from ...models.decoder.config import DecoderUnetConfig
from ...models.decoder.unet import DecoderUnet
from ..checkpoint import Identity, networks_content
from ..decoder import DecoderConfig
from ..decoder_stage import DecoderStage
from .names import Change, Weight, give_weights, same, swapped, take_weights

MARK = "to_time_hiddens.1.weight"
EMA = "ema."  # what a trainer's EMA weights are called among all weights of its file
VERSION = "1.15.6"  # of the package whose layout this is
_PARTS = (
    (r"^conditions\.time\.", "to_time_hiddens.1."),
    (r"^conditions\.time_emb\.", "to_time_cond.0."),
    (r"^conditions\.time_tokens\.", "to_time_tokens.0."),
    (r"^conditions\.image\.tokens\.", "image_to_tokens.0."),
    (r"^conditions\.image\.emb\.", "to_image_hiddens.0."),
    (r"^conditions\.image\.null_tokens$", "null_image_embed"),
    (r"^conditions\.image\.null_emb$", "null_image_hiddens"),
    (r"^conditions\.text\.tokens\.", "text_to_cond."),
    (r"^conditions\.text\.null_tokens$", "null_text_embed"),
    (r"^conditions\.level\.0\.", "to_lowres_noise_cond.1."),
    (r"^conditions\.level\.2\.", "to_lowres_noise_cond.3."),
    (r"^conditions\.norm\.", "norm_cond."),
    (r"^conditions\.middle_norm\.", "norm_mid_cond."),
    (r"^stem\.", "init_conv."),
    (r"^first_block\.", "init_resnet_block."),
    (r"^middle_in\.", "mid_block1."),
    (r"^middle_attention\.", "mid_attn."),
    (r"^middle_out\.", "mid_block2."),
    (r"^last_block\.", "final_resnet_block."),
    (r"^out_conv\.", "to_out."),
    (r"^(downs\.\d+)\.resample_in\.", r"\1.0."),
    (r"^(downs\.\d+)\.block\.", r"\1.1."),
    (r"^(downs\.\d+)\.blocks\.", r"\1.2."),
    (r"^(downs\.\d+)\.attention\.", r"\1.3."),
    (r"^(downs\.\d+)\.resample_out\.", r"\1.4."),
    (r"^(ups\.\d+)\.blocks\.0\.", r"\1.0."),
    (r"^(ups\.\d+)\.attention\.", r"\1.2."),
    (r"^(ups\.\d+)\.resample\.linear\.", r"\1.3.net.0."),
    (r"^(ups\.\d+)\.resample\.", r"\1.3."),
)
_LAYERS = (
    (r"^(downs\.\d+\.3|ups\.\d+\.2|mid_attn)\.attention\.", r"\1.fn.fn."),
    (r"\.attention\.", ".cross_attn."),
    (r"\.(fn|cross_attn)\.norm\.weight$", r".\1.norm.g"),
    (r"\.emb\.", ".time_mlp.1."),
    (r"\.(first|second)\.conv\.", r".\1.project."),
    (r"\.first\.", ".block1."),
    (r"\.second\.", ".block2."),
    (r"\.shortcut\.", ".res_conv."),
    (r"\.q\.weight$", ".to_q.weight"),
    (r"\.kv\.weight$", ".to_kv.weight"),
    (r"\.qkv\.weight$", ".to_qkv.weight"),
    (r"\.proj\.weight$", ".to_out.0.weight"),
    (r"\.out_norm\.weight$", ".to_out.1.g"),
)
#: Tables of a noise schedule that have the same names here.
_TABLES = (
    "betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod", "posterior_variance", "posterior_mean_coef1", "posterior_mean_coef2",
)  # fmt: skip
_OVER_POSITIONS = re.compile(r"(.*attention\.attention)\.")


def is_decoder(names: Collection[str]) -> bool:
    return MARK in names or f"unets.0.{MARK}" in names


def flattened(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """All weights in the file of a trainer; None for another file."""
    model, ema = content.get("model"), content.get("ema", {})
    if not isinstance(model, Mapping) or not isinstance(ema, Mapping) or not is_decoder(model):
        return None
    averages = {f"{EMA}{name}": value for name, value in ema.items() if ".ema_model." in str(name)}
    return {**model, **averages}  # the others are those of the model again, and counts


def weights_of(network: DecoderUnet) -> Iterator[Weight]:
    """All weights of a U-Net, which may be on the meta device."""
    for own, value in network.state_dict().items():
        shape = tuple(value.shape)
        take, give = _change(network, own, shape)
        yield Weight(own, _their_name(network, own), shape, take, give)


def _their_name(network: DecoderUnet, own: str) -> str:
    other = re.sub(r"^(ups\.\d+)\.blocks\.([1-9]\d*)\.", lambda found: f"{found[1]}.1.{int(found[2]) - 1}.", own)
    for pattern, replacement in (*_PARTS, *_LAYERS):
        other = re.sub(pattern, replacement, other)
    if _in_linear(network, own):
        other = other.replace(".fn.fn.", ".fn.")
    return re.sub(r"\.(weight|bias)$", r".1.\1", other) if _unshuffles(network, own) else other


def _unshuffles(network: DecoderUnet, own: str) -> bool:
    """Whether a weight is that of a convolution of 2×2 positions, there of as many times the channels."""
    is_resampling = ".resample_" in own and ".convs." not in own
    return is_resampling and network.get_submodule(own.rpartition(".")[0]).kernel_size == (2, 2)


def _in_linear(network: DecoderUnet, own: str) -> bool:
    """Whether a weight is of linear attention, whose layers are convolutions there."""
    found = _OVER_POSITIONS.match(own)
    return found is not None and isinstance(network.get_submodule(found[1]), LinearAttention)


def _change(network: DecoderUnet, own: str, shape: tuple[int, ...]) -> tuple[Change, Change]:
    """How values go from there to here, and back."""
    if own.startswith("conditions.") and ".null_" in own:
        return lambda value: value.squeeze(0), lambda value: value.unsqueeze(0)
    if ".resample.linear." in own:  # rows by (channel, place), here by (place, channel)
        return (
            lambda value: swapped(shape[0] // 4, 4, value.view(shape)),
            lambda value: _as_convolution(swapped(4, shape[0] // 4, value)),
        )
    if own.endswith(".weight") and _unshuffles(network, own):
        return lambda value: value.view(shape), lambda value: value.flatten(1)[..., None, None]
    if own.endswith(".shortcut.weight") or (_in_linear(network, own) and len(shape) == 2):
        return lambda value: value.flatten(1), _as_convolution
    if _in_linear(network, own):  # its norms
        return torch.flatten, lambda value: value.view(1, -1, 1, 1)
    return same, same


def _as_convolution(value: Tensor) -> Tensor:
    return value[..., None, None] if value.ndim == 2 else value


# --------------------------------------------------------------------------------------------------- from there to here


def decoder_content(
    state: Mapping[str, Tensor], path: str, decoder: DecoderConfig, unet: int | None = None
) -> tuple[dict[str, Any], str]:
    """The content of a checkpoint of ours of a decoder's weights or a U-Net's, and what is said about it.

    state:   all weights of the file, of a trainer's with its EMA weights, which are taken where they are.
    decoder: the settings of its training. unet: the number, from 0 on, of a U-Net whose file it is.

    InputError for settings that do not fit, and for what computes otherwise here.
    """
    role = "ema" if any(name.startswith(EMA) for name in state) else "model"
    single = MARK in state
    count = 1 if single else len({name.split(".")[1] for name in state if name.startswith("unets.")})
    if not single and count != len(decoder):
        raise InputError(f"{path} holds {quantity(count, 'U-Net')}, but the settings have {len(decoder)}: give its own")
    if single and unet is None and len(decoder) > 1:
        raise InputError(f"{path} holds one U-Net of {len(decoder)}: say by {named('unet')} which one, from 0 on")
    if unet is not None and (not single or not 0 <= unet < len(decoder)):
        what = f"from 0 to {len(decoder) - 1}" if single else f"left out, since {path} holds a whole decoder"
        raise InputError(f"unet is {unet}, but must be {what}")
    numbers = [unet or 0] if single else list(range(count))
    states = {i: dict(state) if single else _of_unet(state, i, role) for i in numbers}
    decoder = _as_shown(decoder, states, path)
    _check_schedules(state, decoder, path)
    own = {decoder.names[i]: _read_unet(each, decoder.stage(i), path) for i, each in states.items()}
    identity = Identity("decoder", {"decoder": to_dict(decoder)})
    content = networks_content(role, identity, 0, 0, own)
    if single and len(decoder) > 1:
        content["trainee"] = decoder.names[numbers[0]]
    what, weights = "a U-Net" if single else "a decoder", "EMA weights" if role == "ema" else "weights"
    return content, f"is {what} of DALLE2-pytorch; its {weights} are taken"


def _of_unet(state: Mapping[str, Tensor], i: int, role: str) -> dict[str, Tensor]:
    start = f"{EMA}{i}.ema_model." if role == "ema" else f"unets.{i}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}


def _as_shown(decoder: DecoderConfig, states: Mapping[int, Mapping[str, Tensor]], path: str) -> DecoderConfig:
    """The settings with what the weights show, which there the decoder sets."""
    unets, variances = list(decoder.unets), list(_repeated(decoder.learned_variance, len(decoder)))
    noised = [bool(each) for each in _repeated(decoder.use_noise_for_lowres_cond, len(decoder))]
    for i, state in states.items():
        unet, embedding = unets[i], state.get("image_to_tokens.0.weight")
        if unet.combine_upsample_fmaps:
            raise InputError(f"{path} has combine_upsample_fmaps, whose maps are resized otherwise here")
        if embedding is None and "to_image_hiddens.0.weight" in state:
            raise InputError(f"{path} has image_embed_dim equal to cond_dim, with which samples mix there")
        changes: dict[str, Any] = {"cond_on_image_embeds": embedding is not None}
        if embedding is not None:
            changes["image_embed_dim"] = embedding.shape[1]
        changes["cond_on_text_encodings"] = "text_to_cond.weight" in state
        unets[i] = replace(unet, as_published=True, attend_at_middle=True, **changes)
        variances[i] = len(state["to_out.weight"]) == 2 * decoder.channels
        noised[i] = "to_lowres_noise_cond.1.weight" in state
    return replace(
        decoder,
        unets=tuple(unets),
        learned_variance=tuple(variances),
        use_noise_for_lowres_cond=(False, *noised[1:]),
    )


def _repeated(values: tuple, count: int) -> tuple:
    return (*values, *[values[-1]] * count)[:count] if len(values) != count - 1 else (values[0], *values)


def _read_unet(state: Mapping[str, Tensor], stage: DecoderStage, path: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        network = stage.build()
    weights = list(weights_of(network))
    unused = _unused(stage.unet).keys() - {weight.other for weight in weights}
    used = {name: value for name, value in state.items() if name not in unused}
    whose = f"{stage.name} with the settings of {named('decoder_config')}: give the file of its training"
    return take_weights(weights, used, path, whose)


def _unused(unet: DecoderUnetConfig) -> dict[str, tuple[int, ...]]:
    """Weights that every U-Net has there, although not all use them."""
    return {
        "null_image_embed": (1, unet.num_image_tokens, unet.token_width),
        "null_image_hiddens": (1, unet.emb_width),
        "null_text_embed": (1, unet.max_text_len, unet.token_width),
        "norm_cond.weight": (unet.token_width,),
        "norm_cond.bias": (unet.token_width,),
    }


def _check_schedules(state: Mapping[str, Tensor], decoder: DecoderConfig, path: str) -> None:
    """InputError for another noise schedule than the file's."""
    for i, stage in enumerate(decoder.stages()):
        betas = state.get(f"noise_schedulers.{i}.betas")
        if betas is None:
            continue
        process = stage.diffusion
        own = torch.from_numpy(get_named_beta_schedule(process.noise_schedule, process.diffusion_steps)).float()
        if own.shape != betas.shape or not torch.allclose(own, betas.float(), rtol=1e-4, atol=1e-7):
            raise InputError(
                f"{path} was trained with another noise schedule than {stage.name}'s {process.noise_schedule} of "
                f"{process.diffusion_steps} steps: give the file of its training with {named('decoder_config')}"
            )


# --------------------------------------------------------------------------------------------------- from here to there


def unet_state(network: DecoderUnet, stage: DecoderStage, path: str) -> dict[str, Tensor]:
    """A U-Net of ours as one there. InputError for what theirs cannot have, such as our timesteps."""
    unet = stage.unet
    for name, value in (("as_published", True), ("attend_at_middle", True), ("combine_upsample_fmaps", False)):
        if getattr(unet, name) != value:
            raise InputError(f"{path} has {name} {not value} in {stage.name}, which networks of DALLE2-pytorch lack")
    found = {name: torch.zeros(shape) for name, shape in _unused(unet).items()}
    return found | give_weights(weights_of(network), network, path, "DALLE2-pytorch")


def decoder_state(networks: Mapping[int, DecoderUnet], decoder: DecoderConfig, path: str) -> dict[str, Tensor]:
    """The weights and tables of a decoder there."""
    found = dict[str, Tensor]()
    for i, network in networks.items():
        stage = decoder.stage(i)
        found |= {f"unets.{i}.{name}": value for name, value in unet_state(network, stage, path).items()}
        process = stage.diffusion
        weight = process.p2_k, process.p2_gamma if process.loss_weighting == "p2" else 0.0
        found |= _tables(f"noise_schedulers.{i}.", process.noise_schedule, process.diffusion_steps, *weight)
        if stage.has_noise:
            found |= _tables(f"lowres_conds.{i}.noise_scheduler.", "linear", 1000)
    return found


def _tables(start: str, schedule: str, steps: int, k: float = 1.0, gamma: float = 0.0) -> dict[str, Tensor]:
    """The tables of a noise schedule."""
    process = Process(get_named_beta_schedule(schedule, steps), ModelMeanType.EPSILON, ModelVarType.FIXED_SMALL)
    tables = {name: torch.from_numpy(getattr(process, name)) for name in _TABLES}
    kept = tables["alphas_cumprod"]
    tables |= {
        "sqrt_recip_alphas_cumprod": (1 / kept).sqrt(),  # infinite without a signal, unlike here
        "sqrt_recipm1_alphas_cumprod": (1 / kept - 1).sqrt(),
        "posterior_log_variance_clipped": tables["posterior_variance"].clamp(min=1e-20).log(),
        "p2_loss_weight": (k + kept / (1 - kept)) ** -gamma,
    }
    return {f"{start}{name}": value.float() for name, value in tables.items()}
