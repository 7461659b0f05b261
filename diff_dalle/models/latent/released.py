"""Weights of the released networks for ours: state dict → state dict, by name and shape.

The released files have the names of the public implementation, such as ``down_blocks.0.3.channelwise.0.weight``. A file
may hold them under ``state_dict``. Weights are converted to our dtypes (fp32).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...config import InputError, quantity
from .config import LatentUnetConfig
from .semantic import SemanticAutoencoder
from .stage_a import StageA
from .stage_b import StageB
from .stage_c import StageC

Rules = Sequence[tuple[str, str]]
SHOWN = 3  # names in a message


class Converted(NamedTuple):
    """state:  weights of our network under our names, to be loaded with ``strict=False``.
    unused: names of the file that our network has no place for.
    kept:   our names that the released networks do not have, which keep their initial values."""

    state: dict[str, Tensor]
    unused: list[str]
    kept: list[str]


_BLOCK: Rules = (
    (r"^((?:down|up)_blocks\.\d+\.\d+)\.mlp\.linear_in\.", r"\1.channelwise.0."),
    (r"^((?:down|up)_blocks\.\d+\.\d+)\.mlp\.response_norm\.", r"\1.channelwise.2."),
    (r"^((?:down|up)_blocks\.\d+\.\d+)\.mlp\.linear_out\.", r"\1.channelwise.4."),
    (r"\.attn\.in_proj\.(weight|bias)$", r".attention.attn.in_proj_\1"),
    (r"\.attn\.out_proj\.", r".attention.attn.out_proj."),
    (r"\.kv_mapper\.", r".kv_mapper.1."),
    (r"^in_conv\.", "embedding.1."),
    (r"^out_conv\.", "clf.1."),
    (r"^(down|up)_repeats\.", r"\1_repeat_mappers."),
)
_STAGE_B: Rules = (
    (r"^condition_tokens\.pooled\.", "clip_mapper."),
    (r"^semantic_mapper\.layer_in\.", "effnet_mapper.0."),
    (r"^semantic_mapper\.layer_out\.", "effnet_mapper.2."),
    (r"^pixel_mapper\.layer_in\.", "pixels_mapper.0."),
    (r"^pixel_mapper\.layer_out\.", "pixels_mapper.2."),
    (r"^up_transitions\.(\d+)\.conv\.", r"up_upscalers.\1.1."),
)
_STAGE_C: Rules = (
    (r"^condition_tokens\.text\.", "clip_txt_mapper."),
    (r"^condition_tokens\.pooled\.", "clip_txt_pooled_mapper."),
    (r"^condition_tokens\.image\.", "clip_img_mapper."),
    (r"^up_transitions\.(\d+)\.conv\.", r"up_upscalers.\1.1.blocks.1."),
)
_GATED: Rules = (
    (r"\.gates$", ".gammas"),
    (r"\.depthwise\.", ".depthwise.1."),
    (r"\.linear_in\.", ".channelwise.0."),
    (r"\.linear_out\.", ".channelwise.2."),
)


def stage_b_weights(network: StageB, released: Mapping[str, Any]) -> Converted:
    """Weights of a released stage B."""
    return _convert(network, released, [*_unet_rules(network.config, "1"), *_STAGE_B])


def stage_c_weights(network: StageC, released: Mapping[str, Any]) -> Converted:
    """Weights of a released stage C."""
    return _convert(network, released, [*_unet_rules(network.config, "1.blocks.0"), *_STAGE_C])


def stage_a_weights(network: StageA, released: Mapping[str, Any]) -> Converted:
    """Weights of a released stage A, whose scale factor is no part of them."""
    last = len(network.down_blocks)
    rules = [
        (r"^in_conv\.", "in_block.1."),
        (r"^to_latents\.", f"down_blocks.{last}.0."),
        (r"^norm\.", f"down_blocks.{last}.1."),
        (r"^quantizer\.codebook\.", "vquantizer.codebook."),
        (r"^out_conv\.", "out_block.0."),
        *((rf"^up_blocks\.{i}\.", f"up_blocks.#{i + 1}.") for i in range(len(network.up_blocks))),
        (r"^up_blocks\.#", "up_blocks."),  # each is renumbered once
        (r"^from_latents\.", "up_blocks.0.0."),
        *_GATED,
    ]
    return _convert(network, released, rules)


def semantic_encoder_weights(network: SemanticAutoencoder, released: Mapping[str, Any]) -> Converted:
    """Weights of the released semantic encoder, for a network with the backbone efficientnet_v2_s."""
    rules = ((r"^backbone\.features\.", "backbone."), (r"^mapper\.", "mapper.0."), (r"^norm\.", "mapper.1."))
    return _convert(network, released, rules, kept=r"^(previewer|latent_mean|latent_std|backbone\.(mean|std))\b")


def backbone_weights(network: SemanticAutoencoder, weights: Mapping[str, Any]) -> Converted:
    """torchvision's own weights of EfficientNetV2-S, whose classifier is not used; the projection keeps its values."""
    kept = r"^(?!backbone\.features\.)"
    return _convert(network, weights, ((r"^backbone\.features\.", "features."),), kept=kept)


