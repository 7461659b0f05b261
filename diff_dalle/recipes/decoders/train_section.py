"""The ``train`` section of a decoder's file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

from ...config import Fault, named, option, settings
from ...config.bounds import MAX_BATCH, MAX_SECONDS
from ...diffusion.sampling import preview_share_option
from ...models.precision_names import PRECISIONS
from ...training.optim_config import OptimConfig

T = TypeVar("T")
MAX_RATE = 1e-2  # far above what trains; Adam's usual rates are 1e-5 to 1e-3
ADAM_BETA2 = 0.99
PER_UNET = ("lr", "wd", "warmup_steps", "cosine_decay_max_steps", "max_grad_norm", "ema_beta")
EACH = "; one for all U-Nets or one for each"


@settings
class TrainSection:
    """Training"""

    refused: ClassVar[dict[str, str]] = {
        "find_unused_parameters": "is decided here, for each U-Net by itself",
        "static_graph": "is decided here, for each U-Net by itself",
        "ema_update_after_step": "is not supported: averages warm up by themselves; leave it out",
        "save_immediately": "is not supported: lower save_every_n_samples for a first trial",
        "iterations": "is not set here: set epochs, and epoch_samples if an epoch is not one pass over the data",
    }
    idle: ClassVar[dict[str, tuple]] = {
        "find_unused_parameters": (True, False),
        "static_graph": (True, False),
        "save_immediately": (False,),
    }

    epochs: int = option(20, "epochs", free=True, least=1)
    lr: tuple[float, ...] = option((1e-4,), f"learning rate{EACH}", above=0, most=MAX_RATE, free=True)
    wd: tuple[float, ...] = option((0.01,), f"decoupled weight decay{EACH}", least=0, free=True)
    warmup_steps: tuple[int | None, ...] = option(
        (None,), f"steps of linear warm-up, none = no warm-up{EACH}", least=0, free=True
    )
    cosine_decay_max_steps: tuple[int | None, ...] = option(
        (None,),
        f"steps of cosine decay of the learning rate to 0, none = constant{EACH}",
        least=1,
        free=True,
    )
    max_grad_norm: tuple[float | None, ...] = option(
        (0.5,), f"maximum gradient norm, none = no clipping{EACH}", least=0, free=True
    )
    save_every_n_samples: int = option(
        100_000, "samples between checkpoints, each with a grid of samples", free=True, least=1
    )
    n_sample_images: int = option(6, "images in a grid of samples; 0 = no grids", free=True, least=0, most=MAX_BATCH)
    preview_share: float | None = preview_share_option()
    cond_scale: tuple[tuple[float, ...], ...] = option(
        ((1.0,),),
        f"guidance scale in grids and metrics, 1 = none{EACH}; a list in place of one, or of several for a single "
        "U-Net, = scales to show and measure side by side",
        free=True,
    )
    device: str = option("auto", "cuda, cuda:N, mps or cpu; auto = CUDA, else MPS, else CPU; --device wins", free=True)
    epoch_samples: int | None = option(None, "samples of an epoch; none = all of the training data", free=True, least=1)
    validation_samples: int | None = option(
        None, "samples of a validation; none = all of the split", free=True, least=1
    )
    use_ema: bool = option(True, "average the weights for samples, metrics, validation and saved models")
    ema_beta: tuple[float, ...] = option((0.99,), f"EMA decay per ema_update_every steps{EACH}", least=0, below=1)
    ema_update_every: int = option(10, "steps that ema_beta spans; the average is updated every step", least=1)
    unet_training_mask: tuple[bool, ...] | None = option(
        None, "whether to train each U-Net; others stay as tracker.load or init_checkpoint gives them"
    )
    init_checkpoint: tuple[str, ...] = option(
        (), "model or EMA files to initialize U-Nets from, or to use untrained", free=True
    )
    amp: bool | None = option(None, "half precision: true = bf16, or fp16 on older GPUs, false = fp32", free=True)
    precision: str = option("auto", "precision; auto = as amp says, else bf16 where supported", choices=PRECISIONS)
    max_batch_size: int | None = option(
        None,
        "samples per forward pass; memory depends on it, results do not; none = batch_size",
        free=True,
        least=1,
        most=MAX_BATCH,
    )
    compile: bool | None = option(
        None, "compile the U-Nets' blocks with torch.compile; auto = on CUDA with Triton", free=True
    )
    hours: float = option(
        0.0, "save and stop after this many hours; 0 = no limit", free=True, least=0, most=MAX_SECONDS
    )
    log_interval: int = option(10, "steps between log lines", free=True, least=1)
    keep_checkpoints: int = option(
        3, "number of latest checkpoints to keep in tracker.data_path; 0 = all", free=True, least=0
    )
    accept_changed_data: bool = option(False, "resume although the shards are not those of the checkpoint", free=True)
    accept_changed_batch: bool = option(
        False, "resume although batch_size × processes is not that of the checkpoint", free=True
    )

    def faults(self) -> Iterator[Fault]:
        for scales in self.cond_scale:
            if bad := [scale for scale in scales if scale < 0]:
                yield Fault("cond_scale", f"has {bad[0]:g}, but must not be negative")
            if not scales:
                yield Fault("cond_scale", "has an empty list, but must have a scale for each U-Net")
        if self.unet_training_mask is not None and not any(self.unet_training_mask):
            yield Fault("unet_training_mask", "is false for all U-Nets, so there is nothing to train")
        if self.amp is not None and self.precision != "auto":
            rule = f"and {named('precision')} ({self.precision}) both say the arithmetic: leave one of them out"
            yield Fault("amp", rule)
        if re.fullmatch(r"(auto|cpu|mps|cuda(:\d+)?)", self.device):
            return
        numbers = re.fullmatch(r"cuda:(\d+(?:,\d+)*)", self.device)
        if numbers is None:
            yield Fault.of(self, "device", "must be auto, cpu, mps, cuda, or cuda:N, such as cuda:0")
            return
        start = f"start one process per GPU: mpiexec -n {numbers[1].count(',') + 1} python …"
        choose = f"choose GPUs by CUDA_VISIBLE_DEVICES={numbers[1]} with device cuda, and {start}"
        yield Fault("device", f"is {self.device!r}: {choose}")

    @property
    def device_name(self) -> str:
        """As ``--device`` spells it. The first GPU is that of the first process, as all examples have it."""
        return "cuda" if self.device == "cuda:0" else self.device

    @property
    def arithmetic(self) -> str:
        """As ``--precision`` spells it."""
        return "fp32" if self.amp is False else self.precision

    def trained(self, count: int) -> tuple[bool, ...]:
        """Whether each of ``count`` U-Nets is trained."""
        return self.unet_training_mask or (True,) * count

    def scales(self, i: int, count: int, droppable: bool) -> tuple[float, ...]:
        """The guidance scales of U-Net ``i`` of ``count``, several to be compared. One for all is for those whose
        training drops conditions."""
        if count == 1:
            return tuple(scale for scales in self.cond_scale for scale in scales)
        return at(self.cond_scale, i) if droppable or len(self.cond_scale) > 1 else (1.0,)

    def optimizer(self, i: int) -> OptimConfig:
        """The optimizer of U-Net ``i``."""
        return OptimConfig(
            lr=at(self.lr, i),
            weight_decay=at(self.wd, i),
            adam_beta2=ADAM_BETA2,
            warmup_steps=at(self.warmup_steps, i) or 0,
            lr_anneal_steps=at(self.cosine_decay_max_steps, i) or 0,
            lr_anneal="cosine",
            grad_clip=at(self.max_grad_norm, i) or 0.0,
            ema_rate=(round(at(self.ema_beta, i) ** (1 / self.ema_update_every), 6),) if self.use_ema else (),
        )


def at(values: Sequence[T], i: int) -> T:
    """The value for U-Net ``i`` of one for all or one for each."""
    return values[i if len(values) > 1 else 0]
