"""From checkpoint files to stages: a table by kind of network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checkpoints.decoder import ClipConfig, DecoderConfig
from ..checkpoints.kinds import DecoderSettings, find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..checkpoints.lora_file import WeightedLora
from ..distributed.devices import use_device
from ..errors import InputError
from ..models.precision import resolve_precision
from .autoencoders import Autoencoder
from .generator_stage import GeneratorStage
from .latent_clips import LatentClips
from .latent_stages import Companions, LatentStage, ReconstructionStage, SemanticStage
from .lora import Loras, loras_of, of_guides, parse_lora_paths, with_loras
from .stage import Stage
from .unet_stage import UnetStage

#: The stage that a network of each kind is.
STAGES: dict[str, type[Stage]] = {
    "generator": GeneratorStage,
    "decoder": UnetStage,
    "stage_c": SemanticStage,
    "stage_b": ReconstructionStage,
}


def load_stages(
    path: str, device: str | torch.device = "auto", precision: str = "auto", bpe_path: str = "", keep: bool = True
) -> list[Stage]:
    """The networks of a checkpoint: a generator, a U-Net of a decoder, all U-Nets of one, from the lowest resolution to
    the highest, or a stage B or C of a latent cascade. Arguments and errors as for ``pipeline.load``.

    keep: False = load the weights for each use and free them afterwards.
    """
    networks, resolved = open_networks(path, tuple(STAGES), bpe_path), use_device(device)
    precision = resolve_precision(precision, resolved)
    return [STAGES[saved.kind.name](saved, resolved, precision, bpe_path, keep) for saved in networks]


def adapt(stages: Sequence[Stage], lora: Sequence[str], accept_changed_base: bool = False) -> None:
    """Give LoRAs to the stages that they were trained for, and those of classifiers to all stages, for theirs.
    Arguments and errors as for ``pipeline.load``."""
    if lora:
        guides, own = (tuple(parse_lora_paths(texts)) for texts in of_guides(lora))
        adapted = with_loras([stage.saved for stage in stages], own, accept_changed_base)
        for stage, saved in zip(stages, adapted, strict=True):
            stage.saved, stage.guide_loras = saved, Loras(guides, accept_changed_base)


def attach_companions(
    stages: Sequence[Stage], stage_a: str = "", semantic: str = "", clip_make: str = "", clip_path: str = ""
) -> bool:
    """Give the stages of a latent cascade what they work with. Returns whether there are any.

    Arguments and errors as for ``pipeline.load``.
    """
    latent = [stage for stage in stages if isinstance(stage, LatentStage)]
    for name, path, used in (
        ("stage_a", stage_a, any(isinstance(stage, ReconstructionStage) for stage in latent)),
        ("semantic", semantic, bool(latent)),
    ):
        if path and not used:
            raise InputError(f"{name} is {path}, but no stage of the pipeline works with it: leave it out")
    if not latent:
        return False
    clips = [clip for stage in latent for clip in (stage.trained_with.text_clip, stage.trained_with.image_clip) if clip]
    if clip_path and not clips and not any(stage.reads_clip for stage in latent):
        raise InputError(f"clip_path is {clip_path}, but the cascade was trained without a CLIP: leave it out")
    if clip_make and not clip_path:
        raise InputError(f"clip_make is {clip_make}, but clip_path is missing: give both, or neither")
    first = latent[0]

    def autoencoder(path: str, kind: str) -> Autoencoder | None:
        return Autoencoder(path, kind, first.device, first.precision, first.keep) if path else None

    companions = Companions(
        LatentClips(clips[0] if clips else None, clip_make, clip_path, first.keep, _loras_of_clips(latent, clips)),
        autoencoder(stage_a, "stage_a"),
        autoencoder(semantic, "semantic"),
    )
    for stage in latent:
        stage.attach(companions)
    return True


def _loras_of_clips(stages: Sequence[LatentStage], clips: Sequence[ClipConfig]) -> list[WeightedLora]:
    """The LoRAs of stages whose tokens belong to one of the CLIPs. InputError for one of another."""
    found = [each for stage in stages for each in loras_of(stage.saved) if each.lora.about.clip]
    for each in found:
        if each.lora.about.clip not in [clip.identity for clip in clips]:
            raise InputError(
                f"{each.lora.path} trains tokens of the CLIP {each.lora.about.clip}, which none of the stages was "
                "trained with: give it with its own base"
            )
    return found


@dataclass(frozen=True)
class _InMemory(SavedNetwork):
    """A network that is in memory, in place of a file."""

    network: nn.Module = field(default_factory=nn.Module)

    def load(self, device: torch.device) -> nn.Module:
        return self.network


def decoder_stages(decoder: DecoderConfig, networks: Mapping[str, nn.Module], device: torch.device) -> list[Stage]:
    """Stages of U-Nets that are in memory, such as in training, by name; not all of the decoder's need be there. They
    stay as they are: in the precision of the autocast around, with the weights that they have at the time."""
    kind, settings = find_kind("decoder"), DecoderSettings(decoder)
    return [
        UnetStage(_InMemory(name, kind, settings, None, 0, name, network=networks[name]), device)
        for name in decoder.names
        if name in networks
    ]
