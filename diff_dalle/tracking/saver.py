"""Keeping checkpoints and models elsewhere: the latest, the best, and the configuration.

To add a place: a ``Store``, and an entry in ``STORES``.
"""

from __future__ import annotations

import hashlib
import os
import re
import string
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from .. import storage
from ..config import Fault, InputError, faults_of, named, nearest, option, redact, settings
from .stores import Hub, LocalStore, Store, Uploads, Write, check_repo
from .tracker import Run, Saved, Tracker
from .wandb import WandbFiles, WandbTracker, put_into_run

EXAMPLES: dict[str, Any] = {"epoch": 1, "step": 1, "sample": 1, "samples_seen": 1, "unet": "0", "val_loss": 0.5}
_FORMAT = re.compile(r"0?[1-9]?\dd?|\.\d{1,2}f")  # {step:06d} and {val_loss:.4f}
SAVE_TYPES = ("checkpoint", "model")
Keys = Mapping[str, Mapping[str, bool]]  # by kind: its settings beside those that all kinds have; True = required
KEYS = {
    "local": {},
    "huggingface": {"huggingface_repo": True, "token_path": False},
    "wandb": {"wandb_run_path": False},
}
_PATHS = ("save_latest_to", "save_best_to", "save_meta_to")
_DEAD = "has no effect: set {} to a path"


@settings
class SaverConfig:
    """Saver"""

    refused: ClassVar[dict[str, str]] = {
        "save_all": _DEAD.format("save_latest_to"),
        "save_latest": _DEAD.format("save_latest_to"),
        "save_best": _DEAD.format("save_best_to"),
    }
    idle: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("save_all", "save_latest", "save_best"), (False, None)),
        **dict.fromkeys(_PATHS, (False,)),
    }

    save_to: str = option("local", "where to save", choices=KEYS, free=True, required=True)
    save_latest_to: str | None = option(
        None,
        "path of the latest save, with the placeholders {epoch}, {step}, {sample} (of the epoch), {samples_seen}, "
        "{unet} (the numbers of the trained U-Nets) and {val_loss}; local: relative to the working directory",
        free=True,
    )
    save_best_to: str | None = option(
        None, "path of the save with the lowest held-out loss so far, with the same placeholders", free=True
    )
    save_meta_to: str | None = option(None, "folder for the files that configure the run", free=True)
    save_type: str = option(
        "checkpoint",
        "checkpoint = a whole run, to be resumed; model = networks to sample with, with EMA weights if there are any",
        choices=SAVE_TYPES,
        free=True,
    )
    huggingface_repo: str | None = option(None, "repository to save to, made (private) if missing", free=True)
    token_path: str | None = option(None, "file with a token of the hub; none = the login", free=True)
    wandb_run_path: str | None = option(
        None,
        "wandb run to save to, as entity/project/id; none = the run that is logged",
        free=True,
    )

    @property
    def paths(self) -> dict[str, str]:
        """The paths that are set, by setting."""
        return {name: path for name in _PATHS if (path := getattr(self, name)) is not None}

    @property
    def place(self) -> tuple[str, ...]:
        """What decides where files go."""
        return self.save_to, self.huggingface_repo or "", self.token_path or "", self.wandb_run_path or ""

    def faults(self) -> Iterator[Fault]:
        yield from wrong_keys(self, "save_to", KEYS)
        latest, best, meta = map(named, _PATHS)
        if not self.paths:
            yield Fault("save_to", f"needs {latest}, {best} or {meta}: set what is to be saved where")
        if self.save_latest_to is not None and self.save_latest_to == self.save_best_to:
            yield Fault.of(self, "save_best_to", f"{latest} is the same: each save needs its own path")
        if (repo := self.huggingface_repo) is not None:
            yield from faults_of(lambda: check_repo(repo))
        if (run := self.wandb_run_path) is not None:
            yield from faults_of(lambda: check_run_path(run))
        yield from faults_of(self._check_paths)

    def _check_paths(self) -> None:
        for name, path in self.paths.items():
            if name != "save_meta_to":
                check_name(path, name, self.save_to != "local")
            elif self.save_to != "local":
                check_relative(path.removesuffix("/"), name)


