"""What the files of all kinds of a latent cascade say, under the documented keys, and the recipe that follows."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch

from ... import storage
from ...checkpoints.content import read_archive
from ...checkpoints.foreign.stable_cascade import network_command
from ...checkpoints.kinds import find_kind
from ...checkpoints.safetensors import WEIGHTS, tensor_names, write_weights_file
from ...config import Fault, InputError, faults_of, leaves, named, option, section, settings, spelled, to_dict
from ...config.bounds import MAX_BATCH, MAX_SIDE
from ...data.buckets import AspectConfig
from ...data.filters import filters_option
from ...data.loader import DataConfig
from ...distributed.launch import DistributedConfig
from ...distributed.sharding_config import ShardingConfig
from ...distributed.world import World
from ...models.latent.released import find_released
from ...text.tokenizer import Tokenizer
from ...tracking.trackers import TrackingConfig
from ...training.saving import FilesWithWeights
from ...training.settings import OptimConfig, TrainingConfig
from ...training.trainee import Trainee
from ..recipe import Exports, Recipe, Session, overlaid, translated
from .sections import HOMES, REFUSED, RENAMED, DataSection, LoopSection

# Settings that name networks, by their stages; "" = that of the run.
SETTINGS = {
    "generator_checkpoint_path": "",
    "stage_a_checkpoint_path": "stage_a",
    "effnet_checkpoint_path": "semantic",
    "previewer_checkpoint_path": "semantic",
}


def check_imported(kind: str, settings: Mapping[str, Any]) -> None:
    """InputError, with the command that makes a checkpoint of it, when one of the ``SETTINGS`` is a file of a public
    network. kind: of the run."""
    own = kind.removesuffix("_lora").removesuffix("_controlnet")
    found: dict[str, list[tuple[str, str]]] = {}  # by stage: settings and files
    for setting, stage in SETTINGS.items():
        path = settings.get(setting)
        if isinstance(path, str) and find_released(stage or own, _names_in(path)):
            found.setdefault(stage or own, []).append((setting, path))
    for stage, files in found.items():
        (setting, path), *_ = files
        weights = list(dict.fromkeys(each for _, each in files))
        command = network_command(stage, weights, settings.get("model_version"))
        rule = f"is {path}, which holds the weights of a public network: make a checkpoint of it by {command}"
        raise InputError(Fault(setting, f"{rule}, and give that"))


def _names_in(path: str) -> Collection[str]:
    """The names of the tensors in a file that this package has not written; none if they cannot be found out cheaply,
    or what reads the file says what is wrong with it."""
    try:
        if path.endswith(WEIGHTS):
            return tensor_names(path) if storage.exists(path) else ()
        if storage.is_remote(path) or not os.path.isfile(storage.local_path(path)):
            return ()
        content, _ = read_archive(path, values=False)
    except InputError:
        return ()
    found = content.get("state_dict", content) if isinstance(content, Mapping) else ()
    return found.keys() if isinstance(found, Mapping) else ()


EXTENSIONS = ("pt", "safetensors")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # dtype → precision
EMA_KEYS = ("ema_start_iters", "ema_iters", "ema_beta")


@settings
class CascadeRun:
    """Settings of ``train_cascade.py``.

    A kind adds its network, and ``session``, which opens what it works with.

    sizes: what ``model_version`` stands for.
    """

    kind: ClassVar[str]

    refused: ClassVar[dict[str, str]] = REFUSED
    homes: ClassVar[Mapping[str, tuple[str, str]]] = HOMES
    renamed: ClassVar[Mapping[str, str]] = RENAMED
    sizes: ClassVar[Mapping[str, Any]] = {}

    experiment_id: str = option("", "name of the run and of its folders", required=True, free=True)
    checkpoint_path: str = option("", "logs and checkpoints go to its folder experiment_id", required=True, free=True)
    output_path: str = option("", "previews go to its folder experiment_id", required=True, free=True)
    dtype: str | None = option(
        None,
        "arithmetic of the networks, whose weights are fp32; none = bfloat16 on GPUs that support it and on CPUs where "
        "it is faster, else float32",
        choices=PRECISIONS,
    )
    checkpoint_extension: str = option(
        "pt",
        "checkpoint format: pt, which training resumes from; safetensors = beside them, weights also as .safetensors "
        "files, which load like checkpoints",
        choices=EXTENSIONS,
        free=True,
    )
    dist_file_subfolder: str = option("", "unused: processes do not rendezvous by file", free=True)
    wandb_project: str | None = option(None, "wandb project; none = no wandb", free=True)
    wandb_entity: str | None = option(None, "wandb user or team; none = the one logged in", free=True)
    lr: float = option(1e-4, "learning rate after the warm-up", required=True, free=True, above=0)
    warmup_updates: int = option(
        1, "linear warm-up of the learning rate, in updates", required=True, free=True, least=0
    )
    batch_size: int = option(
        256, "samples per update, of all processes together", required=True, free=True, least=1, most=MAX_BATCH
    )
    grad_accum_steps: int = option(
        1,
        "forward passes per update; memory depends on it, results do not",
        required=True,
        free=True,
        least=1,
        most=MAX_BATCH,
    )
    image_size: int = option(
        768,
        "width and height of training images in pixels, or of an equal-area square",
        required=True,
        least=1,
        most=MAX_SIDE,
    )
    multi_aspect_ratio: tuple[str, ...] | None = option(
        None, "width / height of training images, such as 1/1,2/3; none = squares"
    )
    bucketeer_random_ratio: float = option(
        0.05, "with multi_aspect_ratio: fraction of samples assigned a random one instead of the nearest"
    )
    updates: int = option(100_000, "updates in all, including resumed ones", required=True, free=True, least=1)
    save_every: int = option(2000, "updates between checkpoints, each with previews", required=True, free=True, least=1)
    backup_every: int = option(
        20_000, "updates between checkpoints that are kept; 0 = none", required=True, free=True, least=0
    )
    ema_start_iters: int | None = option(None, "updates before the average of the weights starts", least=0)
    ema_iters: int | None = option(None, "updates per update of the average", least=1)
    ema_beta: float | None = option(
        None, "decay of the average; set all three, or none to keep no average", least=0, below=1
    )
    use_fsdp: bool | None = option(
        None, "shard weights across processes, as sharding.parallel fsdp; none = as that says", free=True
    )
    webdataset_path: tuple[str, ...] = option(
        (), "shards: folders, tars, globs, brace ranges, URLs, pipe:COMMAND; one or a list", required=True, free=True
    )
    captions_getter: str | None = option(
        None,
        'location of captions: a pair of an extension and a getter, such as ["json", "captions_getter"]; none = text '
        "members .txt",
        nested=True,
    )
    dataset_filters: tuple[str, ...] = filters_option()
    generator_checkpoint_path: str | None = option(
        None, "model or EMA file to initialize the weights from; none = from scratch", free=True
    )
    data: DataSection = section(DataSection)
    loop: LoopSection = section(LoopSection)
    sharding: ShardingConfig = section(ShardingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a file with those that follow from others: ``model`` is the size ``model_version``, except
        for what it says itself; ``homes`` are where they belong. Settings that are wrong are left as they are."""
        completed = overlaid(tree, {})
        size, own = cls.sizes.get(str(tree.get("model_version"))), tree.get("model", {})
        if size is not None and isinstance(own, Mapping):
            completed["model"] = overlaid(to_dict(size), own)
        for key in [key for key in completed if key in cls.homes]:
            value, (home, name) = completed.pop(key), cls.homes[key]
            if value is not None and isinstance(completed.setdefault(home, {}), dict):
                completed[home].setdefault(name, value)
        return completed

    def faults(self) -> Iterator[Fault]:
        if self.experiment_id in (".", "..") or not {*"/\\"}.isdisjoint(self.experiment_id):
            yield Fault.of(self, "experiment_id", "must be the name of one folder")
        if self.loop.lr_anneal and self.warmup_updates >= self.updates:
            rule = f"with {named('loop.lr_anneal')} must be below {named('updates')} ({self.updates})"
            yield Fault.of(self, "warmup_updates", rule)
        given = [name for name in EMA_KEYS if getattr(self, name) is not None]
        if given and len(given) < len(EMA_KEYS):
            all_names = ", ".join(map(named, EMA_KEYS))
            yield Fault(given[0], f"is given, but {all_names} go together: give all of them, or none")
        if self.use_fsdp is False and self.sharding.parallel != "ddp":
            rule = f"{named('sharding.parallel')} is {self.sharding.parallel}: leave one of them out"
            yield Fault.of(self, "use_fsdp", rule)
        yield from self._wrong_data()
        yield from self.wrong_sizes(self.size_multiple)

    def _wrong_data(self) -> Iterator[Fault]:
        """What is wrong with ``data_of``, by the names of the settings here."""
        own = [leaf.path for leaf in leaves(type(self)) if len(leaf.path) == 1 or leaf.path[0] == "data"]
        names = {path[-1]: ".".join(path) for path in own} | RENAMED

        def name_of(setting: str) -> str:
            return names.get(setting.rpartition(".")[2], setting)

        for fault in faults_of(lambda: data_of(self), "data"):
            rule = spelled(fault.rule, lambda setting: named(name_of(setting)))
            yield replace(fault, setting=name_of(fault.setting), rule=rule)

    def wrong_sizes(self, multiple: int) -> Iterator[Fault]:
        """Sizes of images that the networks do not take. multiple: of which both sides must be."""
        for name in ("image_size", *(["data.bucket_factor"] if self.multi_aspect_ratio else [])):
            fault = Fault.of(self, name, f"must be a multiple of {multiple}, which the networks' strides require")
            if multiple and cast(int, fault.value) % multiple:
                yield fault

    @property
    def size_multiple(self) -> int:
        """What both sides of images must be multiples of; 0 = not known yet."""
        return cast(Any, self).model.stride

    def notes(self) -> Iterator[str]:
        """Sentences on settings that are accepted without being used, for the start of training."""
        if self.dist_file_subfolder:
            yield "dist_file_subfolder is not used: processes do not find each other by a file"

    @property
    def initial_weights(self) -> str | None:
        """The file to initialize the weights from; None = from scratch."""
        return self.generator_checkpoint_path

    @property
    def network_kind(self) -> str:
        """The kind of its network, an entry of checkpoints.kinds.KINDS."""
        return self.kind

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        return config | dict.fromkeys(("checkpoint_path", "output_path"), "")

    # -------------------------------------------------------------------------------- the run that the file describes

    def recipe(self, processes: int = 1) -> Recipe:
        return Recipe(
            self,
            find_kind(self.network_kind).of_run(self),
            training_of(self, processes),
            {"": optim_of(self)},
            data_of(self),
            tracking_of(self),
            self.distributed,
            open_cascade,
            check=check_cascade,
            sample_interval=self.save_every if self.loop.preview_samples else 0,
            preview_share=self.loop.preview_share,
        )

    @abstractmethod
    def session(self, recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
        """The run with its frozen networks. InputError for those that are not there or do not fit."""


def check_cascade(recipe: Recipe, world: World) -> None:
    """InputError for files of public networks, and for a batch or files that do not suit the processes."""
    run: CascadeRun = recipe.settings
    check_imported(run.kind, vars(run))
    pieces = world.size * run.grad_accum_steps
    if run.batch_size % pieces:
        steps = f"{named('grad_accum_steps')} ({run.grad_accum_steps})"
        rule = f"must be a multiple of {pieces}: the processes ({world.size}) × {steps}"
        raise InputError(Fault.of(run, "batch_size", rule))
    if run.checkpoint_extension != "pt" and world.size > 1 and recipe.training.sharding.parallel != "ddp":
        rule = "but weights that are divided among processes are saved as folders: leave it out, and make files"
        found = f"is {run.checkpoint_extension}, {rule} of one by consolidate.py and share.py"
        raise InputError(Fault("checkpoint_extension", found))


def open_cascade(recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
    run: CascadeRun = recipe.settings
    for note in run.notes():
        world.print(f"Note: {note}.")
    if not (run.data.saliency or run.data.random_crop or run.multi_aspect_ratio):
        world.print("Images are cropped in the center; data.saliency would crop them around what they show.")
    session = run.session(recipe, world, tokenizer)
    return session if run.checkpoint_extension == "pt" else replace(session, exports=weights_files)


def weights_files(trainee: Trainee, files: FilesWithWeights) -> Exports:
    """The weights as safetensors."""
    return {
        f"{'model' if role == 'model' else role + '_'}{WEIGHTS}": partial(
            write_weights_file, content=content, path=role, dtype=torch.float32
        )
        for role, content in files.items()
    }


def optim_of(run: CascadeRun) -> OptimConfig:
    return translated(
        OptimConfig,
        run.loop,
        lr=run.lr,
        warmup_steps=run.warmup_updates,
        lr_anneal_steps=run.updates if run.loop.lr_anneal else 0,
        lr_anneal=run.loop.lr_anneal or OptimConfig.lr_anneal,
        ema_rate=() if run.ema_beta is None else (run.ema_beta,),
        ema_start=run.ema_start_iters,
        ema_every=run.ema_iters or 1,
    )


def training_of(run: CascadeRun, processes: int = 1) -> TrainingConfig:
    share = max(1, run.batch_size // processes)
    shards = bool(run.use_fsdp) and run.sharding.parallel == "ddp"
    return translated(
        TrainingConfig,
        run.loop,
        batch_size=share,
        microbatch=max(1, share // run.grad_accum_steps),
        iterations=run.updates,
        precision=PRECISIONS[run.dtype] if run.dtype else "auto",
        logdir=storage.join(run.checkpoint_path, run.experiment_id) if run.checkpoint_path else "",
        sharding=replace(run.sharding, parallel="fsdp") if shards else run.sharding,
        init_checkpoint=(run.initial_weights,) if run.initial_weights else (),
        save_interval=run.save_every,
        backup_interval=run.backup_every,
        val_data_dir=run.data.val_path,
    )


def tracking_of(run: CascadeRun) -> TrackingConfig:
    trackers = ("console", "log", "csv", "jsonl", "samples", *(["wandb"] if run.wandb_project else []))
    return TrackingConfig(
        trackers,
        samples_dir=storage.join(run.output_path, run.experiment_id) if run.output_path else "",
        wandb_project=run.wandb_project or "",
        wandb_entity=run.wandb_entity or "",
        wandb_run_name=run.experiment_id,
    )


def data_of(run: CascadeRun) -> DataConfig:
    ratios = {"multi_aspect_ratio": run.multi_aspect_ratio or (), "bucketeer_random_ratio": run.bucketeer_random_ratio}
    return translated(
        DataConfig,
        run.data,
        data_dir=run.webdataset_path,
        caption_field=run.captions_getter or "txt",
        dataset_filters=run.dataset_filters,
        aspect=translated(AspectConfig, run.data, **ratios),
    )