def previewer_weights(network: SemanticAutoencoder, released: Mapping[str, Any]) -> Converted:
    """Weights of the released previewer."""
    previewer = network.previewer
    rules = [(r"^previewer\.out_conv\.", f"blocks.{3 * len(previewer.convs)}.")]
    for i in range(len(previewer.convs)):
        rules.append((rf"^previewer\.convs\.{i}\.", f"blocks.{3 * i}."))
        rules.append((rf"^previewer\.norms\.{i}\.", f"blocks.{3 * i + 2}."))
    return _convert(network, released, rules, kept=r"^(?!previewer\.)")


def _unet_rules(config: LatentUnetConfig, downscaler: str) -> list[tuple[str, str]]:
    """Of what depends on the config. downscaler: where a transition of the way down has its convolution."""
    names = ("", *(f"_{name}" for name in config.micro_conditions))
    mappers = [(rf"\.mappers\.{i}\.", f".mapper{name}.") for i, name in enumerate(names)]
    downs = [
        (rf"^down_transitions\.{i}\.conv\.", f"down_downscalers.{i + 1}.{downscaler}.") for i in range(config.depth - 1)
    ]
    return [*_BLOCK, *mappers, *downs]


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _convert(
    network: nn.Module,
    released: Mapping[str, Any],
    rules: Iterable[tuple[str, str]],
    kept: str = r"^(text_encoder\.|scale_factor$|quantizer\.usage$)",
) -> Converted:
    """Every tensor of the network from the one that ``rules`` name. kept: pattern of our names that have no
    counterpart. Raises InputError for missing tensors and those of other shapes."""
    rules, weights = list(rules), released.get("state_dict", released)
    state: dict[str, Tensor] = {}
    left, missing, initial = dict(weights), [], []
    for name, own in network.state_dict().items():
        if re.search(kept, name):
            initial.append(name)
            continue
        theirs = _renamed(name, rules)
        if theirs not in weights:
            missing.append(theirs)
            continue
        value = left.pop(theirs)
        # Theirs are [1, 1, 1, channels].
        value = value.flatten() if ".response_norm." in name else value
        if value.shape != own.shape:
            raise InputError(
                f"{theirs} has the shape {list(value.shape)} in the file, but the network's is {list(own.shape)}: "
                "choose the sizes (model_version) of the file's network"
            )
        state[name] = value.to(own.dtype)
    if missing:
        shown = ", ".join(missing[:SHOWN]) + (", …" if len(missing) > SHOWN else "")
        raise InputError(
            f"the file lacks {quantity(len(missing), 'tensor')} of the network ({shown}): it holds another network, or "
            "one of other sizes"
        )
    return Converted(state, list(left), initial)
