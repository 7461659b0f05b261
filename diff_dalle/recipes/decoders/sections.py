"""The sections of a decoder's file: what it is trained on, how, and where a run logs, starts from, and saves to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

from ...config import Fault, faults_of, named, option, section, settings
from ...config.bounds import MAX_BATCH, MAX_PROCESSES, MAX_SECONDS
from ...data.captions import caption_option
from ...data.sources import ShardRange, divide
from ...diffusion.sampling import preview_share_option
from ...images.preprocessing import TransformConfig
from ...models.options import PRECISIONS
from ...tracking.loader import LoaderConfig
from ...tracking.saver import SaverConfig, check_savers, wrong_keys
from ...training.settings import OptimConfig

INDEX_WIDTH = 4  # of img2dataset's shards
TOLERANCE = 1e-6  # of the sum of the splits: 0.7 + 0.2 + 0.1 is 0.9999999999999999


@settings
class SplitsConfig:
    """Splits"""

    train: float = option(0.75, "fraction of the shards to train on", above=0, most=1)
    val: float = option(
        0.15, "fraction of the shards for the validation loss and the metrics; 0 = neither", least=0, most=1
    )
    test: float = option(0.1, "fraction of the shards whose images are shown beside samples; 0 = none", least=0, most=1)

    def faults(self) -> Iterator[Fault]:
        if abs(sum(vars(self).values()) - 1) > TOLERANCE:
            names = f"{named('train')}, {named('val')} and {named('test')}"
            yield Fault("", f"{names} are {self.train:g}, {self.val:g} and {self.test:g}, but must add up to 1")


@settings
class DataSection:
    """Data"""

    refused: ClassVar[dict[str, str]] = {
        "data_dir": "is called webdataset_base_url here, with {} in place of the shard's number",
    }

    webdataset_base_url: str = option(
        "",
        "path, URL or pipe:COMMAND of a shard, with {} in place of its number",
        required=True,
        free=True,  # checkpoints know the shards themselves
    )
    img_embeddings_url: str | None = option(
        None,
        "folder of image embeddings, a .npy file for each shard; none = from the shards or decoder.clip",
        free=True,
    )
    text_embeddings_url: str | None = option(
        None, "folder of text encodings, a .npy file for each shard; none = from the shards or decoder.clip", free=True
    )
    streams: int = option(
        0,
        "interleaved streams of an epoch, which determine its order; 0 = 8, or the next multiple of the nodes",
        least=0,
        most=MAX_PROCESSES,
    )
    num_workers: int = option(
        4, "data workers per training process; 0 = load in the training process", free=True, least=0, most=MAX_PROCESSES
    )
    batch_size: int = option(64, "samples per process and step", free=True, least=1, most=MAX_BATCH)
    start_shard: int = option(0, "number of the first shard", free=True)
    end_shard: int = option(9_999_999, "number of the last shard; may lie beyond those that exist", free=True)
    shard_width: int = option(6, "zero-padded digits of a shard's number", free=True, least=0, most=20)
    index_width: int | None = option(
        None,
        f"last characters of a sample's key that number its row in the .npy files, 0 = rows in the order of the shard; "
        f"none = as their folder records, else {INDEX_WIDTH}",
        least=0,
        most=20,
    )
    splits: SplitsConfig = section(SplitsConfig)
    shuffle_train: bool = option(True, "new order of shards and samples in each epoch")
    resample_train: bool = option(
        False, "draw the shards of an epoch with replacement; their samples are shuffled, whatever shuffle_train is"
    )
    shuffle_val_test: bool = option(
        False, "a fixed random order of validation and test samples, instead of the shards'"
    )
    preprocessing: tuple[TransformConfig, ...] = option(
        (TransformConfig(),),
        "image transforms, by torchvision's names; images are then scaled to cover the largest training size and "
        "cropped",
        keyed="name",
    )
    caption_field: str = caption_option()
    max_broken: float = option(
        0.02, "maximum fraction of broken samples, which are replaced", free=True, least=0, most=1
    )
    index_cache: str = option("", "folder for the index of the shards; empty = beside the shards", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)

    def faults(self) -> Iterator[Fault]:
        if self.resample_train and self.shuffle_train:
            other = named("shuffle_train")
            yield Fault(
                "resample_train", f"and {other} are both True, but exclude each other: set one of them to false"
            )
        if self.webdataset_base_url:
            yield from faults_of(self.shards)

    def shards(self) -> ShardRange:
        return ShardRange(self.webdataset_base_url, self.start_shard, self.end_shard, self.shard_width)

    def divided(self, seed: int) -> dict[str, list[str]]:
        """The shards that exist, as "train", "val" and "test"."""
        return divide(self.shards().find(), vars(self.splits), seed)


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


# What each kind of logger has beside what all have; True = required.
LOGGERS = {
    "console": {},
    "wandb": {"wandb_entity": True, "wandb_project": True, "wandb_run_name": False, "wandb_run_id": False},
    "tensorboard": {},
}


@settings
class LogConfig:
    """Logger"""

    log_type: str = option("console", "kind of logger", choices=LOGGERS, required=True)
    resume: bool = option(False, "continue the wandb run wandb_run_id; no effect on other loggers")
    auto_resume: bool = option(False, "continue the run in data_path, and its wandb run")
    verbose: bool = option(False, "show values of wandb or tensorboard on the console too")
    wandb_entity: str | None = option(None, "wandb: user or team")
    wandb_project: str | None = option(None, "wandb: project")
    wandb_run_name: str | None = option(None, "wandb: name of the run; none = chosen by wandb")
    wandb_run_id: str | None = option(None, "wandb: id of the run that resume continues; unused without resume")

    def faults(self) -> Iterator[Fault]:
        yield from wrong_keys(self, "log_type", LOGGERS)
        if self.log_type == "wandb" and self.resume and self.wandb_run_id is None:
            rule = f"{named('wandb_run_id')}, the wandb run to continue, is missing: set it"
            yield Fault.of(self, "resume", rule)


@settings
class TrackerSection:
    """Tracker"""

    data_path: str = option("./.tracker-data", "folder for checkpoints, logs and grids of samples", free=True)
    overwrite_data_path: bool = option(
        False, "start over although data_path holds a run, and remove its checkpoints", free=True
    )
    log: tuple[LogConfig, ...] = option((), "loggers: one, or a list", free=True, required=True, lone=True)
    load: LoaderConfig | None = option(None, "what to start from", free=True)
    save: tuple[SaverConfig, ...] = option((), "savers: one, or a list", free=True, required=True, lone=True)

    def faults(self) -> Iterator[Fault]:
        if not self.data_path:
            yield Fault("data_path", "is empty, but must be a folder")
        for name in ("log", "save"):
            if not getattr(self, name):
                yield Fault(name, "is an empty list: give one")
        kinds = [log.log_type for log in self.log]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            yield Fault("log", f"has {twice} twice: give each logger once")
        uses = [(f"save[{i}]", saver.save_to, saver.wandb_run_path) for i, saver in enumerate(self.save)]
        if self.load:
            uses.append(("load", self.load.load_from or "", self.load.wandb_run_path))
        for name, kind, run in uses:
            if kind == "wandb" and run is None and "wandb" not in kinds:
                remedy = f"set {named(f'{name}.wandb_run_path')}"
                yield Fault(name, f"is about the logger's wandb run, but {named('log')} has no wandb: {remedy}")
        yield from check_savers(self.save, "save")

    @property
    def auto_resume(self) -> bool:
        """Whether to continue the run that is in ``data_path``."""
        return any(log.auto_resume for log in self.log)
