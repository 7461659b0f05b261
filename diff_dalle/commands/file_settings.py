"""Settings of the commands that make a file of others, and of ``replay.py``. They need no torch, whose import takes
longer than all the rest, so that a mistyped flag is told at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..config import Fault, InputError, named, option, section, settings
from ..config.bounds import MAX_BLOCKS
from ..distributed.launch import DistributedConfig
from ..sampling.lora_config import accept_option, lora_option
from ..text.trained_tokens import tokens_option

SAFETENSORS = ".safetensors"
FORMATS = ("diff_dalle", "guided_diffusion", "original", "unet", "stable_cascade", "dalle2_pytorch")
STAGES = ("stage_a", "semantic", "stage_b", "stage_c", "controlnet", "lora")
ADAPTERS = STAGES[4:]


def out_option(default: str) -> Any:
    """The setting ``out`` of a command that makes one file."""
    return option(default, "output file, local or remote; must not exist yet", needed="the file to write")


@settings
class ConsolidateConfig:
    """Consolidating"""

    model_path: str = option(
        "",
        "sharded checkpoint: the folder sharded… in a log directory",
        needed="a sharded checkpoint, the folder sharded… in a log directory",
    )
    out: str = option("", "output folder; none = beside the checkpoint, where its run would write them")


@settings
class AssembleConfig:
    """Assembling"""

    model_paths: tuple[str, ...] = option(
        (),
        "checkpoints of the U-Nets of a decoder, ema_….pt or model….pt, in any order; some may hold several",
        needed="checkpoints of the U-Nets of a decoder, separated by commas",
    )
    out: str = out_option("decoder.pt")


@settings
class MergeConfig:
    """Merging"""

    model_path: str = option(
        "",
        "checkpoint of the network that the LoRAs were trained for, ema_….pt or model….pt",
        needed="a checkpoint, and LoRA files that were trained for it",
    )
    lora: tuple[str, ...] = lora_option()
    accept_changed_base: bool = accept_option()
    remove: bool = option(
        False, "remove the LoRAs, up to rounding, and their tokens from model_path, into which they were merged"
    )
    out: str = out_option("merged.pt")

    def faults(self) -> Iterator[Fault]:
        if not self.lora:
            yield Fault("lora", "is required: a checkpoint, and LoRA files that were trained for it")


@settings
class ConvertConfig:
    """Conversion"""

    model_path: str = option(
        "",
        "checkpoint of Improved Diffusion, Guided-Diffusion, GLIDE, the original Diff-DALLE or a DALLE2-pytorch "
        "decoder; for another `to`, one of ours",
        needed="the checkpoint to convert",
    )
    out: str = out_option("converted.pt")
    to: str = option(
        "diff_dalle",
        "output format: our checkpoint; weights in the layout of Guided-Diffusion and GLIDE; weights in that of the "
        "original Diff-DALLE; a base generator's U-Net, with Guided-Diffusion's names for layers found there, as "
        "safetensors with a table of names; a network, ControlNet or LoRA of a latent cascade for Stable Cascade; a "
        "decoder, or one of its U-Nets, for DALLE2-pytorch",
        choices=FORMATS,
    )
    bpe_path: str = option(
        "",
        "merge file of a text-conditional network's tokenizer: for GLIDE, GPT-2's vocab.bpe; for Diff-DALLE, CLIP's "
        "bpe_simple_vocab_16e6.txt.gz or clip",
    )
    image_size: int | None = option(None, "resolution in pixels; none = as published for a network of these shapes")
    small_size: int | None = option(None, "input resolution of an upsampler in pixels; none = as published")
    num_heads: int | None = option(None, "attention heads; none = as published")
    num_head_channels: int | None = option(
        None, "channels per attention head, overrides num_heads; none = as published"
    )
    num_heads_upsample: int | None = option(
        None, "attention heads of the decoder, if num_heads is the encoder's; -1 = the same; none = as published"
    )
    enc_heads: int | None = option(
        None, "attention heads of the text encoder; none = as published; Diff-DALLE: one per 64 channels"
    )
    text_length: int | None = option(None, "Diff-DALLE: tokens of a caption in training; none = 48")
    use_new_attention_order: bool | None = option(
        None,
        "it orders projection rows by query, key and value before heads; none = as published, else False",
    )
    decoder_config: str = option(
        "",
        "DALLE2-pytorch: training file, whose decoder section has the settings",
        needs=("to", "diff_dalle"),
    )
    unet: int | None = option(
        None, "DALLE2-pytorch: index from 0 of the U-Net, in a file of one of several", needs=("decoder_config",)
    )
    text_path: str = option(
        "", "GLIDE's noised CLIP: its text encoder; model_path is its image encoder", needs=("to", "diff_dalle")
    )
    base: str = option("", "checkpoint of the stage C of a LoRA", needs=("to", "stable_cascade"))
    clip_path: str = option("", "CLIP whose tokens the LoRA trains; none = that of base", needs=("base",))
    drop_no_class: bool = option(
        False,
        'to Guided-Diffusion: drop the "no class" embedding, which has no place there, and with it classifier-free '
        "guidance by class",
    )
    noise_schedule: str | None = option(None, "noise schedule of the training; none = as published")
    diffusion_steps: int | None = option(None, "number of noising steps in training; none = as published")
    rescale_timesteps: bool | None = option(None, "timesteps are scaled to 0–1000; none = as published")

    def faults(self) -> Iterator[Fault]:
        if self.drop_no_class and self.to not in ("guided_diffusion", "unet"):
            yield Fault("drop_no_class", f"is set, but has no effect with {named('to')} {self.to}: leave it out")
        if self.to == "unet" and not self.out.endswith(SAFETENSORS):
            yield Fault.of(self, "out", f"a U-Net is written as safetensors: end it with {SAFETENSORS}")
        if self.to == "stable_cascade" and not self.out.endswith(SAFETENSORS):
            yield Fault.of(self, "out", f"Stable Cascade's files are safetensors: end it with {SAFETENSORS}")
        if self.to == "diff_dalle" and self.out.endswith(SAFETENSORS):
            yield Fault.of(self, "out", "a checkpoint of ours is a .pt file; share.py makes model folders")

    @property
    def given(self) -> dict[str, Any]:
        """What the shapes do not tell, where it is set."""
        found = {
            "image_size": self.image_size,
            "small_size": self.small_size,
            "num_heads": self.num_heads,
            "num_head_channels": self.num_head_channels,
            "num_heads_upsample": self.num_heads_upsample,
            "enc_heads": self.enc_heads,
            "text_length": self.text_length,
            "use_new_attention_order": self.use_new_attention_order,
            "noise_schedule": self.noise_schedule,
            "diffusion_steps": self.diffusion_steps,
            "rescale_timesteps": self.rescale_timesteps,
        }
        return {name: value for name, value in found.items() if value is not None}

    def refuse(self, names: Iterable[str], why: str) -> None:
        """InputError for the first of some settings that is set without being used."""
        for name in names:
            if getattr(self, name) not in (None, ""):
                raise InputError(f"{name} is set, but {why}: leave it out")


@settings
class ImportConfig:
    """Importing"""

    stage: str = option(
        "semantic",
        "network to write: stage_a, semantic, stage_b, stage_c, or a controlnet or lora for our stage C",
        choices=STAGES,
    )
    model_version: str = option("released", "size of the network, as in the files of train_cascade.py")
    weights: tuple[str, ...] = option(
        (),
        "files of the public networks (.safetensors, .pt), or torchvision's weights of EfficientNetV2-S; several for "
        "one semantic encoder; none = initial values",
    )
    base: str = option("", "checkpoint of the stage C that the adapter was trained for", needs=("stage", *ADAPTERS))
    controlnet_blocks: tuple[int, ...] = option(
        (),
        "residual blocks that the ControlNet steers, as in its training file; none = as published",
        needs=("stage", "controlnet"),
        least=0,
        most=MAX_BLOCKS,
    )
    controlnet_filter: str = option(
        "", "control filter, as in that file; none = as published", needs=("stage", "controlnet")
    )
    controlnet_filter_params: str = option(
        "{}", "parameters of controlnet_filter, as there", nested=True, needs=("controlnet_filter",)
    )
    module_filters: tuple[str, ...] = option(
        (".attn",), "modules that the LoRA adapts, as in its training file", needs=("stage", "lora")
    )
    train_tokens: tuple[str, ...] = tokens_option(needs=("stage", "lora"))
    clip_path: str = option(
        "",
        "CLIP of train_tokens, MODEL/TAG or MODEL/TAG:FILE of open_clip; none = that of base",
        needs=("train_tokens",),
    )
    joint_run: str = option(
        "", "instead: opt….pt of a stage B trained with train_encoder, to take its semantic encoder from"
    )
    out: str = out_option("")

    def faults(self) -> Iterator[Fault]:
        unset = ImportConfig.stage, ImportConfig.model_version, ImportConfig.weights
        if self.joint_run and (self.stage, self.model_version, self.weights) != unset:
            others = f"{named('stage')}, {named('model_version')} and {named('weights')}"
            yield Fault("joint_run", f"holds a semantic encoder and its weights: leave out {others}")
        if self.stage in ADAPTERS:
            if not self.base:
                yield Fault("base", "is required: the checkpoint of the stage C that the adapter was trained for")
            if len(self.weights) != 1:
                yield Fault("weights", f"names {len(self.weights)} files, but must name the one of the adapter")
        if self.stage == "lora" and not self.out.endswith(SAFETENSORS):
            yield Fault.of(self, "out", f"a LoRA is written as safetensors: end it with {SAFETENSORS}")


@settings
class ReplayConfig:
    """Step"""

    logdir: str = option("", "log directory of the run", needed="the log directory of the run")
    step: int = option(0, "number of the step in flight.jsonl; 0 = the last one")
    data_dir: tuple[str, ...] = option((), "the run's shards, if they have moved; none = where they were")


@settings
class ReplayRun:
    """All settings of ``replay.py``."""

    what: ReplayConfig = section(ReplayConfig)
    distributed: DistributedConfig = section(DistributedConfig)
