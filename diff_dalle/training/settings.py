"""The settings of a training run that no network has: those of the loop, and of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ..config import Fault, InputError, Registry, faults_of, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_SECONDS, MAX_SEED
from ..distributed.sharding_config import ShardingConfig
from ..models.options import PRECISIONS
from ..randomness import check_seeds

#: Tasks of one's own (see task.py), which take the place of that of a network.
TASKS: Registry[type] = Registry("diff_dalle.tasks")
Usual = TypeVar("Usual")


def chosen_task(name: str | None, usual: type[Usual]) -> type[Usual]:
    """The task of ``TASKS`` with this name, None = the usual one of a network. InputError for one that is not based on
    the usual one."""
    found = TASKS[name] if name else usual
    if not issubclass(found, usual):
        raise InputError(Fault("task", f"must be based on {usual.__name__}, which trains this network", name))
    return found


@settings
class TrainingConfig:
    """Training"""

    batch_size: int = option(64, "samples per process and step", free=True, least=1, most=MAX_BATCH)
    microbatch: int = option(
        0,
        "samples per forward pass; memory depends on it, results do not; 0 = batch_size",
        free=True,
        least=0,
        most=MAX_BATCH,
    )
    iterations: int = option(300_000, "total training steps, including resumed ones; 0 = no limit", free=True, least=0)
    samples: int = option(0, "total training samples, including resumed ones; 0 = no limit", free=True, least=0)
    hours: float = option(
        0.0, "save and stop after this many hours of the session; 0 = no limit", free=True, least=0, most=MAX_SECONDS
    )
    seed: int = option(0, "seed of the data order and of all random numbers", most=MAX_SEED)
    task: str | None = option(
        None,
        "task that computes the losses: one of your own (--import), based on the network's default; none = the default",
        choices=TASKS,
    )
    precision: str = option(
        "auto",
        "precision of the network; auto = bf16 on GPUs that support it and on CPUs where it is faster, else fp32",
        choices=PRECISIONS,
    )
    compile: bool | None = option(
        None,
        "compile the network's blocks with torch.compile at the first steps; auto = on CUDA with Triton. On a CPU it "
        "needs a C++ compiler, and saves a fifth of a transformer's step and little of a U-Net's",
        free=True,
    )
    logdir: str = option(
        "", "folder for logs and checkpoints; none = $OPENAI_LOGDIR, else a new one in ./runs", free=True
    )
    resume_checkpoint: str = option(
        "", "checkpoint file of another run to start from: its weights, optimizer, averages and step", free=True
    )
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
    log_interval: int = option(50, "steps between log lines", free=True, least=1)
    save_interval: int = option(5000, "steps between checkpoints; one more is written at the end", free=True, least=1)
    keep_checkpoints: int = option(0, "number of latest checkpoints to keep; 0 = all", free=True, least=0)
    backup_interval: int = option(
        0,
        "steps between checkpoints that are kept beside the latest; 0 = none",
        free=True,
        needs=("keep_checkpoints",),
        least=0,
    )
    eval_interval: int = option(
        1000, "steps between evaluations on val_data_dir", free=True, needs=("val_data_dir",), least=1
    )
    eval_samples: int = option(
        1024,
        "maximum number of held-out samples per evaluation",
        free=True,
        needs=("val_data_dir",),
        least=1,
        most=MAX_BATCH,
    )
    val_data_dir: tuple[str, ...] = option((), "held-out shards, as data_dir; none = no evaluation", free=True)
    keep_best: bool = option(
        False, "keep the weights with the lowest held-out loss as best.pt", free=True, needs=("val_data_dir",)
    )
    sharding: ShardingConfig = section(ShardingConfig)
    max_bad_steps: int = option(
        20, "stop after this many consecutive steps with a non-finite gradient", free=True, least=1
    )

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: check_seeds([self.seed]))
        if not (self.iterations or self.samples or self.hours):
            others = f"{named('samples')} and {named('hours')}"
            yield Fault.of(self, "iterations", f"must be above 0 where {others} are 0: the run would never end")
        if self.resume_checkpoint and self.init_checkpoint:
            rule = f"and {named('init_checkpoint')} exclude each other: resume a run or start one"
            yield Fault("resume_checkpoint", rule)
        if self.init_exclude and not self.init_checkpoint:
            yield Fault("init_exclude", f"is given without {named('init_checkpoint')}, whose weights it excludes")

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written after this many updates."""
        return step % self.save_interval == 0 or self.backs_up_at(step)

    def backs_up_at(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept, however old it becomes."""
        return self.backup_interval > 0 and step % self.backup_interval == 0

    def position_at(self, share: float, processes: int) -> int | None:
        """The position in the data at a share of the run, that of a whole update; None = never, which a share of 1
        is."""
        steps = self.last_step(processes)
        return None if share == 1 or steps is None else round(share * steps) * self.batch_size * processes

    def last_step(self, processes: int, step: int = 0, samples: int = 0) -> int | None:
        """Number of updates after which a run on that many processes ends; None when only ``hours`` limits it.

        step, samples: what it has done so far, perhaps with another global batch.
        """
        left = max(0, self.samples - samples)
        by_samples = step + -(-left // (self.batch_size * processes)) if self.samples else 0
        return min((steps for steps in (self.iterations, by_samples) if steps), default=None)


@settings
class OptimConfig:
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "optimizer of linear and convolution weights; muon orthogonalizes their updates, to learn in fewer steps; "
        "embeddings, norms and biases use adamw",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-4, "peak learning rate", above=0, free=True)
    weight_decay: float = option(
        0.0, "decoupled weight decay of linear and convolution weights; norms and biases are exempt", least=0, free=True
    )
    adam_beta1: float = option(0.9, "AdamW beta1, decay of the first moment", least=0, below=1, free=True)
    adam_beta2: float = option(0.999, "AdamW beta2, decay of the second moment", least=0, below=1, free=True)
    muon_lr: float | None = option(
        None,
        "peak learning rate of muon, with the schedule of lr; none = lr",
        needs=("optimizer", "muon"),
        above=0,
        free=True,
    )
    muon_momentum: float = option(
        0.95, "Nesterov momentum of muon", needs=("optimizer", "muon"), least=0, below=1, free=True
    )
    warmup_steps: int = option(0, "linear warm-up of the learning rate, in steps", least=0, free=True)
    lr_anneal_steps: int = option(
        0, "step at which the annealed learning rate reaches 0; 0 = constant rate", least=0, free=True
    )
    lr_anneal: str = option(
        "linear",
        "learning-rate schedule of the annealing",
        choices=("linear", "cosine"),
        needs=("lr_anneal_steps",),
        free=True,
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", least=0, free=True)
    ema_rate: tuple[float, ...] = option(
        (0.9999,),
        "decay per update of each exponential moving average of the weights, every ema_every steps",
        least=0,
        below=1,
    )
    ema_start: int | None = option(
        None,
        "steps before the averages start; none = their decay warms up by itself",
        needs=("ema_rate",),
        least=0,
    )
    ema_every: int = option(1, "steps between updates of the averages", needs=("ema_rate",), least=1)

    def faults(self) -> Iterator[Fault]:
        if len(set(self.ema_rate)) < len(self.ema_rate):
            yield Fault.of(self, "ema_rate", "must be distinct numbers")
        if 0 < self.lr_anneal_steps <= self.warmup_steps:
            rule = f"must be below {named('lr_anneal_steps')} ({self.lr_anneal_steps})"
            yield Fault.of(self, "warmup_steps", rule)
