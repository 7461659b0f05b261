"""Settings of ``serve.py``."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Fault, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_SECONDS, MAX_SIDE, MAX_STEPS
from ..distributed.launch import DistributedConfig
from ..models.options import PRECISIONS

_OF_A_MODEL = "; with several models as MODEL=PATH"
_EVERYWHERE = ("0.0.0.0", "::", "")
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@settings
class ModelsConfig:
    """Models"""

    models: tuple[str, ...] = option(
        (),
        "models to serve: names of bundled models, model folders and checkpoints, each shown by its own name "
        "or as NAME=PATH says; none = all bundled models",
    )
    upsampler_paths: tuple[str, ...] = option(
        (), f"upsampler checkpoints, in order of increasing resolution{_OF_A_MODEL}"
    )
    classifier_path: tuple[str, ...] = option((), f"noised CLIP that can guide the sampling{_OF_A_MODEL}")
    lora: tuple[str, ...] = option(
        (),
        "LoRAs that a request can choose, each by its file name or as NAME=PATH says; with several models as "
        "MODEL=PATH or MODEL=NAME=PATH",
    )
    controlnet: tuple[str, ...] = option((), f"ControlNet with which a request can steer sampling{_OF_A_MODEL}")
    precision: str = option("auto", "floating-point precision of the networks", choices=PRECISIONS)


@settings
class AddressConfig:
    """Address"""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = all interfaces, for anyone who can reach one")
    port: int = option(7860, "port to listen on", least=1, most=65535)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "further host names that browsers may use, such as a proxy's; none = host alone, or any name with host 0.0.0.0",
    )

    def names(self) -> frozenset[str] | None:
        """The host names that requests may be addressed to; None = any."""
        if self.host in _EVERYWHERE and not self.allowed_hosts:
            return None
        own = _THIS_MACHINE if self.host in (*_THIS_MACHINE, *_EVERYWHERE) else (self.host,)
        return frozenset(name.lower() for name in (*own, *self.allowed_hosts))


@settings
class Limits:
    """Limits of requests"""

    max_size: int = option(1024, "largest width and height of an image in pixels", least=1, most=MAX_SIDE)
    max_scale: int = option(4, "largest width and height of an image in multiples of the model's own", least=1)
    max_steps: int = option(250, "largest number of sampling steps", least=1, most=MAX_STEPS)
    max_images: int = option(
        8,
        "largest number of images in one request; fewer if larger than the model's own",
        least=1,
        most=MAX_BATCH,
    )
    max_prompt: int = option(1000, "largest number of characters in a prompt", least=1)
    max_queue: int = option(8, "waiting requests; further ones are answered: busy, try again", least=1, most=MAX_BATCH)
    max_body: int = option(16, "largest body of a request in MiB, pictures included", least=1)
    max_pixels: int = option(16, "largest uploaded picture, in millions of pixels", least=1)
    max_disk: int = option(
        512, "most MiB on disk of pictures uploaded by and shown to visitors; the oldest are deleted", least=1
    )
    max_seconds: int = option(
        300, "longest sampling time of a request in seconds, without waiting", least=1, most=MAX_SECONDS
    )

    def faults(self) -> Iterator[Fault]:
        if self.max_disk < self.max_body:
            yield Fault.of(self, "max_disk", f"must be at least {named('max_body')}, {self.max_body}")

    @property
    def body_bytes(self) -> int:
        return self.max_body << 20

    @property
    def picture_pixels(self) -> int:
        return self.max_pixels * 1_000_000

    @property
    def disk_bytes(self) -> int:
        return self.max_disk << 20

    def largest_side(self, size: int) -> int:
        """Of the images of a model whose own have ``size`` pixels a side."""
        return min(self.max_size, self.max_scale * size)

    def request_pixels(self, size: int) -> int:
        """Most pixels of the images of one request: ``max_images`` of the model's own, or one of the largest."""
        return max(self.max_images, self.max_scale**2) * size**2


@settings
class ServeRun:
    """All settings of ``serve.py``."""

    models: ModelsConfig = section(ModelsConfig)
    address: AddressConfig = section(AddressConfig)
    limits: Limits = section(Limits)
    distributed: DistributedConfig = section(DistributedConfig)
