"""Several checkpoints of U-Nets → one checkpoint of the whole decoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ..config import InputError, named, shown, to_dict
from .checkpoint import ROLES, Identity, save_file
from .decoder import PER_UPSAMPLER, DecoderConfig, check_same_embeddings
from .decoder_stage import DecoderStage
from .loading import open_networks

#: Settings that all U-Nets share and training alone depends on: those of one U-Net are kept.
TRAINING_ONLY = (
    "image_cond_drop_prob", "text_cond_drop_prob", "blur_prob", "blur_sigma", "blur_kernel_size", "vb_loss_weight",
    "lowres_downsample_first", "p2_loss_weight_k",
)  # fmt: skip


def _blurs(stage: DecoderStage) -> bool:
    return stage.degradation.blur_prob > 0


def _learns_variance(stage: DecoderStage) -> bool:
    return stage.diffusion.variance_is_learned


#: Settings that all U-Nets share, but only some use; the others are used by all.
USED_BY: dict[str, Callable[[DecoderStage], bool]] = {
    "blur_prob": _blurs,
    "blur_sigma": _blurs,
    "blur_kernel_size": _blurs,
    "lowres_downsample_first": lambda stage: stage.is_upsampler,
    "lowres_noise_sample_level": lambda stage: stage.has_noise,
    "image_cond_drop_prob": lambda stage: stage.image_embedding,
    "text_cond_drop_prob": lambda stage: stage.has_text,
    "unconditional": lambda stage: stage.image_embedding or not stage.is_upsampler,
    "vb_loss_weight": _learns_variance,
    "learned_variance_constrain_frac": _learns_variance,
    "p2_loss_weight_k": lambda stage: stage.diffusion.loss_weighting == "p2",
    "ddim_sampling_eta": lambda stage: stage.sampler.algorithm == "ddim",
    "dynamic_thres_percentile": lambda stage: stage.guidance.thresholding == "dynamic",
}


def shared_names(decoder: DecoderConfig) -> list[str]:
    """The settings that all U-Nets of a decoder share."""
    own = {"unets", "image_sizes", "image_size", "clip", *decoder.lists()}
    return [each.name for each in fields(decoder) if each.name not in own]


@dataclass(frozen=True)
class Part:
    """A U-Net in a file: the decoder and the stage that it is there, and what the file says about it."""

    path: str
    decoder: DecoderConfig
    stage: DecoderStage
    content: Mapping[str, Any]

    @property
    def index(self) -> int:
        """Its number in that decoder."""
        return self.decoder.names.index(self.stage.name)

    def uses(self, name: str) -> bool:
        """Whether it depends on a setting that all share."""
        return USED_BY.get(name, lambda stage: True)(self.stage)


def assemble(paths: Sequence[str], out: str) -> str:
    """Write the U-Nets of these files into one. Returns a text about what was taken.

    Raises InputError for files of anything else, and for U-Nets that do not make a decoder: sizes that do not follow on
    each other, different embeddings, or different values of a setting that all U-Nets of a decoder share.
    """
    parts = _read(paths)
    shared, lines = _shared(parts)
    decoder = _joined(parts, shared)
    state: dict[str, Tensor] = {}
    for name, part in zip(decoder.names, parts, strict=True):
        state |= {f"{name}.{key}": value for key, value in part.content["state"].items()}
    role = "ema" if all(part.content["role"] == "ema" for part in parts) else "model"
    step, samples = (max(part.content[name] for part in parts) for name in ("step", "samples"))
    save_file(out, role, Identity("decoder", {"decoder": to_dict(decoder)}), step, samples, state)
    taken = [_described(name, part) for name, part in zip(decoder.names, parts, strict=True)]
    return "\n".join([*taken, *lines, f"Wrote {out}."])


def _described(name: str, part: Part) -> str:
    side, content = part.stage.image_size, part.content
    count = sum(value.numel() for value in content["state"].values())
    return (
        f"{name}: {count:,} weights, {side}×{side} pixels: {ROLES[content['role']]} after {content['step']:,} steps, "
        f"{part.stage.name} of {part.path}"
    )


def _read(paths: Sequence[str]) -> list[Part]:
    """The U-Nets in these files, from the lowest resolution to the highest."""
    parts = []
    for path in paths:
        networks = open_networks(path, ("decoder",))
        content = networks[0].read()
        for saved in networks:
            decoder = saved.settings.decoder
            parts.append(Part(path, decoder, decoder.named(saved.trainee), saved.own(content)))
    if not parts:
        raise InputError(f"there is no checkpoint to assemble: give those of the U-Nets with {named('model_paths')}")
    parts.sort(key=lambda part: part.stage.image_size)
    _check_sizes(parts)
    for one, other in itertools.combinations(parts, 2):
        check_same_embeddings((one.path, one.decoder, one.stage), (other.path, other.decoder, other.stage))
    return parts


def _check_sizes(parts: Sequence[Part]) -> None:
    first = parts[0]
    if first.stage.is_upsampler:
        raise InputError(
            f"{first.path} upsamples {first.stage.small_size}-pixel images, but no U-Net makes them: give the one "
            "before it too"
        )
    for before, after in itertools.pairwise(parts):
        if after.stage.small_size != before.stage.image_size:
            small = after.stage.small_size
            does = f"upsamples {small}-pixel images" if small else "is the first of a decoder too"
            raise InputError(
                f"{before.path} makes {before.stage.image_size}-pixel images, but {after.path} {does}: give U-Nets "
                "that follow on each other"
            )


def _shared(parts: Sequence[Part]) -> tuple[dict[str, Any], list[str]]:
    """The settings that all U-Nets share, each from the first U-Net that uses it, and notes on what is not kept."""
    settings, notes = {}, []
    for name in shared_names(parts[0].decoder):
        users = [part for part in parts if part.uses(name)] or list(parts[:1])
        settings[name] = getattr(users[0].decoder, name)
        for part in users[1:]:
            value = getattr(part.decoder, name)
            if value == settings[name]:
                continue
            if name not in TRAINING_ONLY:
                raise InputError(
                    f"{users[0].path} has {name} {shown(settings[name])}, but {part.path} {shown(value)}, and the "
                    "U-Nets of a decoder share it: load the checkpoints together, without assembling them"
                )
            notes.append(f"Not kept of {part.path}, which affects training only: {name} {shown(value)}")
    return settings, notes


def _joined(parts: Sequence[Part], shared: dict[str, Any]) -> DecoderConfig:
    """The settings of a decoder of these U-Nets."""
    own = [part.decoder.own(part.index) for part in parts]
    lists: dict[str, Any] = {name: tuple(each[name] for each in own) for name in own[0]}
    for name in PER_UPSAMPLER:
        if len(parts) == 1:
            del lists[name]
        elif name != "random_crop_sizes":
            lists[name] = tuple(bool(value) for value in lists[name])
    clips = [
        part.decoder.clip for part in parts if part.decoder.clip and (part.stage.image_embedding or part.stage.has_text)
    ]
    decoder = DecoderConfig(
        unets=tuple(part.decoder.unets[part.index] for part in parts),
        image_sizes=tuple(part.stage.image_size for part in parts),
        clip=clips[0] if clips else None,
        **lists,
        **shared,
    )
    for part, stage in zip(parts, decoder.stages(), strict=True):
        if stage.droppable != part.stage.droppable:
            raise InputError(
                f"{part.path} was trained {'with' if part.stage.droppable else 'without'} dropping its conditions, "
                "unlike the other U-Nets: load the checkpoints together, without assembling them"
            )
    return decoder
