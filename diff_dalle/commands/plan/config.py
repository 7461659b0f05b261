"""What a plan is made for, and what it assumes."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import option, shown
from ...errors import InputError
from .cluster import GPUS, Gpu, Links


def _check_range(name: str, values: tuple[float, ...]) -> None:
    if not (len(values) == 2 and 0 < values[0] <= values[1]):
        raise InputError(f"{name} is {shown(values)}, but must be LOWEST,HIGHEST, two numbers above 0")


@dataclass(frozen=True)
class PlanConfig:
    """What to plan for"""

    gpu: str = option("h100", "kind of GPU", choices=tuple(GPUS))
    gpus: int = option(8, "number of GPUs")
    gpus_per_node: int = option(8, "GPUs of a machine")
    gpu_memory: float = option(0.0, "memory of a GPU in GiB; 0 = that of its kind")
    reserve: float = option(0.1, "share of the memory for CUDA, its libraries and fragmentation")
    frozen_memory: float = option(0.0, "GiB a GPU for networks that are not trained, such as a CLIP of captions")
    global_batch: int = option(0, "images per step of all GPUs together; 0 = batch_size × gpus")
    images: float = option(0.0, "number of images in the data; 0 = not known")
    sample_kb: float = option(60.0, "kilobytes of an image with its caption in the shards")
    shard_mb: float = option(250.0, "megabytes of a shard")
    decode_rate: float = option(400.0, "images per second that one worker reads and decodes")
    utilization: tuple[float, ...] = option(
        (0.25, 0.45), "share of the GPU's peak in bf16 that forward and backward pass reach: LOWEST,HIGHEST"
    )
    launch_time: tuple[float, ...] = option(
        (4.0, 10.0), "microseconds in which the host launches one operation on the GPU: LOWEST,HIGHEST"
    )
    network_speed: float = option(50.0, "GB/s a GPU sends to other machines")
    power: tuple[float, ...] = option(
        (),
        "watts for each GPU with its share of machine and cooling: LOWEST,HIGHEST; none = 1.2 and 1.9 × the GPU's own",
    )
    price: tuple[float, ...] = option((), "US dollars for a GPU's hour: LOWEST,HIGHEST; none = those of its kind")
    budget: float = option(0.0, "US dollars to spend; 0 = no limit")
    calibrate: bool = option(
        False,
        "train for ten steps, on this machine's device and the run's data, and plan with their speed in place of "
        "utilization; the machine must be idle",
    )

    def __post_init__(self):
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("gpu_memory", "frozen_memory", "global_batch", "images", "budget"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name):g}, but must not be negative")
        for name in ("sample_kb", "shard_mb", "decode_rate", "network_speed"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name):g}, but must be above 0")
        if not 0 <= self.reserve < 1:
            raise InputError(f"reserve is {self.reserve:g}, but must be at least 0 and below 1")
        for name in ("utilization", "launch_time"):
            _check_range(name, getattr(self, name))
        for name in ("power", "price"):
            if getattr(self, name):
                _check_range(name, getattr(self, name))
        if self.utilization[1] > 1:
            raise InputError(f"utilization is {shown(self.utilization)}, but must be at most 1")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise InputError(
                f"gpus is {self.gpus}, but must be a multiple of gpus_per_node ({self.gpus_per_node}) or at most that"
            )
        if self.global_batch % self.gpus:
            raise InputError(f"global_batch is {self.global_batch}, but must be a multiple of gpus ({self.gpus})")

    @property
    def kind(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def links(self) -> Links:
        return Links(self.gpus_per_node, self.kind.within, self.network_speed * 1e9)

    @property
    def usable(self) -> float:
        """Bytes of a GPU's memory for tensors."""
        return (self.gpu_memory or self.kind.memory) * 2**30 * (1 - self.reserve)

    @property
    def watts(self) -> tuple[float, ...]:
        return self.power or (1.2 * self.kind.watts, 1.9 * self.kind.watts)

    @property
    def dollars(self) -> tuple[float, ...]:
        """For a GPU's hour."""
        return self.price or self.kind.price
