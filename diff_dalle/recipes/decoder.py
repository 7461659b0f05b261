"""Training a decoder: U-Nets that are conditioned on CLIP embeddings, as one file says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

from torch.nn import functional as F

from .. import storage
from ..checkpoints.decoder import DecoderConfig
from ..checkpoints.loading import SavedNetwork, open_networks
from ..checkpoints.pixels import DecoderSettings
from ..checkpoints.run_folder import CheckpointSet, RunFolder, find_set, read_run
from ..config import Fault, InputError, faults_of, named, option, section, settings, to_dict
from ..config.bounds import MAX_SEED
from ..data.loader import DataConfig, Loader
from ..diffusion.augmentation import area_resize
from ..distributed.launch import DistributedConfig
from ..distributed.sharding_config import ShardingConfig
from ..distributed.world import World
from ..evaluation.generated import GeneratedMetrics
from ..evaluation.generated_config import GeneratedMetricsConfig
from ..images.signal import PixelSignal
from ..models.decoder.unet import DecoderUnet
from ..randomness import Draw, check_seeds
from ..tasks.decoding import CLIP, DecodingTask
from ..tasks.previews import Previews
from ..tracking.loader import fetch_source
from ..tracking.trackers import TrackingConfig
from ..training.loop import EVALUATION_SEED
from ..training.settings import TrainingConfig
from ..training.trainee import Trainee
from .decoders.evaluating import DecoderMetrics, DecoderSampler, compared, metrics_clip
from .decoders.materials import Materials, open_materials
from .decoders.rules import last_trained, wrong_between
from .decoders.sections import DataSection, LogConfig, TrackerSection, TrainSection
from .recipe import Recipe, Session, open_loader, translated

FILES = ("log", "csv", "jsonl", "samples")  # of the run's log, in data_path
META = "decoder_config.json"


@settings
class DecoderRun:
    """Settings of ``train_decoder.py``."""

    kind: ClassVar[str] = "decoder"
    renamed: ClassVar[Mapping[str, str]] = {
        "data_dir": "data.webdataset_base_url",
        "val_data_dir": "data.webdataset_base_url",
        "logdir": "tracker.data_path",
        "trackers": "tracker.log",
        "iterations": "train.epochs",
        "lr_anneal_steps": "train.cosine_decay_max_steps",
        "microbatch": "train.max_batch_size",
        "resume_checkpoint": "tracker.load",
    }

    decoder: DecoderConfig = section(DecoderConfig, flags=False)
    data: DataSection = section(DataSection, flags=False)
    train: TrainSection = section(TrainSection, flags=False)
    evaluate: GeneratedMetricsConfig = section(GeneratedMetricsConfig, flags=False)
    tracker: TrackerSection = section(TrackerSection, flags=False)
    seed: int = option(0, "seed of the data order and of all random numbers", most=MAX_SEED)
    check: bool = option(
        False, "check settings and data, print what would be trained on what, with its cost, and exit", free=True
    )
    sharding: ShardingConfig = section(ShardingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: check_seeds([self.seed]), "seed")
        yield from wrong_between(self.decoder, self.data, self.train, self.evaluate, self.tracker)

    @property
    def trained(self) -> list[int]:
        """The numbers of the U-Nets that are trained."""
        return [i for i, is_trained in enumerate(self.train.trained(len(self.decoder))) if is_trained]

    @property
    def image_size(self) -> int:
        """Width and height of the training images in pixels."""
        return self.decoder.sizes[last_trained(self.decoder, self.train)]

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        del config["check"], config["tracker"]["data_path"], config["tracker"]["overwrite_data_path"]
        return config

    def recipe(self, processes: int = 1) -> Recipe:
        """Before it is opened: as if an epoch without ``epoch_samples`` had one sample."""
        data, given = self.data, self.distributed
        return Recipe(
            self,
            DecoderSettings.of_run(self),
            training_of(self, processes),
            {name: self.train.optimizer(i) for i, name in enumerate(self.decoder.names)},
            translated(
                DataConfig,
                data,
                data_dir=(data.webdataset_base_url,) if data.webdataset_base_url else (),
                transforms=data.preprocessing,
                resample=data.resample_train,
            ),
            tracking_of(self.tracker),
            # As all flags, --device overrides the file.
            given if given.device != "auto" else replace(given, device=self.train.device_name),
            lambda recipe, world, tokenizer: open_decoder(recipe, world).session,
            preview_share=self.train.preview_share,
            is_replaced=self._is_replaced,
        )

    def check_start(self) -> None:
        """InputError if the run could not start: for a missing package, for what is in ``data_path``, or for a file
        that it is to load."""
        load, logdir = self.tracker.load, self.tracker.data_path
        self.recipe().check_packages()
        self._is_replaced(logdir)
        if load and load.load_from == "local" and not load.only_auto_resume and read_run(logdir) is None:
            fetch_source(load, "")

    def _is_replaced(self, logdir: str) -> bool:
        """Whether ``data_path`` holds another run, to be replaced, and not the run, to be continued (auto_resume).
        InputError if neither may be done."""
        run = read_run(logdir)
        if run is None or not run.checkpoints or self.tracker.auto_resume:
            return False
        if not self.tracker.overwrite_data_path:
            again = f"{named('tracker.overwrite_data_path')} to start again in its place, or another data_path"
            rule = f"{logdir} holds a run after {run.checkpoints[-1].step:,} steps"
            remedy = f"set tracker.log.auto_resume to continue it, {again}"
            raise InputError(Fault("tracker.data_path", f"{rule}: {remedy}"))
        return True

    def scales(self, i: int) -> tuple[float, ...]:
        """The guidance scales of U-Net ``i``, to be compared."""
        return self.train.scales(i, len(self.decoder), self.decoder.stage(i).droppable)


def training_of(run: DecoderRun, processes: int) -> TrainingConfig:
    """The settings of the loop."""
    return translated(
        TrainingConfig,
        run.train,
        batch_size=run.data.batch_size,
        microbatch=run.train.max_batch_size or 0,
        iterations=0,
        seed=run.seed,
        precision=run.train.arithmetic,
        logdir=run.tracker.data_path,
        sharding=run.sharding,
        keep_best=True,
        **intervals_of(run, run.train.epoch_samples or 1, 1, processes),
    )


def intervals_of(run: DecoderRun, epoch: int, held_out: int, processes: int) -> dict[str, Any]:
    """The settings of the loop that follow from the data. epoch, held_out: samples of an epoch and of the split
    ``val``."""
    train, batch = run.train, run.data.batch_size * processes
    return {
        "samples": train.epochs * epoch,
        "save_interval": max(1, train.save_every_n_samples // batch),
        "eval_interval": -(-epoch // batch),  # not before the end of an epoch
        "eval_samples": min(train.validation_samples or held_out, held_out),
    }


def tracking_of(tracker: TrackerSection) -> TrackingConfig:
    loggers = {log.log_type: log for log in tracker.log}
    shown = "console" in loggers or any(log.verbose for log in tracker.log)
    names = (*(["console"] if shown else []), *FILES, *(name for name in loggers if name != "console"))
    wandb = loggers.get("wandb", LogConfig("console"))
    return TrackingConfig(
        names,
        wandb_project=wandb.wandb_project or "",
        wandb_entity=wandb.wandb_entity or "",
        wandb_run_name=wandb.wandb_run_name or "",
        wandb_run_id=(wandb.wandb_run_id or "") if wandb.resume else "",
        wandb_resume="must" if wandb.resume else "auto" if tracker.auto_resume else "never",
        savers=tracker.save,
        load=tracker.load,
    )


@dataclass(frozen=True)
class OpenedDecoder:
    """What a run trains on, and evaluates and shows (None = nothing); its U-Nets that are not trained, by name."""

    recipe: Recipe
    world: World
    materials: Materials
    train: Loader
    val: Loader | None
    test: Loader | None
    frozen: Mapping[str, DecoderUnet]

    @property
    def run(self) -> DecoderRun:
        return self.recipe.settings

    @property
    def session(self) -> Session:
        names = [self.run.decoder.names[i] for i in self.run.trained]
        measured = self.metrics()
        return Session(
            self.recipe,
            self.world,
            self.materials.spec,
            self.task,
            names=names,
            frozen=self.frozen,
            measure=partial(self._measure, measured) if measured else None,
            loaders=lambda session: (self.train, self.val),
            meta={META: json.dumps(to_dict(self.run), indent=1, ensure_ascii=False)},
        )

    def task(self, model: DecoderUnet, name: str, shown: Loader) -> DecodingTask:
        """What trains a U-Net. shown: in place of the split ``test`` where it is empty."""
        task = self._plain_task(model, name)
        task.preview = self._previews(task, self.test or shown, self.run.scales(self.run.decoder.names.index(name)))
        return task

    def _plain_task(self, model: DecoderUnet, name: str) -> DecodingTask:
        task = DecodingTask(model, self.run.decoder.named(name))
        if clip := self.materials.clip:
            task.add_companion(CLIP, clip)
        return task

    def metrics(self) -> GeneratedMetrics | None:
        """The metrics of as many images as there are; None without any. InputError for what they lack."""
        evaluate = self.run.evaluate
        if not evaluate.given or self.val is None:
            return None
        count = min(evaluate.n_evaluation_samples, self.val.samples)
        InputError.check(fault.below(("evaluate",)) for fault in evaluate.shortages(count, "the split val has"))
        config = replace(evaluate, n_evaluation_samples=count)
        clip = metrics_clip(self.materials, self.world) if config.needs_clip else None
        return GeneratedMetrics(config, self.world, clip)

    def _measure(self, metrics: GeneratedMetrics, trainees: Sequence[Trainee]) -> Callable[[], dict[str, float]]:
        trained, decoder = {trainee.name: trainee.task for trainee in trainees}, self.run.decoder
        tasks = {}
        for i, name in enumerate(decoder.names):
            if name in trained:
                tasks[i] = cast(DecodingTask, trained[name])
            elif name in self.frozen:
                tasks[i] = self._plain_task(self.frozen[name], name)
        samplers = {
            label: DecoderSampler(tasks, self.run.trained[-1], scales)
            for label, scales in compared([self.run.scales(i) for i in range(len(decoder))]).items()
        }
        return DecoderMetrics(metrics, samplers, cast(Loader, self.val), self.recipe.microbatch, self.world)

    def _previews(self, task: DecodingTask, shown: Loader, scales: tuple[float, ...]) -> Previews | None:
        """A grid of pictures from fixed conditions beside the originals; None with n_sample_images 0."""
        count, stage = min(self.run.train.n_sample_images, shown.samples), task.stage
        if not (count and self.recipe.sample_interval):
            return None
        sampler, guidance = stage.sampler, stage.guidance
        passes = sum(guidance.at_scale(scale).passes(stage.droppable) for scale in scales) * sampler.evaluations
        area = (stage.image_size / (stage.crop_size or stage.image_size)) ** 2
        asked = sampler.process(stage.diffusion).num_timesteps
        count, steps = self.recipe.affordable(self.world, count, asked, area * passes, name=stage.name)
        sampler = sampler if steps == asked else sampler.in_steps(steps)
        batch = shown.batch_at(range(count))
        cond, low_res = task.given_conditions(batch, Draw(EVALUATION_SEED, batch.index, batch.images.device))
        signal, size = PixelSignal(self.run.decoder.channels), (stage.image_size, stage.image_size)
        upsampled = None if low_res is None else signal.to_pixels(F.interpolate(low_res, size))
        originals = signal.to_pixels(area_resize(batch.images, size))
        given = sampler, guidance, stage.diffusion, signal, cond.to("cpu"), [""] * count, size
        return Previews(*given, self.recipe.microbatch, inputs=upsampled, originals=originals, scales=scales)


def open_decoder(recipe: Recipe, world: World) -> OpenedDecoder:
    """Find the shards, embeddings and U-Nets of a run; every rank calls it. InputError for what does not fit."""
    run: DecoderRun = recipe.settings
    data = replace(run.data, webdataset_base_url="".join(recipe.data.data_dir))
    materials = open_materials(run.decoder, data, run.image_size, run.seed, world)
    train, val, test = (_part(recipe, name, materials, world) for name in ("train", "val", "test"))
    assert train is not None  # there is no division without it
    frozen, given = _weights(recipe, world)
    epoch = run.train.epoch_samples or train.samples
    intervals = intervals_of(run, epoch, val.samples if val else 1, world.size)
    training = replace(recipe.training, init_checkpoint=given, **intervals)
    recipe = recipe.of(replace(run, decoder=replace(run.decoder, clip=materials.made_by)))
    shows = training.save_interval if run.train.n_sample_images else 0
    recipe = replace(recipe, training=training, epoch_samples=epoch, sample_interval=shows)
    return OpenedDecoder(recipe, world, materials, train, val, test, frozen)


def _weights(recipe: Recipe, world: World) -> tuple[dict[str, DecoderUnet], tuple[str, ...]]:
    """The U-Nets that are not trained, by name: of the run's own checkpoint or the one that it starts from, or of
    ``init_checkpoint``; and its files that hold others."""
    run: DecoderRun = recipe.settings
    frozen: dict[str, Any] = {}
    trained, given = {run.decoder.names[i] for i in run.trained}, list[str]()
    kept = _kept(recipe)
    for path in [*kept, *recipe.training.init_checkpoint]:
        for saved in open_networks(path, ("decoder",)):
            if saved.trainee in frozen:
                continue
            own = {name: i for i, name in enumerate(run.decoder.names)}.get(saved.trainee)
            if own is None:
                names = ", ".join(run.decoder.names)
                raise InputError(f"{path} holds {saved.trainee}, but the decoder has {names}: leave it out")
            if saved.trainee in trained:
                if path not in kept:
                    _check_form(saved, run.decoder, own)
                    given.append(path)
                continue
            if saved.settings.decoder.named(saved.trainee).network != run.decoder.stage(own).network:
                unet = named(f"decoder.unets[{own}]")
                raise InputError(
                    f"{path} holds a {saved.trainee} with other settings than {unet}, which is not trained: give "
                    "it the file's settings"
                )
            frozen[saved.trainee] = saved.load(world.device)
    return frozen, tuple(dict.fromkeys(given))


def _check_form(saved: SavedNetwork, decoder: DecoderConfig, own: int) -> None:
    """InputError for weights that compute otherwise with the settings of the run, which their shapes do not show."""
    theirs = saved.settings.decoder.named(saved.trainee).unet.as_published
    if theirs != decoder.unets[own].as_published:
        setting = f"decoder.unets[{own}].as_published"
        raise InputError(Fault(setting, f"must be {theirs}, as the weights of {saved.path} were trained"))


def _kept(recipe: Recipe) -> list[str]:
    """The files with the weights of U-Nets that are not trained, in the run's own latest checkpoint, or else in that of
    the run that it starts from."""
    run: DecoderRun = recipe.settings
    origin: tuple[RunFolder, CheckpointSet] | None = None
    if recipe.present is not None and recipe.present.checkpoints:
        origin = recipe.present, recipe.present.checkpoints[-1]
    elif recipe.training.resume_checkpoint:
        origin = find_set(recipe.training.resume_checkpoint)
    if origin is None:
        return []
    folder, entry = origin
    trained, found = {run.decoder.names[i] for i in run.trained}, []
    for name in run.decoder.names:
        roles = sorted(key for key in entry.files if re.fullmatch(rf"{name}/(ema_[\d.e-]+|model)", key))
        if name not in trained and roles:
            found.append(storage.join(folder.path, entry.files[roles[0]]))
    return found


def _part(recipe: Recipe, name: str, materials: Materials, world: World) -> Loader | None:
    """The loader of a part of the shards; validation and test samples are in a fixed order, and not augmented."""
    data: DataSection = recipe.settings.data
    shards, is_train = materials.shards[name], name == "train"
    if not shards:
        return None
    seed, shuffle = recipe.training.seed, data.shuffle_train or data.resample_train
    if not is_train:
        seed, shuffle = EVALUATION_SEED, data.shuffle_val_test
        recipe = replace(recipe, data=replace(recipe.data, resample=False))
    options = {"spec": materials.spec, "seed": seed, "shuffle": shuffle, "augment": is_train, "sources": shards}
    return open_loader(recipe, world, **options)
