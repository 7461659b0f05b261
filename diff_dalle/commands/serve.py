"""Settings of ``serve.py``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import option, section
from ..distributed.launch import DistributedConfig
from ..errors import InputError
from ..models.precision_names import PRECISIONS

_OF_A_MODEL = "; with several models as MODEL=PATH"


@dataclass(frozen=True)
class ModelsConfig:
    """Models"""

    models: tuple[str, ...] = option(
        (),
        "models to serve: names of models that come along, model folders and checkpoints, each shown by its own name "
        "or as NAME=PATH says; none = all that come along",
    )
    upsampler_paths: tuple[str, ...] = option(
        (), f"upsampler checkpoints, in order of increasing resolution{_OF_A_MODEL}"
    )
    classifier_path: tuple[str, ...] = option((), f"noised CLIP that can guide the sampling{_OF_A_MODEL}")
    lora: tuple[str, ...] = option((), f"LoRAs that a request can choose, by their file names{_OF_A_MODEL}")
    controlnet: tuple[str, ...] = option((), f"ControlNet by which a request can steer the sampling{_OF_A_MODEL}")
    precision: str = option("auto", "floating-point precision of the networks", choices=PRECISIONS)


@dataclass(frozen=True)
class AddressConfig:
    """Address"""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = all of this machine, for anyone who can reach it")
    port: int = option(7860, "port to listen on")

    def __post_init__(self):
        if not 0 < self.port < 1 << 16:
            raise InputError(f"port is {self.port}, but must lie between 1 and 65535")


@dataclass(frozen=True)
class Limits:
    """Limits of requests"""

    max_size: int = option(1024, "largest width and height of an image in pixels")
    max_steps: int = option(250, "largest number of sampling steps")
    max_images: int = option(8, "largest number of images in one request")
    max_prompt: int = option(1000, "largest number of characters in a prompt")
    max_queue: int = option(8, "requests that may wait; one more is answered: busy, try again")
    max_body: int = option(16, "largest body of a request in MiB, pictures included")
    max_pixels: int = option(16, "most pixels of an uploaded picture, in millions")
    max_seconds: int = option(300, "longest time to sample one request in seconds, without that spent waiting")

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InputError(f"{field.name} is {getattr(self, field.name)}, but must be at least 1")

    @property
    def body_bytes(self) -> int:
        return self.max_body << 20

    @property
    def picture_pixels(self) -> int:
        return self.max_pixels * 1_000_000


@dataclass(frozen=True)
class ServeRun:
    """All settings of ``serve.py``."""

    models: ModelsConfig = section(ModelsConfig)
    address: AddressConfig = section(AddressConfig)
    limits: Limits = section(Limits)
    distributed: DistributedConfig = section(DistributedConfig)
