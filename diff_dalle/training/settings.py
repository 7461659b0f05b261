"""The settings of a training run that no network or optimizer has."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import option, section
from ..distributed.sharding_config import ShardingConfig
from ..errors import InputError
from ..models.precision_names import PRECISIONS
from ..randomness import check_seeds


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    batch_size: int = option(64, "samples per process and step", free=True)
    microbatch: int = option(
        0, "samples per forward pass; memory depends on it, results do not; 0 = batch_size", free=True
    )
    iterations: int = option(300_000, "total training steps, including resumed ones; 0 = no limit", free=True)
    samples: int = option(0, "total training samples, including resumed ones; 0 = no limit", free=True)
    hours: float = option(0.0, "save and stop after this many hours of the session; 0 = no limit", free=True)
    seed: int = option(0, "seed of the data order and of all random numbers")
    precision: str = option(
        "auto",
        "arithmetic of the network; auto = bf16 on GPUs that support it and on CPUs where it is faster, else fp32",
        choices=PRECISIONS,
    )
    compile: bool = option(
        False,
        "compile the network with torch.compile: minutes at the start, then faster steps on GPUs; needs a C++ compiler "
        "and, on GPUs, Triton",
        free=True,
    )
    logdir: str = option(
        "", "folder for logs and checkpoints; none = $OPENAI_LOGDIR, else a new temporary folder", free=True
    )
    resume_checkpoint: str = option("", "checkpoint file in another log directory to resume from", free=True)
    accept_changed_data: bool = option(
        False, "resume although the shards of data_dir are not those of the checkpoint", free=True
    )
    accept_changed_batch: bool = option(
        False, "resume although batch_size × processes is not that of the checkpoint", free=True
    )
    init_checkpoint: tuple[str, ...] = option(
        (), "model or EMA file to initialize the weights from; with several networks, one file for each", free=True
    )
    init_exclude: tuple[str, ...] = option(
        (), "weights of init_checkpoint to skip: patterns of parameter names such as unet.label_emb.*", free=True
    )
    log_interval: int = option(50, "steps between log lines", free=True)
    save_interval: int = option(5000, "steps between checkpoints; a last one is written at the end", free=True)
    keep_checkpoints: int = option(0, "number of latest checkpoints to keep; 0 = all", free=True)
    backup_interval: int = option(
        0, "steps between checkpoints that are kept beside the latest; 0 = none", free=True, needs=("keep_checkpoints",)
    )
    eval_interval: int = option(1000, "steps between evaluations on val_data_dir", free=True, needs=("val_data_dir",))
    eval_samples: int = option(
        1024, "maximum number of held-out samples per evaluation", free=True, needs=("val_data_dir",)
    )
    val_data_dir: tuple[str, ...] = option((), "held-out shards, as data_dir; none = no evaluation", free=True)
    keep_best: bool = option(
        False, "keep the weights with the lowest held-out loss as best.pt", free=True, needs=("val_data_dir",)
    )
    sharding: ShardingConfig = section(ShardingConfig)
    max_bad_steps: int = option(20, "stop after this many consecutive steps with a non-finite gradient", free=True)

    def __post_init__(self):
        for name in ("batch_size", "log_interval", "save_interval", "eval_interval", "eval_samples", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("microbatch", "iterations", "samples", "hours", "keep_checkpoints", "backup_interval"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must not be negative")
        check_seeds([self.seed])
        if not (self.iterations or self.samples or self.hours):
            raise InputError("iterations, samples and hours are all 0, so the run would never end: set one of them")
        if self.resume_checkpoint and self.init_checkpoint:
            raise InputError("resume_checkpoint and init_checkpoint exclude each other: resume a run or start one")
        if self.compile and self.sharding.parallel != "ddp":
            raise InputError(
                f"compile is True and parallel is {self.sharding.parallel}, but a network is compiled as one graph, "
                "which gathering its weights block by block would break: leave one of them out"
            )
        if self.init_exclude and not self.init_checkpoint:
            raise InputError("init_exclude is given without init_checkpoint, whose weights it excludes")

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written after this many updates."""
        return step % self.save_interval == 0 or self.backs_up_at(step)

    def backs_up_at(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept, however old it becomes."""
        return self.backup_interval > 0 and step % self.backup_interval == 0

    def last_step(self, processes: int, step: int = 0, samples: int = 0) -> int | None:
        """Number of updates after which a run on that many processes ends; None when only ``hours`` limits it.

        step, samples: what it has done so far, perhaps with another global batch.
        """
        left = max(0, self.samples - samples)
        by_samples = step + -(-left // (self.batch_size * processes)) if self.samples else 0
        return min((steps for steps in (self.iterations, by_samples) if steps), default=None)
