"""What a plan is made for, and what it assumes."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import option, settings, shown
from ...errors import Fault, named
from .cluster import GPUS, Gpu, Links


@settings
class PlanConfig:
    """What to plan for"""

    gpu: str = option("h100", "kind of GPU", choices=GPUS)
    gpus: int = option(8, "number of GPUs", least=1)
    gpus_per_node: int = option(8, "GPUs of a machine", least=1)
    gpu_memory: float = option(0.0, "memory of a GPU in GiB; 0 = that of its kind", least=0)
    reserve: float = option(0.1, "share of the memory for CUDA, its libraries and fragmentation", least=0, below=1)
    frozen_memory: float = option(
        0.0, "GiB a GPU for networks that are not trained, such as a CLIP of captions", least=0
    )
    global_batch: int = option(0, "images per step of all GPUs together; 0 = batch_size × gpus", least=0)
    images: float = option(0.0, "number of images in the data; 0 = not known", least=0)
    sample_kb: float = option(60.0, "kilobytes of an image with its caption in the shards", above=0)
    shard_mb: float = option(250.0, "megabytes of a shard", above=0)
    decode_rate: float = option(400.0, "images per second that one worker reads and decodes", above=0)
    utilization: tuple[float, ...] = option(
        (0.25, 0.45), "share of the GPU's peak in bf16 that forward and backward pass reach: LOWEST,HIGHEST", most=1
    )
    launch_time: tuple[float, ...] = option(
        (4.0, 10.0), "microseconds in which the host launches one operation on the GPU: LOWEST,HIGHEST"
    )
    network_speed: float = option(50.0, "GB/s a GPU sends to other machines", above=0)
    power: tuple[float, ...] = option(
        (),
        "watts for each GPU with its share of machine and cooling: LOWEST,HIGHEST; none = 1.2 and 1.9 × the GPU's own",
    )
    price: tuple[float, ...] = option((), "US dollars for a GPU's hour: LOWEST,HIGHEST; none = those of its kind")
    budget: float = option(0.0, "US dollars to spend; 0 = no limit", least=0)
    calibrate: bool = option(
        False,
        "train for ten steps, on this machine's device and the run's data, and plan with their speed in place of "
        "utilization; the machine must be idle",
    )

    def faults(self) -> Iterator[Fault]:
        for name in ("utilization", "launch_time", "power", "price"):
            values = getattr(self, name)
            if (len(values) != 2 or not 0 < values[0] <= values[1]) and (
                values or name in ("utilization", "launch_time")
            ):
                yield Fault(name, f"is {shown(values)}, but must be LOWEST,HIGHEST, two numbers above 0")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            rule = f"must be a multiple of {named('gpus_per_node')} ({self.gpus_per_node}) or at most that"
            yield Fault.of(self, "gpus", rule)
        if self.global_batch % self.gpus:
            yield Fault.of(self, "global_batch", f"must be a multiple of {named('gpus')} ({self.gpus})")

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