# ---------------------------------------------------------------------------------------------------------------- names


def check_name(name: str, setting: str, relative: bool) -> None:
    """InputError unless ``fill_name`` can fill every placeholder of a file's name.

    setting:  what to call it in messages.
    relative: whether it must stay inside a folder, as names in a repository do.
    """
    filled = fill_name(name, EXAMPLES, setting)
    if not filled.strip() or filled.endswith(("/", "\\")) or not filled.isprintable():
        raise InputError(Fault(setting, "must be the path of a file", name))
    if relative:
        check_relative(name, setting)


def check_relative(path: str, setting: str) -> None:
    """InputError unless a path stays inside the folder that it is relative to."""
    if not storage.stays_inside(path):
        raise InputError(Fault(setting, "must be relative, in the form folder/name", path))


def fill_name(name: str, values: Mapping[str, Any], setting: str = "the name") -> str:
    """``name`` with the values of its placeholders; {{ and }} stand for braces. No other part of the syntax of
    str.format is accepted: it would read attributes of the values."""
    text = ""
    try:
        parts = list(string.Formatter().parse(name))
    except ValueError as error:
        raise InputError(Fault(setting, f"has a placeholder that does not end: {error}", name)) from None
    for literal, field, form, conversion in parts:
        text += literal
        if field is None:
            continue
        if field not in EXAMPLES:
            known = ", ".join(f"{{{each}}}" for each in EXAMPLES)
            hint = nearest(field, EXAMPLES)
            raise InputError(Fault(setting, f"has {{{field[:40]}}}, but the placeholders are {known}{hint}"))
        if conversion:
            raise InputError(Fault(setting, f"has {{{field}!{conversion}}}: leave !{conversion} out"))
        value = values[field]
        if form and value is not None and not _fits(form, value):
            example = "{val_loss:.4f}" if type(value) is float else "{step:06d}"
            rule = f"has {{{field}:{form}}}, but a format must be like that of {example}"
            raise InputError(Fault(setting, rule))
        text += _shown(value, form or "")
    return text


def _fits(form: str, value: Any) -> bool:
    return bool(_FORMAT.fullmatch(form)) and type(value) is (float if form.startswith(".") else int)


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "none"
    return format(value, form or (".4g" if isinstance(value, float) else ""))


def wrong_keys(config: object, setting: str, table: Keys) -> Iterator[Fault]:
    """The settings that the kind in ``setting`` lacks, and those of other kinds."""
    kind = getattr(config, setting)
    own = table.get(kind, {})
    for name in dict.fromkeys(name for names in table.values() for name in names):
        given = getattr(config, name) not in (None, "")
        if own.get(name) and not given:
            yield Fault(name, f"is missing, but {named(setting)} {kind} needs it")
        elif given and name not in own:
            owners = " or ".join(each for each, names in table.items() if name in names)
            yield Fault(name, f"has no effect with {named(setting)} {kind or 'null'}: it is for {owners}")


def check_run_path(path: str) -> None:
    """InputError unless ``path`` can name a run of wandb."""
    parts = path.split("/")
    if len(parts) != 3 or not all(parts):
        raise InputError(Fault("wandb_run_path", "must have the form entity/project/id", path))


# --------------------------------------------------------------------------------------------------------------- stores


def _local(config: SaverConfig, run: Run, trackers: Mapping[str, Tracker]) -> Store:
    return LocalStore()


def _huggingface(config: SaverConfig, run: Run, trackers: Mapping[str, Tracker]) -> Store:
    repo = config.huggingface_repo or ""
    hub = Hub(repo, config.token_path)
    return Uploads(_folder(run, "huggingface", repo), hub.put, f"the repository {repo} of {hub.server}", hub.server)


