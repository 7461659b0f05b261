"""The ``tracker`` section of a decoder's file: where a run logs, starts from, and saves to."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Fault, named, option, settings
from ...tracking.loader import LoaderConfig
from ...tracking.saver import SaverConfig, check_savers, wrong_keys

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
