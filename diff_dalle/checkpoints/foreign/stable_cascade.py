"""ControlNets and LoRAs of Stable Cascade's trainings as ours, and the reverse.

Their files have no names of what they change. A ControlNet numbers its projections, a LoRA its pairs in the order in
which stage C defines the adapted modules, and a token is an id of CLIP's vocabulary, new ones after the last.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...config import InputError, named, quantity, to_dict
from ...images.control_filters.table import ControlConfig
from ...models.adapters.latent_controlnet import BackboneConfig, LatentControlConfig
from ...models.adapters.lora import DOWN, UP, adaptable
from ...models.latent.released import LAYOUTS, PREVIEWER, TORCHVISION, adapted_names, find_released
from ...models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageC, StageCConfig
from ...text.trained_tokens import TrainedTokens
from ..checkpoint import Identity, file_content
from ..controlnets import BaseRecord, StageCControlNetSettings
from ..lora_file import DELTAS, Lora, LoraAbout
from .names import TABLES

FILTERS = (".attn",)  # of the documented training
EMBEDDINGS, INDICES = "embeddings.embeddings", "embeddings.indices"
_PAIRS = "weights."
_PUBLISHED = "3.6B"  # the stage C of the published ControlNets


def is_controlnet(names: Collection[str]) -> bool:
    return LAYOUTS["stage_c_controlnet"][0].mark in names


def is_lora(names: Collection[str]) -> bool:
    return f"{_PAIRS}0.{DOWN}" in names


def trains_tokens(state: Mapping[str, Tensor]) -> bool:
    return INDICES in state and state[INDICES].numel() > 0


def network_in(names: Collection[str]) -> str:
    """The kind of the network of Stable Cascade in a file with weights of these names; empty = none."""
    for kind in _REQUIRED:
        layout = find_released(kind, names)
        if layout is None or layout.mark == TORCHVISION:
            continue
        if layout.mark != PREVIEWER or all(name.startswith("blocks.") for name in names):
            return kind
    return ""


def network_command(kind: str, paths: Sequence[str], version: str | None = None) -> str:
    """What makes a checkpoint of ours of files of a network there. version: its size, if it is known."""
    sizes = {"stage_b": [*STAGE_B_SIZES], "stage_c": [*STAGE_C_SIZES]}.get(kind, [])
    published = [name for name in sizes if name != "tiny"]
    chosen = version if version in published else "|".join(published)
    size = f" --model_version {chosen}" if published else ""
    return f"diff-dalle import_cascade --stage {kind}{size} --weights {','.join(paths)} --out {kind}.pt"


def command(adapter: str, path: str) -> str:
    """What makes a file of ours of one of theirs. adapter: controlnet or lora."""
    return f"diff-dalle import_cascade --stage {adapter} --base STAGE_C.pt --weights {path}"


# ---------------------------------------------------------------------------------------------------------- ControlNets


@dataclass(frozen=True)
class _Backbone:
    """What the shapes of a ControlNet tell."""

    mode: str
    channels: int
    projections: int
    config: BackboneConfig


def controlnet_content(
    state: Mapping[str, Tensor],
    path: str,
    base: StageCConfig | None = None,
    record: BaseRecord | None = None,
    blocks: Sequence[int] = (),
    controlnet_filter: str = "",
    params: str = "",
) -> tuple[dict[str, Any], str]:
    """The content of a checkpoint of ours of a ControlNet there, and what it is taken for.

    base:   the stage C that it steers; None = the one of the published ControlNets. record: of that base.
    blocks: those that it steers, in the order of its projections; empty = as published. controlnet_filter, params:
            likewise.

    InputError for what is neither given nor known of the published ControlNets, and for weights that do not fit.
    """
    found = _backbone(state, path)
    key = {"mode": found.mode, "channels": found.channels, "projections": found.projections}
    is_usual = base is None or base.widths == STAGE_C_SIZES[_PUBLISHED].widths
    known: Mapping[str, Any] = next(
        (row for row in TABLES["controlnets"] if is_usual and key.items() <= _keyed(row).items()), {}
    )
    blocks = tuple(blocks) or tuple(known.get("blocks", ()))
    missing = [named("controlnet_blocks")] * (not blocks)
    missing += [named("controlnet_filter")] * (not (controlnet_filter or known))
    if missing:
        shapes = ", ".join(f"{name} {value}" for name, value in key.items())
        raise InputError(
            f"{path} is a ControlNet of Stable Cascade with the shapes of none of the published ones ({shapes}): give "
            f"{' and '.join(missing)} of its training to {command('controlnet', path)}"
        )
    if len(blocks) != found.projections:
        count = quantity(found.projections, "projection")
        raise InputError(f"{path} has {count}, but {named('controlnet_blocks')} lists {len(blocks)}: give its own")
    if not controlnet_filter:
        controlnet_filter, params = known["filter"], json.dumps(known.get("params", {}))
    settings = StageCControlNetSettings(
        controlnet=LatentControlConfig(blocks, found.mode, found.config),
        control=ControlConfig(controlnet_filter, params or "{}", found.channels).as_published(),
        model=base or STAGE_C_SIZES[_PUBLISHED],
        base=record or BaseRecord(),
    )
    settings.control.check()
    with torch.device("meta"):
        network = settings.build()
    (layout,) = LAYOUTS["stage_c_controlnet"]
    read = layout.read(network, state)
    if read.unused:
        raise InputError(f"{path} has an extra {read.unused[0]}, which a ControlNet {found.mode} lacks")
    identity = Identity(settings.name, to_dict(settings))
    text = (
        f"is a ControlNet of Stable Cascade, and is taken with the filter {controlnet_filter} "
        f"{settings.control.controlnet_filter_params} on the blocks {', '.join(map(str, blocks))}"
    )
    if note := settings.control.note:
        text += f"; {note}"
    return file_content("model", identity, 0, 0, read.state), text


def _keyed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "projections": len(row["blocks"])}


def _backbone(state: Mapping[str, Tensor], path: str) -> _Backbone:
    projections = sum(name.startswith("projections.") and name.endswith(".0.weight") for name in state)
    stem = state.get("backbone.0.0.weight")
    if stem is not None and stem.ndim == 4:
        padded = BackboneConfig(stem_padding=stem.shape[1] == 3)
        return _Backbone("effnet", stem.shape[1], projections, padded)
    first, second = state.get("backbone.0.weight"), state.get("backbone.2.weight")
    if first is None or second is None or first.ndim != 4 or second.ndim != 4:
        raise InputError(f"{path} has projections of a ControlNet, but no backbone of one of Stable Cascade")
    if first.shape[2] > 1:
        return _Backbone("simple", first.shape[1], projections, BackboneConfig())
    residuals = sum(name.startswith("backbone.") and name.endswith(".blocks.0.weight") for name in state)
    config = BackboneConfig(large_width=second.shape[0], large_blocks=residuals)
    return _Backbone("large", first.shape[1], projections, config)


# ---------------------------------------------------------------------------------------------------------------- LoRAs


def lora_of(
    state: Mapping[str, Tensor],
    path: str,
    network: StageC,
    base: str,
    filters: Sequence[str] = FILTERS,
    train_tokens: tuple[str, ...] = (),
    tokens: TrainedTokens[Any] | None = None,
    clip: str = "",
) -> Lora:
    """A LoRA of ours of one there.

    network: its base, which may be on the meta device; base: the identity of that.
    filters: the module_filters of its training. train_tokens, tokens: those of its training, and what they mean for
             the CLIP with the identity ``clip``.

    InputError for pairs that do not fit the selected modules, and for other tokens than the file's.
    """
    selected = _selected(network, filters)
    count = len({name.split(".")[1] for name in state if name.startswith(_PAIRS)})
    if count != len(selected):
        raise InputError(
            f"{path} adapts {quantity(count, 'module')}, but {', '.join(filters)} selects {len(selected)}: give the "
            f"{named('module_filters')} of its training to {command('lora', path)}"
        )
    tensors = dict[str, Tensor]()
    for k, module in enumerate(selected.values()):
        weight = network.get_parameter(f"{module}.weight")
        down, up = (state.get(f"{_PAIRS}{k}.{each}") for each in (DOWN, UP))
        rank = 0 if down is None else len(down)
        fits = [tuple(each.shape) for each in (down, up) if each is not None]
        if down is None or up is None or fits != [(rank, weight.shape[1]), (len(weight), rank)]:
            raise InputError(
                f"{path} has the shapes {fits} for {module}, whose weight is {tuple(weight.shape)}: give the "
                f"{named('module_filters')} of its training to {command('lora', path)}"
            )
        tensors[f"{module}.{DOWN}"] = down.float().repeat_interleave(weight[0, 0].numel(), 1)
        tensors[f"{module}.{UP}"] = up.float()
    ids = state[INDICES].long().tolist() if INDICES in state else []
    if ids or tokens:
        tensors[DELTAS] = _deltas(state, ids, path, tokens)
    rank = next((len(value) for name, value in tensors.items() if name.endswith(DOWN)), 1)
    same = {name for name in adaptable(network) if any(text in name for text in filters)} == set(selected.values())
    chosen = tuple(filters) if same else tuple(selected.values())
    about = LoraAbout("stage_c", "", base, rank, 1.0, chosen, train_tokens, clip)
    return Lora(path, about, tensors)


def _selected(network: StageC, filters: Sequence[str]) -> dict[str, str]:
    """Our names of the modules that filters select there, by theirs."""
    return {name: own for name, own in adapted_names(network).items() if any(text in name for text in filters)}


def _deltas(state: Mapping[str, Tensor], ids: Sequence[int], path: str, tokens: TrainedTokens[Any] | None) -> Tensor:
    """Rows in our order."""
    if tokens is None:
        raise InputError(
            f"{path} trains {quantity(len(ids), 'token')} (ids {', '.join(map(str, ids))}), whose names it does not "
            f"say: give {named('train_tokens')} of its training to {command('lora', path)}"
        )
    wanted = _their_ids(tokens)
    if sorted(wanted) != sorted(ids):
        raise InputError(
            f"{path} trains the tokens with the ids {', '.join(map(str, sorted(ids)))}, but {named('train_tokens')} "
            f"finds {', '.join(map(str, sorted(wanted)))}: give those of its training"
        )
    rows = {i: row for row, i in enumerate(ids)}
    return state[EMBEDDINGS].float()[[rows[i] for i in wanted]]


def _their_ids(tokens: TrainedTokens[Any]) -> list[int]:
    """The ids there of trained tokens: new ones are after the last."""
    added = tokens.tokenizer.added
    first = tokens.tokenizer.vocab_size - len(added)
    new = {tokens.tokenizer.token_id(text): first + i for i, text in enumerate(added)}
    return [new.get(i, i) for i in tokens.ids]


def lora_state(
    lora: Lora, network: StageC, width: int, tokens: TrainedTokens[Any] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A LoRA of ours as a file there, where its factor is 1 / rank, and the module_filters that go with it.

    network: its base, which may be on the meta device. width: of token embeddings.

    InputError for what their files cannot hold.
    """
    about, names, path = lora.about, adapted_names(network), lora.path
    own = {name.rpartition(".")[0] for name in lora.pairs}
    exact = tuple(name for name, module in names.items() if module in own)
    if own - set(names.values()):
        odd = min(own - set(names.values()))
        raise InputError(f"{path} adapts {odd}, which the stage C of Stable Cascade does not have")
    options = (about.module_filters, exact)
    filters = next((each for each in options if {*_selected(network, each).values()} == own), None)
    if filters is None:
        raise InputError(f"{path} adapts modules that no module_filters of Stable Cascade select without others")
    found = dict[str, Tensor]()
    for k, name in enumerate(exact):
        module = names[name]
        weight = network.get_parameter(f"{module}.weight")
        down = lora.pairs[f"{module}.{DOWN}"].view(about.rank, weight.shape[1], -1)
        if not torch.equal(down, down[:, :, :1].expand_as(down)):
            raise InputError(
                f"{path} changes the positions of the kernel of {module} differently, which the layout of Stable "
                "Cascade cannot hold"
            )
        found[f"{_PAIRS}{k}.{DOWN}"] = down[:, :, 0].contiguous()
        found[f"{_PAIRS}{k}.{UP}"] = lora.pairs[f"{module}.{UP}"] * about.alpha
    ids = [] if tokens is None else _their_ids(tokens)
    found[EMBEDDINGS] = torch.zeros(0, width) if tokens is None else lora.changes(len(ids))
    found[INDICES] = torch.tensor(ids, dtype=torch.int64)
    return found, filters


