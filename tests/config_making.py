"""Config classes with everything that a config can have, and config files of a few lines."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from diff_dalle.commands.command_line import parse
from diff_dalle.config import option, section
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
