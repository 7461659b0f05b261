"""Weights of the released networks for ours, and the reverse: state dict → state dict, by name and shape.

The released files have the names of the public implementation, such as ``down_blocks.0.3.channelwise.0.weight``. A file
may hold them under ``state_dict``. Weights are converted to our dtypes (fp32).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...config import InputError, quantity
from ..adapters.lora import adaptable
from .config import LatentUnetConfig
from .semantic import SemanticAutoencoder
from .stage_a import StageA
from .stages import StageB, StageC

Rules = Sequence[tuple[str, str]]
SHOWN = 3  # names in a message
TORCHVISION = "features.0.0.weight"  # of a file of the backbone alone
PREVIEWER = "blocks.0.weight"


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
_FUSED = ".in_proj_weight"
#: The parts of stage C and of its blocks as they are defined there; those of the timestep blocks have our order.
_ORDER = (
    *("clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper", "embedding"),
    *("down_blocks", "down_downscalers", "down_repeat_mappers", "up_blocks", "up_upscalers", "up_repeat_mappers"),
    *("clf", "depthwise", "channelwise", "attention", "attn", "out_proj", "kv_mapper", "blocks"),
)


def _stage_a(network: StageA) -> Rules:
    last = len(network.down_blocks)
    return [
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


def _semantic_encoder(network: SemanticAutoencoder) -> Rules:
    return ((r"^backbone\.features\.", "backbone."), (r"^mapper\.", "mapper.0."), (r"^norm\.", "mapper.1."))


def _backbone(network: SemanticAutoencoder) -> Rules:
    return ((r"^backbone\.features\.", "features."),)


def _previewer(network: SemanticAutoencoder) -> Rules:
    previewer = network.previewer
    rules = [(r"^previewer\.out_conv\.", f"blocks.{3 * len(previewer.convs)}.")]
    for i in range(len(previewer.convs)):
        rules.append((rf"^previewer\.convs\.{i}\.", f"blocks.{3 * i}."))
        rules.append((rf"^previewer\.norms\.{i}\.", f"blocks.{3 * i + 2}."))
    return rules


def _stage_b(network: StageB) -> Rules:
    return [*_unet_rules(network.config, "1"), *_STAGE_B]


def _stage_c(network: StageC) -> Rules:
    return [*_unet_rules(network.config, "1.blocks.0"), *_STAGE_C]


def _controlnet(network: Any) -> Rules:
    """Of a ``LatentControlNet``. Projections are numbered as the blocks are listed."""
    projections = [(rf"^projections\.{block}\.", f"projections.#{i}.") for i, block in enumerate(network.blocks)]
    return [
        *projections,
        (r"^projections\.#", "projections."),  # each is renumbered once
        (r"^backbone\.layers\.(\d+)\.(\d)\.", r"backbone.\1.blocks.\2."),
        (r"^backbone\.(layers|network)\.", "backbone."),
    ]


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


@dataclass(frozen=True)
class Layout:
    """One kind of file.

    mark:  a tensor that it has, and files of the other kinds do not.
    rules: network → our names as theirs.
    kept:  pattern of our names that have no counterpart.
    """

    mark: str
    rules: Callable[[Any], Rules]
    kept: str = r"^text_encoder\."

    def names(self, network: nn.Module) -> dict[str, str]:
        """Their names of the network's tensors by ours, of those that they have."""
        rules = list(self.rules(network))
        return {name: _renamed(name, rules) for name in network.state_dict() if not re.search(self.kept, name)}

    def read(self, network: nn.Module, released: Mapping[str, Any]) -> Converted:
        """A file's tensors for the network. Raises InputError for missing ones and those of other shapes."""
        weights, names, own = released.get("state_dict", released), self.names(network), network.state_dict()
        if missing := [theirs for theirs in names.values() if theirs not in weights]:
            shown = ", ".join(missing[:SHOWN]) + (", …" if len(missing) > SHOWN else "")
            raise InputError(
                f"the file lacks {quantity(len(missing), 'tensor')} of the network ({shown}): it holds another "
                "network, or one of other sizes"
            )
        state: dict[str, Tensor] = {}
        for name, theirs in names.items():
            value = weights[theirs].flatten() if _is_expanded(name) else weights[theirs]
            if value.shape != own[name].shape:
                raise InputError(
                    f"{theirs} has the shape {list(value.shape)} in the file, but the network's is "
                    f"{list(own[name].shape)}: choose the sizes (model_version) of the file's network"
                )
            state[name] = value.to(own[name].dtype)
        unused, kept = weights.keys() - set(names.values()), own.keys() - names.keys()
        return Converted(state, [name for name in weights if name in unused], [name for name in own if name in kept])

    def write(self, network: nn.Module) -> dict[str, Tensor]:
        """The file of a network; ``read`` gives the same tensors."""
        own = network.state_dict()
        return {
            theirs: own[name].view(1, 1, 1, -1) if _is_expanded(name) else own[name]
            for name, theirs in self.names(network).items()
        }


def _is_expanded(name: str) -> bool:
    """Whether a tensor has the shape [1, 1, 1, channels] there."""
    return ".response_norm." in name


#: By kind of network: what its files are. A semantic encoder comes in two, or with torchvision's own backbone, whose
#: classifier is not used. The scale factor of stage A is no part of its file.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "stage_a": (Layout("vquantizer.codebook.weight", _stage_a, r"^(scale_factor|quantizer\.usage)$"),),
    "semantic": (
        Layout("mapper.0.weight", _semantic_encoder, r"^(previewer|latent_mean|latent_std|backbone\.(mean|std))\b"),
        Layout(PREVIEWER, _previewer, r"^(?!previewer\.)"),
        Layout(TORCHVISION, _backbone, r"^(?!backbone\.features\.)"),
    ),
    "stage_b": (Layout("effnet_mapper.0.weight", _stage_b),),
    "stage_c": (Layout("clip_txt_mapper.weight", _stage_c),),
    "stage_c_controlnet": (Layout("projections.0.0.weight", _controlnet, r"^$"),),
}


def adapted_names(network: StageC) -> dict[str, str]:
    """Our names of the modules of a stage C that LoRAs adapt by those there, in the order in which theirs number them:
    as they are defined, and the projection of an attention's inputs after that of its output."""
    (layout,) = LAYOUTS["stage_c"]
    names, found = layout.names(network), dict[str, str]()
    for module in adaptable(network):
        theirs = names.get(f"{module}.weight", "")
        for ending in (".weight", _FUSED):
            if theirs.endswith(ending):
                found[theirs.removesuffix(ending)] = module
    return dict(sorted(found.items(), key=lambda pair: _defined(pair[0])))


def _defined(name: str) -> list[float]:
    """Where a module comes in the order of definition."""
    rank = {part: i for i, part in enumerate(_ORDER)}
    places = [float(part) if part.isdigit() else float(rank.get(part, len(_ORDER))) for part in name.split(".")]
    return [*places, math.inf] if name.endswith(".attn") else places


def find_released(kind: str, names: Collection[str]) -> Layout | None:
    """What a file with tensors of these names is, of a kind of network; None = something else."""
    return next((layout for layout in LAYOUTS[kind] if layout.mark in names), None)