# ------------------------------------------------------------------------------------------------------------- Networks


#: By kind: settings of the network, and the values that all networks there have; True = any but 0.
_STAGE = {"text.enc_attn_dim": 0, "coordinates": False, "text_modulation": False, "pooled_width": True}
_REQUIRED: dict[str, dict[str, Any]] = {
    "stage_a": {},
    "semantic": {"backbone": "efficientnet_v2_s"},
    "stage_b": {**_STAGE, "pixel_channels": True},
    "stage_c": {**_STAGE, "text_width": True, "image_width": True},
    "stage_c_controlnet": {},
}
#: Settings that no file there says: of their code, as our defaults.
_FIXED = ("log_snr_schedule", "scaler", "prediction", "noise_condition", "shift", "scale_factor")


def network_states(network: nn.Module, settings: Any, path: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    """The files there of one of our networks, from ``path``: one, or those of a semantic encoder and of its previewer;
    and its settings that are not those of their code, which no file says.

    InputError for a network that theirs have no place for.
    """
    for name, value in _REQUIRED[settings.name].items():
        own = attrgetter(name)(settings.model)
        if (not own) if value is True else own != value:
            raise InputError(
                f"{path} has {name.rpartition('.')[2]} {own}, which networks of Stable Cascade cannot have"
            )
    layouts = [layout for layout in LAYOUTS[settings.name] if layout.mark != TORCHVISION]
    own = [getattr(settings, name) for name in ("model", "diffusion") if hasattr(settings, name)]
    others = [
        f"{name} {getattr(each, name)}"
        for each in own
        for name in _FIXED
        if hasattr(each, name) and getattr(each, name) != getattr(type(each)(), name)
    ]
    if isinstance(settings, StageCControlNetSettings):
        others += [f"{name} {value}" for name, value in settings.control.own_params.items()]
    return [layout.write(network) for layout in layouts], others