def _wandb(config: SaverConfig, run: Run, trackers: Mapping[str, Tracker]) -> Store:
    path = config.wandb_run_path
    if path is not None:
        return Uploads(_folder(run, "wandb", path), put_into_run(path), f"the wandb run {path}")
    logged = trackers.get("wandb")
    if not isinstance(logged, WandbTracker):
        rule = f"wandb has no run: log to wandb too, or name a run by {named('wandb_run_path')}"
        raise InputError(Fault("save_to", rule))
    return WandbFiles(logged, _folder(run, "wandb", "current"))


STORES: dict[str, Callable[[SaverConfig, Run, Mapping[str, Tracker]], Store]] = {
    "local": _local,
    "huggingface": _huggingface,
    "wandb": _wandb,
}


def _folder(run: Run, kind: str, name: str) -> str:
    """A local folder for files on their way to a service; of a remote log directory, one that lasts a session."""
    if storage.is_remote(run.logdir):
        return tempfile.mkdtemp(prefix="diff_dalle-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return os.path.join(storage.local_path(run.logdir), "uploads", f"{kind}-{digest}")


# ---------------------------------------------------------------------------------------------------------------- saver


class Saver(Tracker):
    """Keeps what several `SaverConfig` of one store name. Failures of a service are noted and never raised, those of
    the local disk are.

    note: reports to the other trackers.
    """

    def __init__(self, configs: Sequence[SaverConfig], run: Run, store: Store, note: Callable[[str], object]):
        self.configs, self.run, self.store, self.report = configs, run, store, note
        for config in configs:
            if config.save_meta_to is not None:
                for name, text in run.meta.items():
                    self._add(f"{config.save_meta_to.rstrip('/')}/{name}", _writer(redact(text)))

    def saved(self, saved: Saved) -> None:
        numbers = [name.removeprefix("unet") or "0" for name in saved.trainees]
        values = {
            "epoch": saved.samples // self.run.epoch_samples,
            "step": saved.step,
            "sample": saved.samples % self.run.epoch_samples,
            "samples_seen": saved.samples,
            "unet": "-".join(numbers),
            "val_loss": saved.loss,
        }
        for config in self.configs:
            for path in (config.save_latest_to, config.save_best_to if saved.best else None):
                if path is not None:
                    self._add(fill_name(path, values), saved.forms[config.save_type])

    def _add(self, name: str, write: Write) -> None:
        try:
            self.store.add(name, write)
        except Exception as error:  # no error of a service's client may end a run of weeks
            if not self.store.remote:
                raise
            self.report(f"{name} was not saved to {self.store.place}: {type(error).__name__}: {error}")

    def progress(self, step: int) -> None:
        for text in self.store.collect():
            self.report(text)

    def hurry(self) -> None:
        self.store.hurry()

    def finish(self) -> None:
        self.store.finish(self.report)


def _writer(text: str) -> Write:
    return lambda file: file.write(text.encode())


def create_savers(
    configs: Sequence[SaverConfig], run: Run, trackers: Mapping[str, Tracker], note: Callable[[str], object]
) -> dict[str, Saver]:
    """The savers of a run by name, one for each store. trackers: the others, by name."""
    groups: dict[tuple, list[SaverConfig]] = {}
    for config in configs:
        groups.setdefault(config.place, []).append(config)
    return {
        "saver " + " ".join(filter(None, place)): Saver(group, run, STORES[place[0]](group[0], run, trackers), note)
        for place, group in groups.items()
    }


def check_savers(configs: Sequence[SaverConfig], setting: str) -> Iterator[Fault]:
    """What is wrong with several savers together. setting: the list of them."""
    taken: set[tuple] = set()
    for i, config in enumerate(configs):
        for name, path in config.paths.items():
            if name != "save_meta_to" and (*config.place, path) in taken:
                rule = "another saver with the same place has it too: each save needs its own path"
                yield Fault(f"{setting}[{i}].{name}", rule, path)
            taken.add((*config.place, path))
