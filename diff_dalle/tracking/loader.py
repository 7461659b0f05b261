"""Fetching what a run starts from: a checkpoint or a model that a saver has kept, or any other."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator

from .. import storage
from ..config import Fault, InputError, faults_of, named, option, settings
from .saver import check_relative, check_run_path, wrong_keys
from .wandb import download_from_run

# What each kind has beside what all have; True = required.
KEYS = {
    "local": {"file_path": True},
    "url": {"url": True},
    "wandb": {"wandb_file_path": True, "wandb_run_path": False},
}
MAX_BYTES = 2**38  # 256 GiB: an endless reply must end
CHUNK = 2**20


@settings
class LoaderConfig:
    """What a new log directory starts from"""

    load_from: str | None = option(None, "where to load from; none = nothing", choices=KEYS, free=True)
    only_auto_resume: bool = option(False, "load only when resuming an earlier session's run", free=True)
    file_path: str | None = option(None, "path of the file", free=True)
    url: str | None = option(None, "URL of the file: http(s)://, file:, s3://, …", free=True)
    wandb_run_path: str | None = option(
        None, "wandb run, as entity/project/id; none = the run that is resumed", free=True
    )
    wandb_file_path: str | None = option(None, "path of the file in that run", free=True)

    def faults(self) -> Iterator[Fault]:
        yield from wrong_keys(self, "load_from", KEYS)
        if self.url is not None and storage.scheme(self.url) == "pipe":
            yield Fault("url", "is a command, but must be the address of a file")
        if (run := self.wandb_run_path) is not None:
            yield from faults_of(lambda: check_run_path(run))
        if (file := self.wandb_file_path) is not None:
            yield from faults_of(lambda: check_relative(file, "wandb_file_path"))


def source_path(config: LoaderConfig, folder: str) -> str:
    """Where ``fetch_source`` puts the file; of a local one, where it is."""
    if config.load_from == "local":
        return config.file_path or ""
    if config.load_from == "url":
        url = config.url or ""
        if not storage.is_remote(url):
            return storage.local_path(url)
        name = re.sub(r"[^\w.+-]", "_", storage.split(url)[1])
        return storage.join(folder, name if name.strip("._") else "downloaded.pth")
    return storage.join(folder, config.wandb_file_path or "")


def fetch_source(config: LoaderConfig, folder: str, resumed: str = "") -> str:
    """The path of the file, which is downloaded into ``folder`` where necessary.

    resumed: the wandb run that is continued, as entity/project/id; "" = none.

    Raises InputError when it is missing, or larger than MAX_BYTES.
    """
    path = source_path(config, folder)
    if config.load_from == "wandb":
        run = config.wandb_run_path or resumed
        if not run:
            rule = f"wandb has no run: no run is resumed, so name one by {named('wandb_run_path')}"
            raise InputError(Fault("load_from", rule))
        _download_from_wandb(run, config.wandb_file_path or "", path)
    elif config.load_from == "url" and storage.is_remote(config.url or ""):
        _download(config.url or "", path)
    elif not storage.exists(path):
        raise InputError(
            f"{path} does not exist, but {named('load_from')} {config.load_from} names it: correct it, or leave it out"
        )
    return path


def _download(url: str, path: str) -> None:
    """All of a remote file, or an InputError and nothing."""
    storage.make_dirs(storage.split(path)[0])
    size, done = storage.size_and_tag(url)[0], 0
    if size > MAX_BYTES:
        raise InputError(f"{url} has {size:,} bytes, more than {MAX_BYTES:,}")
    with storage.open_read(url) as source, storage.atomic_writer(path) as file:
        for chunk in storage.chunks(source, url):
            done += len(chunk)
            if done > MAX_BYTES:
                raise InputError(f"{url} has more than {MAX_BYTES:,} bytes")
            file.write(chunk)
        if 0 <= size != done:
            raise InputError(f"the download of {url} ended after {done:,} of {size:,} bytes")


def _download_from_wandb(run: str, name: str, path: str) -> None:
    """Through a temporary folder, so that ``path`` appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix="diff_dalle-") as temporary:
        download_from_run(run, name, temporary)
        storage.make_dirs(storage.split(path)[0])
        with open(os.path.join(temporary, name), "rb") as source, storage.atomic_writer(path) as file:
            shutil.copyfileobj(source, file, CHUNK)
