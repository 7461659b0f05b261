"""Config classes with everything that a config can have, and config files of a few lines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from diff_dalle.commands.command_line import parse
from diff_dalle.config import Fault, InputError, named, option, section, settings


@settings
class Model:
    """Network"""

    num_channels: int = option(128, "channels", was=("width",))
    channel_mult: tuple[float, ...] = option((1.0, 2.0), "factors")
    variance: str = option("fixed_large", "kind", choices=("fixed_large", "fixed_small", "learned_range"))


@settings
class Training:
    """Training"""

    lr: float = option(3e-4, "rate")
    data_dir: tuple[str, ...] = option((), "shards", free=True)
    limit: int | None = option(None, "limit")
    flip: bool = option(False, "flip")


@settings
class Run:
    model: Model = section(Model)
    training: Training = section(Training)


@settings
class UNet:
    """U-Net"""

    dim: int = option(128, "channels of the first level", was=("start_dim",), least=1)
    mults: tuple[int, ...] = option((1, 2), "factors")
    cond_drop: float = option(0.5, "probability", free=True)


@settings
class Decoder:
    """Decoder"""

    unets: tuple[UNet, ...] = option((UNet(), UNet(dim=64)), "U-Nets, by stage")
    timesteps: int = option(1000, "noising steps")


@settings
class Sampling:
    """Sampling"""

    sampler: str = option("ddim", "algorithm", choices=("ddim", "heun"), was=("method",))
    eta: float = option(0.0, "randomness", least=0)


@settings
class Cascade:
    """A list of sections, and one section under two prefixes."""

    decoder: Decoder = section(Decoder)
    sampling: Sampling = section(Sampling, was=("drawing",))
    upsampling: Sampling = section(Sampling, prefix="upsampler_")


def from_text(config_class, text: str, *flags: str):
    """The config of a command with ``--config`` and further flags. Messages call the file run.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return parse(config_class, ["--config", str(path), *flags])
        except InputError as error:
            raise InputError(str(error).replace(str(path), "run.yaml")) from None


@settings
class Crop:
    """Crop"""

    name: str = option("center", "kind of crop", choices=("center", "random", "whole"), required=True)
    size: tuple[int, ...] = option((8,), "height and width")


@settings
class Clip:
    """CLIP"""

    refused: ClassVar = {"weights": "follow from make: leave them out"}

    make: str = option("ours", "package")
    side: int = option(32, "pixels")


@settings
class Stages:
    """Stages"""

    unets: tuple[UNet, ...] = option((), "U-Nets", required=True)
    clip: Clip | None = option(None, "network for embeddings")
    crops: tuple[int | None, ...] = option((None,), "crop of each U-Net")
    loss: tuple[str, ...] = option(("l2",), "loss of each U-Net", choices=("l1", "l2"))

    def faults(self):
        for i, unet in enumerate(self.unets):
            if unet.dim % 2:
                yield Fault.of(self, f"unets[{i}].dim", "must be even")


@settings
class Fitting:
    """Training"""

    lr: float = option(1e-4, "rate")
    mask: tuple[bool, ...] = option((True,), "what is trained")
    crops: tuple[Crop, ...] = option((), "crops", keyed="name")
    savers: tuple[Clip, ...] = option((), "places", lone=True)


@settings
class WholeFile:
    """A command that is set by a file: its sections have no flags."""

    stages: Stages = section(Stages, flags=False)
    fitting: Fitting = section(Fitting, flags=False)
    seed: int = option(0, "seed")

    def faults(self):
        if len(self.fitting.mask) not in (1, unets := len(self.stages.unets)):
            count = len(self.fitting.mask)
            rule = f"has {count} values, but must have 1 or {unets}, as {named('stages.unets')} has"
            yield Fault("fitting.mask", rule)
