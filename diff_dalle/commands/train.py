"""``diff_dalle.train``: the training commands as one call from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..checkpoints.kinds import LORA_ENDING, TRAINING_COMMANDS, find_kind
from ..checkpoints.run_folder import best_file, read_run
from ..config import Fault, InputError, lookup, nearest, to_dict
from ..distributed.launch import JobEnd
from ..recipes.train import launch_training
from ..sampling.classifier import load_classifier
from ..sampling.pipeline import load
from .settings import Settings
from .sources import Source, preset_names, read_config, read_preset
from .training_kinds import inferred_kind

Place = str | os.PathLike[str]
INTERRUPTED = 130  # the status of a job that Ctrl-C ends
_SAMPLED = ("lora", "best", "ema_", "model")  # how the names of files to sample with begin, the best first


@dataclass(frozen=True)
class TrainedRun:
    """What ``train`` returns.

    settings: all settings of the run, such as a ``GeneratorRun``. logdir: its folder.
    """

    settings: Any
    logdir: str

    def __repr__(self) -> str:
        return f"TrainedRun(logdir={self.logdir!r}, settings of {type(self.settings).__name__})"

    @property
    def checkpoints(self) -> dict[str, str]:
        """The files of the latest checkpoint by what they hold: "model", "ema_0.9999", "optimizer", with ``keep_best``
        also "best"; of several networks, "unet0/model" and so on. InputError when there is none."""
        run = read_run(self.logdir)
        if run is None or not run.checkpoints:
            raise InputError(f"{self.logdir} has no complete checkpoint: train for at least one step")
        last = run.checkpoints[-1]
        files = {key: last.folder or name for key, name in last.files.items()}
        files |= {f"{name}/best" if name else "best": best_file(name) for name in run.best}
        return {key: storage.join(self.logdir, name) for key, name in files.items()}

    @property
    def paths(self) -> list[str]:
        """The file to sample with of each network: a LoRA, or the best weights, or EMA, or weights."""
        files = self.checkpoints
        names = dict.fromkeys(key[: key.rfind("/") + 1] for key in files)
        return [
            next(files[key] for start in _SAMPLED for key in files if key.startswith(name + start)) for name in names
        ]

    def load(self, **options: Any) -> Any:
        """What was trained, ready to sample: a ``Pipeline``, with the base of a LoRA or ControlNet; a ``Classifier`` if
        that was trained. options: of ``diff_dalle.load``, such as the other networks of a cascade."""
        settings, files = self.settings, self.paths
        kind = settings.kind.removesuffix(LORA_ENDING)
        role, given = find_kind(kind).role, dict[str, Any]()
        if settings.kind.endswith(LORA_ENDING):
            given = {"lora": files}
            files = [settings.base_path]
        elif role == "controlnet":
            given = {role: files[0]}
            role, files = "model_path", [getattr(settings, "model_path", "") or settings.generator_checkpoint_path]
        elif kind == "generator" and settings.model.is_upsampler:
            return load(upsampler_paths=files, **options)
        path: Any = files if len(files) > 1 else files[0]
        if role == "classifier_path":
            return load_classifier(path, **given, **options)
        given |= {"path" if role == "model_path" else role: path}
        return load(**given, **options)


def train(
    config: Any, data: Place | Sequence[Place] | Mapping[str, Any] | None = None, kind: str = "", **settings: Any
) -> TrainedRun:
    """Train, as the training commands do: resume the run in ``logdir`` if there is one, print what is trained, log and
    save. Under ``mpiexec``, ``torchrun`` or ``srun`` the processes train together.

    config:   name of a preset (``"shapes_32"``), path of a YAML or JSON file, settings such as ``GeneratorRun()``, or a
              kind, whose defaults are taken: ``"generator"``, ``"classifier"``, ``"generator_lora"``, ``"controlnet"``.
    data:     shards: a folder, tar, glob or URL, or several; of a decoder, what ``webdataset_base_url`` says, or a
              mapping with more of the section ``data``; None = as ``config`` says.
    kind:     of a file that does not say it: ``"decoder"``.
    settings: by the names of the command's flags, ``iterations=100, lr=1e-4``, or by section, ``optim={"lr": 1e-4}``.

    Raises InputError for wrong settings, unusable data and a ``logdir`` that holds another run, before anything is
    written; KeyboardInterrupt after Ctrl-C, when the run is saved: the same call resumes it.
    """
    source = _source_of(config)
    kind = kind or source.kind or inferred_kind(source.settings) or ""
    if not kind:
        rule = f"does not say what it trains: give kind, one of {', '.join(TRAINING_COMMANDS)}"
        raise InputError(f"{source.name} {rule}")
    config_class = lookup(TRAINING_COMMANDS, kind, "kind").config_class
    found = Settings(config_class, flag=str)
    found.take(source)
    found.take(
        Source("", None, {**_data_of(config_class, data), **{name: _plain(each) for name, each in settings.items()}})
    )
    run = found.settled()
    if getattr(run, "check", False):
        raise InputError(Fault("check", "is for the command train_decoder.py: leave it out"))
    try:
        return TrainedRun(run, launch_training(run))
    except JobEnd as end:
        if end.code == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise


def _source_of(config: Any) -> Source:
    kind = getattr(type(config), "kind", None)
    if kind in TRAINING_COMMANDS:
        return Source("config", kind, to_dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise InputError(
            Fault(
                "config",
                "must be the name of a preset or kind, the path of a file, or settings such as GeneratorRun()",
                config,
            )
        )
    name = os.fspath(config)
    if name in TRAINING_COMMANDS:
        return Source(name, name, {})
    if name in preset_names():
        return read_preset(name)
    if not storage.exists(name):
        known = [*preset_names(), *TRAINING_COMMANDS]
        raise InputError(
            Fault("config", f"is {name!r}, but there is no such preset, file or kind{nearest(name, known)}")
        )
    return read_config(name)


def _data_of(config_class: Any, data: Any) -> dict[str, Any]:
    """The settings that ``data`` stands for: of the section, or of where the shards are."""
    if data is None or isinstance(data, Mapping):
        return {} if data is None else {"data": data}
    section, _, name = getattr(config_class, "renamed", {}).get("data_dir", "data_dir").rpartition(".")
    return {section: {name: _plain(data)}} if section else {name: _plain(data)}


def _plain(value: Any) -> Any:
    """A setting's value, with texts for paths."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
