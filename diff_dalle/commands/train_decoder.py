"""Settings of ``train_decoder.py``: those of a decoder's file, from which everything of the run follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import nn
from torch.nn import functional as F

from ..checkpoints.decoder import DecoderConfig
from ..checkpoints.loading import open_networks
from ..checkpoints.run_folder import discard_run, read_run
from ..config import faults_of, option, section, settings, to_dict
from ..data.loader import DataConfig, Loader
from ..diffusion.augmentation import area_resize
from ..diffusion.preview_config import PreviewConfig
from ..distributed.launch import DistributedConfig
from ..distributed.sharding_config import ShardingConfig
from ..distributed.world import World
from ..errors import Fault, InputError, named
from ..evaluation.generated import GeneratedMetrics
from ..evaluation.generated_config import GeneratedMetricsConfig
from ..images.signal import PixelSignal
from ..models.decoder.unet import DecoderUnet
from ..randomness import Draw, check_seeds
from ..tasks.decoding import CLIP, DecodingTask
from ..tasks.previews import Previews
from ..text.tokenizer import Tokenizer
from ..tracking.loader import fetch_source
from ..tracking.trackers import TrackingConfig
from ..training.loop import EVALUATION_SEED
from ..training.optim_config import OptimConfig
from ..training.settings import TrainingConfig
from ..training.trainee import Trainee
from .decoder.data_section import DataSection
from .decoder.evaluating import DecoderMetrics, DecoderSampler, compared, metrics_clip
from .decoder.materials import Materials, open_materials
from .decoder.rules import last_trained, wrong_between
from .decoder.tracker_section import LogConfig, TrackerSection
from .decoder.train_section import TrainSection
from .training import TrainingRun


@dataclass(frozen=True)
class Opened:
    """What a run trains on, and evaluates and shows (None = nothing), in how many processes; its U-Nets that are not
    trained, by name, and the files with weights of the others."""

    materials: Materials
    train: Loader
    val: Loader | None
    test: Loader | None
    processes: int
    frozen: Mapping[str, nn.Module]
    weights: tuple[str, ...]


FILES = ("log", "csv", "jsonl", "samples")  # of the run's log, in data_path
META = "decoder_config.json"


@settings
class DecoderRun(TrainingRun):
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
    }
    opened: ClassVar[Opened | None] = None  # of the instance that ``settled`` returns

    decoder: DecoderConfig = section(DecoderConfig, flags=False)
    data: DataSection = section(DataSection, flags=False)  # type: ignore[assignment]  # it makes the DataConfig
    train: TrainSection = section(TrainSection, flags=False)
    evaluate: GeneratedMetricsConfig = section(GeneratedMetricsConfig, flags=False)
    tracker: TrackerSection = section(TrackerSection, flags=False)
    seed: int = option(0, "seed of the data order and of all random numbers")
    check: bool = option(
        False, "check settings and data, print what would be trained on what, with its cost, and exit", free=True
    )
    sharding: ShardingConfig = section(ShardingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: check_seeds([self.seed]), "seed")
        yield from wrong_between(self.decoder, self.data, self.train, self.evaluate, self.tracker)

    # -------------------------------------------------------------------------------- the run that the file describes

    @property
    def launching(self) -> DistributedConfig:
        """The processes and devices; as all flags, ``--device`` overrides the file."""
        given = self.distributed
        return given if given.device != "auto" else replace(given, device=self.train.device_name)

    @property
    def trained(self) -> list[int]:
        """The numbers of the U-Nets that are trained."""
        return [i for i, is_trained in enumerate(self.train.trained(len(self.decoder))) if is_trained]

    @property
    def image_size(self) -> int:
        return self.decoder.sizes[last_trained(self.decoder, self.train)]

    @property
    def optims(self) -> tuple[OptimConfig, ...]:
        """One for each U-Net."""
        return tuple(map(self.train.optimizer, range(len(self.decoder))))

    @property
    def training(self) -> TrainingConfig:  # type: ignore[override]
        """The settings of the loop; before ``settled``, as if an epoch without ``epoch_samples`` had one sample."""
        train, opened = self.train, self.opened
        held_out = opened.val.samples if opened and opened.val else 1
        return TrainingConfig(
            batch_size=self.data.batch_size,
            microbatch=train.max_batch_size or 0,
            iterations=0,
            samples=train.epochs * self.epoch_samples,
            hours=train.hours,
            seed=self.seed,
            precision=train.arithmetic,
            compile=train.compile,
            logdir=self.tracker.data_path,
            accept_changed_data=train.accept_changed_data,
            accept_changed_batch=train.accept_changed_batch,
            sharding=self.sharding,
            init_checkpoint=opened.weights if opened else train.init_checkpoint,
            log_interval=train.log_interval,
            save_interval=max(1, train.save_every_n_samples // self._global_batch),
            keep_checkpoints=train.keep_checkpoints,
            eval_interval=-(-self.epoch_samples // self._global_batch),  # not before the end of an epoch
            eval_samples=min(train.validation_samples or held_out, held_out),
            keep_best=True,
        )

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch of all processes together."""
        return self.train.epoch_samples or (self.opened.train.samples if self.opened else 1)

    @property
    def _global_batch(self) -> int:
        return self.data.batch_size * (self.opened.processes if self.opened else 1)

    @property
    def sample_interval(self) -> int:
        return self.training.save_interval if self.train.n_sample_images else 0

    @property
    def tracking(self) -> TrackingConfig:  # type: ignore[override]
        loggers = {log.log_type: log for log in self.tracker.log}
        shown = "console" in loggers or any(log.verbose for log in self.tracker.log)
        names = (*(["console"] if shown else []), *FILES, *(name for name in loggers if name != "console"))
        wandb = loggers.get("wandb", LogConfig("console"))
        return TrackingConfig(
            names,
            wandb_project=wandb.wandb_project or "",
            wandb_entity=wandb.wandb_entity or "",
            wandb_run_name=wandb.wandb_run_name or "",
            wandb_run_id=wandb.wandb_run_id or "",
            wandb_resume="must" if wandb.resume else "auto" if self.tracker.auto_resume else "never",
            savers=self.tracker.save,
            load=self.tracker.load,
        )

    @property
    def meta(self) -> dict[str, str]:
        return {META: json.dumps(to_dict(self), indent=1, ensure_ascii=False)}

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        del config["check"], config["tracker"]["data_path"], config["tracker"]["overwrite_data_path"]
        return config

    # ---------------------------------------------------------------------------------------------- what it works with

    def check_start(self) -> None:
        """InputError if the run could not start: for a missing package, for what is in ``data_path``, or for a file
        that it is to load."""
        load, logdir = self.tracker.load, self.tracker.data_path
        self.check_packages()
        self._is_replaced(logdir)
        if load and load.load_from == "local" and not load.only_auto_resume and read_run(logdir) is None:
            fetch_source(load, "")

    def check_folder(self, logdir: str) -> None:
        if self._is_replaced(logdir):
            discard_run(logdir)

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

    def starting_from(self, weights: tuple[str, ...]) -> DecoderRun:
        return replace(self, train=replace(self.train, init_checkpoint=weights))

    def replayed(self, batch: int, share: int, logdir: str, data_dir: tuple[str, ...]) -> DecoderRun:
        train = replace(
            self.train, max_batch_size=min(self.train.max_batch_size or share, share), accept_changed_batch=True
        )
        url = data_dir[0] if data_dir else self.data.webdataset_base_url
        data = replace(self.data, batch_size=batch, num_workers=0, webdataset_base_url=url)
        return replace(self, train=train, data=data, tracker=replace(self.tracker, data_path=logdir))

    def frozen(self) -> dict[str, nn.Module]:
        return dict(self._opened.frozen)

    def settled(self, world: World) -> DecoderRun:
        materials = open_materials(self.decoder, self.data, self.image_size, self.seed, world)
        run = replace(self, decoder=replace(self.decoder, clip=materials.made_by))
        train, val, test = (run._part(name, materials, world) for name in ("train", "val", "test"))
        assert train is not None  # there is no division without it
        frozen, given = self._weights(world)
        return run.holding(opened=Opened(materials, train, val, test, world.size, frozen, given))

    def _weights(self, world: World) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
        """The U-Nets of ``init_checkpoint`` that are not trained, by name, and the files that hold others."""
        frozen: dict[str, nn.Module] = {}
        trained, given = {self.decoder.names[i] for i in self.trained}, []
        for path in self.train.init_checkpoint:
            for saved in open_networks(path, (self.network_kind,)):
                own = {name: i for i, name in enumerate(self.decoder.names)}.get(saved.trainee)
                if own is None:
                    names = ", ".join(self.decoder.names)
                    raise InputError(f"{path} holds {saved.trainee}, but the decoder has {names}: leave it out")
                if saved.trainee in trained:
                    given.append(path)
                    continue
                if saved.settings.decoder.named(saved.trainee) != self.decoder.stage(own):
                    unet = named(f"decoder.unets[{own}]")
                    raise InputError(
                        f"{path} holds a {saved.trainee} with other settings than {unet}, which is not trained: give "
                        "it the file's settings"
                    )
                frozen[saved.trainee] = saved.load(world.device)
        return frozen, tuple(dict.fromkeys(given))

    def _part(self, name: str, materials: Materials, world: World) -> Loader | None:
        """The loader of a part of the shards; validation and test samples are in a fixed order, and not augmented."""
        data, shards, is_train = self.data, materials.shards[name], name == "train"
        if not shards:
            return None
        config = DataConfig(
            caption_field=data.caption_field,
            transforms=data.preprocessing,
            max_broken=data.max_broken,
            streams=data.streams,
            resample=data.resample_train and is_train,
            num_workers=data.num_workers,
            index_cache=data.index_cache,
            shard_cache=data.shard_cache,
        )
        return Loader(
            config,
            materials.spec,
            seed=self.seed if is_train else EVALUATION_SEED,
            batch_size=data.batch_size,
            rank=world.slot,
            world_size=world.size,
            shuffle=data.shuffle_train or data.resample_train if is_train else data.shuffle_val_test,
            augment=is_train,
            sources=shards,
            device=world.device,
            world=world,
        )

    @property
    def _opened(self) -> Opened:
        assert self.opened is not None  # ``settled`` comes first
        return self.opened

    def build_loader(self, tokenizer: Tokenizer | None, world: World) -> Loader:
        return self._opened.train

    def build_held_out(self, tokenizer: Tokenizer | None, world: World) -> Loader | None:
        return self._opened.val

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        return [self._trainee(i, self._opened.test or shown, world) for i in self.trained]

    def _trainee(self, i: int, shown: Loader, world: World) -> Trainee:
        task = self._task(i, self.build_model(None, world, self.decoder.names[i]))
        task.preview = self._previews(task, shown, self._scales(i))
        return Trainee(task, self.optims[i], self.training.precision, world, task.stage.name)

    def _task(self, i: int, model: nn.Module) -> DecodingTask:
        task = DecodingTask(cast(DecoderUnet, model), self.decoder.stage(i))
        if clip := self._opened.materials.clip:
            task.add_companion(CLIP, clip)
        return task

    def _scales(self, i: int) -> tuple[float, ...]:
        """The guidance scales of U-Net ``i``, to be compared."""
        return self.train.scales(i, len(self.decoder), self.decoder.stage(i).droppable)

    def metrics(self, world: World) -> GeneratedMetrics | None:
        """The metrics of as many images as there are; None without any. InputError for what they lack."""
        data = self._opened.val
        if not self.evaluate.given or data is None:
            return None
        count = min(self.evaluate.n_evaluation_samples, data.samples)
        wrong = self.evaluate.shortages(count, "the split val has")
        InputError.check(fault.below(("evaluate",)) for fault in wrong)
        config = replace(self.evaluate, n_evaluation_samples=count)
        clip = metrics_clip(self._opened.materials, world) if config.needs_clip else None
        return GeneratedMetrics(config, world, clip)

    def measure(self, trainees: Sequence[Trainee], world: World) -> Callable[[], dict[str, float]] | None:
        data, metrics = self._opened.val, self.metrics(world)
        if data is None or metrics is None:
            return None
        trained = {trainee.name: trainee.task for trainee in trainees}
        tasks = {}
        for i, name in enumerate(self.decoder.names):
            if name in trained:
                tasks[i] = cast(DecodingTask, trained[name])
            elif name in self._opened.frozen:
                tasks[i] = self._task(i, self._opened.frozen[name])
        samplers = {
            label: DecoderSampler(tasks, self.trained[-1], scales)
            for label, scales in compared([self._scales(i) for i in range(len(self.decoder))]).items()
        }
        return DecoderMetrics(metrics, samplers, data, self.training.microbatch or self.data.batch_size, world)

    def _previews(self, task: DecodingTask, shown: Loader, scales: tuple[float, ...]) -> Previews | None:
        """A grid of pictures from fixed conditions beside the originals; None with n_sample_images 0."""
        count, stage = min(self.train.n_sample_images, shown.samples), task.stage
        if not count:
            return None
        batch = shown.batch_at(range(count))
        cond, low_res = task.given_conditions(batch, Draw(EVALUATION_SEED, batch.index, batch.images.device))
        signal, size = PixelSignal(self.decoder.channels), (stage.image_size, stage.image_size)
        upsampled = None if low_res is None else signal.to_pixels(F.interpolate(low_res, size))
        config = PreviewConfig(self.sample_interval, count, stage.sampler, stage.guidance)
        originals = signal.to_pixels(area_resize(batch.images, size))
        batch_size = self.training.microbatch or self.data.batch_size
        given = config, stage.diffusion, signal, cond.to("cpu"), [""] * count, size, batch_size
        return Previews(*given, inputs=upsampled, originals=originals, scales=scales)
