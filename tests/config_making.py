"""Config classes with everything that a config can have, and config files of a few lines."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from diff_dalle.commands.command_line import parse
from diff_dalle.config import Problems, option, section
from diff_dalle.errors import InputError


@dataclass(frozen=True)
class Model:
    """Network"""

    num_channels: int = option(128, "channels", was=("width",))
    channel_mult: tuple[float, ...] = option((1.0, 2.0), "factors")
    variance: str = option("fixed_large", "kind", choices=("fixed_large", "fixed_small", "learned_range"))


@dataclass(frozen=True)
class Training:
    """Training"""

    lr: float = option(3e-4, "rate")
    data_dir: tuple[str, ...] = option((), "shards", free=True)
    limit: int | None = option(None, "limit")
    flip: bool = option(False, "flip")


@dataclass(frozen=True)
class Run:
    model: Model = section(Model)
    training: Training = section(Training)


@dataclass(frozen=True)
class UNet:
    """U-Net"""

    dim: int = option(128, "channels of the first level", was=("start_dim",))
    mults: tuple[int, ...] = option((1, 2), "factors")
    cond_drop: float = option(0.5, "probability", free=True)

    def __post_init__(self):
        if self.dim < 1:
            raise InputError(f"dim is {self.dim}, but must be at least 1")


@dataclass(frozen=True)
class Decoder:
    """Decoder"""

    unets: tuple[UNet, ...] = option((UNet(), UNet(dim=64)), "U-Nets, by stage")
    timesteps: int = option(1000, "noising steps")


@dataclass(frozen=True)
class Sampling:
    """Sampling"""

    sampler: str = option("ddim", "algorithm", choices=("ddim", "heun"), was=("method",))
    eta: float = option(0.0, "randomness")

    def __post_init__(self):
        if self.eta < 0:
            raise InputError(f"eta is {self.eta:g}, but must not be negative")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Crop:
    """Crop"""

    name: str = option("center", "kind of crop", choices=("center", "random", "whole"), required=True)
    size: tuple[int, ...] = option((8,), "height and width")


@dataclass(frozen=True)
class Clip:
    """CLIP"""

    refused: ClassVar = {"weights": "follow from make: leave them out"}

    make: str = option("ours", "package")
    side: int = option(32, "pixels")


@dataclass(frozen=True)
class Stages:
    """Stages"""

    unets: tuple[UNet, ...] = option((), "U-Nets", required=True)
    clip: Clip | None = option(None, "network for embeddings")
    crops: tuple[int | None, ...] = option((None,), "crop of each U-Net")
    loss: tuple[str, ...] = option(("l2",), "loss of each U-Net", choices=("l1", "l2"))

    def __post_init__(self):
        Problems.check(
            f"unets[{i}].dim is {unet.dim}, but must be even" for i, unet in enumerate(self.unets) if unet.dim % 2
        )


@dataclass(frozen=True)
class Fitting:
    """Training"""

    lr: float = option(1e-4, "rate")
    mask: tuple[bool, ...] = option((True,), "what is trained")
    crops: tuple[Crop, ...] = option((), "crops", keyed="name")
    savers: tuple[Clip, ...] = option((), "places", lone=True)


@dataclass(frozen=True)
class WholeFile:
    """A command that is set by a file: its sections have no flags."""

    stages: Stages = section(Stages, flags=False)
    fitting: Fitting = section(Fitting, flags=False)
    seed: int = option(0, "seed")

    def __post_init__(self):
        if len(self.fitting.mask) not in (1, len(self.stages.unets)):
            n, unets = len(self.fitting.mask), len(self.stages.unets)
            raise InputError(f"fitting.mask has {n} values, but must have 1 or {unets}")
