"""From checkpoint files to stages, which their kinds name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from ..checkpoints.decoder import ClipConfig
from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..checkpoints.lora_file import WeightedLora
from ..config import Fault, InputError
from ..distributed.devices import use_device
from ..models.precision import resolve_precision
from .clips import LatentClips
from .latent_stages import Autoencoder, LatentStage, ReconstructionStage
from .lora import Loras, loras_of, of_guides, with_loras
from .stage import Stage


def load_stages(
    path: str, device: str | torch.device = "auto", precision: str = "auto", bpe_path: str = "", keep: bool = True
) -> list[Stage]:
    """The networks of a checkpoint: a generator, a U-Net of a decoder, all U-Nets of one, from the lowest resolution to
    the highest, or a stage B or C of a latent cascade. Arguments and errors as for ``pipeline.load``.

    keep: False = load the weights for each use and free them afterwards.
    """
    kinds = tuple(kind for kind in KINDS if find_kind(kind).stage)
    networks, resolved = open_networks(path, kinds, bpe_path), use_device(device)
    options = resolved, resolve_precision(precision, resolved), bpe_path, keep
    return [_stage_of(saved)(saved, *options) for saved in networks]


def _stage_of(saved: SavedNetwork) -> type[Stage]:
    module, _, name = saved.settings.stage.rpartition(".")
    return getattr(import_module(f".{module}", __package__), name)


def adapt(stages: Sequence[Stage], lora: Sequence[str], accept_changed_base: bool = False) -> None:
    """Give LoRAs to the stages that they were trained for, and those of classifiers to all stages, for theirs.
    Arguments and errors as for ``pipeline.load``."""
    if lora:
        guides, own = (Loras.read(texts, accept_changed_base) for texts in of_guides(lora))
        adapted = with_loras([stage.saved for stage in stages], own.loras, accept_changed_base)
        for stage, saved in zip(stages, adapted, strict=True):
            stage.saved, stage.guide_loras = saved, guides


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
            raise InputError(Fault(name, "no stage of the pipeline works with it: leave it out", path))
    if not latent:
        return False
    clips = [clip for stage in latent for clip in (stage.trained_with.text_clip, stage.trained_with.image_clip) if clip]
    if clip_path and not clips and not any(stage.reads_clip for stage in latent):
        raise InputError(Fault("clip_path", "the cascade was trained without a CLIP: leave it out", clip_path))
    first = latent[0]

    def autoencoder(path: str, kind: str) -> Autoencoder | None:
        return Autoencoder(path, kind, first.device, first.precision, first.keep) if path else None

    known = LatentClips(clips[0] if clips else None, clip_make, clip_path, first.keep, _loras_of_clips(latent, clips))
    decoder, encoder = autoencoder(stage_a, "stage_a"), autoencoder(semantic, "semantic")
    for stage in latent:
        stage.attach(known, decoder, encoder)
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
