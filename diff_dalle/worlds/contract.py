"""What a world is: pictures whose content is known exactly, because they are rendered, with captions of it.

To add one: a ``RenderedWorld`` in a folder of this room, or in a module of one's own, registered in ``WORLDS``, and an
evaluator that scores samples of what it holds out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from PIL import Image
from tqdm import tqdm

from .. import storage
from ..config import MAX_TEXT, InputError, from_dict, load_mapping, named, to_dict
from ..data.tar import write_tar
from ..images.output import png_bytes

Config = TypeVar("Config")
Item = TypeVar("Item")
Files = tuple[str, dict[str, bytes]]  # a sample's key, and its members by extension
MADE_WITH = "made_with"  # the key, beside the settings, of what is not set but decides as well
AT_ONCE = 64  # samples that a process renders before it is asked for others


class Shown(NamedTuple):
    """A sample. key: its name in shards; truth: what the picture shows, for JSON."""

    key: str
    picture: Image.Image
    caption: str
    truth: Mapping[str, Any]


class RenderedWorld(ABC, Generic[Config, Item]):
    """A world with these settings, of the dataclass ``config_class``. Commands make it of them alone.

    As a folder it is the shards of its splits (png, txt and json for each sample) and the record of its settings, so
    that no folder ever holds two worlds.

    name:        begins the names of its files, such as "shapes".
    title:       with its article, for messages: "a shapes world".
    compression: of its pictures, as png's level.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    config_class: ClassVar[type]
    compression: ClassVar[int] = 6

    def __init__(self, config: Config, samples_per_shard: int = 1024):
        self.config, self.samples_per_shard = config, samples_per_shard

    @abstractmethod
    def splits(self) -> Mapping[str, Sequence[Item]]:
        """What the samples of each split are of: the training data first, then what is held out of it."""

    @abstractmethod
    def show(self, split: str, item: Item) -> Shown:
        """Render and caption a sample."""

    def made_with(self) -> Mapping[str, str]:
        """What else decides about the content, such as the version of a package, by its name; unknown of folders of
        earlier versions."""
        return {}

    def files(self, split: str, item: Item) -> Files:
        """A sample as a shard holds it."""
        key, picture, caption, truth = self.show(split, item)
        png = png_bytes(picture, compress_level=self.compression)
        return key, {"png": png, "txt": caption.encode(), "json": json.dumps(truth, ensure_ascii=False).encode()}

    # ---------------------------------------------------------------------------------------------------------- folders

    @classmethod
    def record(cls) -> str:
        """The file with the settings."""
        return f"{cls.name}.json"

    @classmethod
    def read(cls, out_dir: str) -> Any:
        """The settings of the world in a folder. InputError for any other folder."""
        path = storage.join(out_dir, cls.record())
        if not storage.exists(path):
            raise InputError(f"{out_dir or 'the empty path'} is not {cls.title}: {cls.record()} is missing")
        return from_dict(cls.config_class, {name: value for name, value in _read(path).items() if name != MADE_WITH})

    def write(self, out_dir: str, processes: int = 1) -> dict[str, dict[str, int]]:
        """Write a folder of shards for each split, local or remote. Complete shards of an earlier call are kept.

        processes: how many render; the shards do not depend on it.
        Returns the numbers of ``shards``, ``samples`` and ``bytes`` of each split. Raises InputError for a folder that
        contains other files, or the same kind of world with different settings or made with something else.
        """
        self._claim(out_dir)
        splits = self.splits()
        with _mapping(processes) as mapped:
            return {name: self._write_split(out_dir, name, items, mapped) for name, items in splits.items()}

    def _claim(self, out_dir: str) -> None:
        """Record the settings in a new folder, or check them against those of an earlier call."""
        path, choose = storage.join(out_dir, self.record()), f"choose another {named('out_dir')}"
        storage.make_dirs(out_dir)
        made_with = self.made_with()
        if storage.exists(path):
            if self.read(out_dir) != self.config:
                raise InputError(f"{out_dir} contains {self.title} with different settings; {choose}")
            earlier = _read(path).get(MADE_WITH)
            for name, value in made_with.items():
                if isinstance(earlier, dict) and (known := earlier.get(name, value)) != value:
                    raise InputError(
                        f"{out_dir} contains {self.title} that was made with {name} {known}, which is {value} now: go "
                        f"on with that, or {choose}"
                    )
        elif storage.list_files(out_dir, recursive=True):
            raise InputError(f"{out_dir} is not empty and contains no {self.title.split(' ', 1)[1]}; {choose}")
        else:
            tree = to_dict(self.config) | ({MADE_WITH: dict(made_with)} if made_with else {})
            storage.write_bytes(path, json.dumps(tree, indent=1).encode())

    def _write_split(self, out_dir: str, split: str, items: Sequence[Item], mapped: Map) -> dict[str, int]:
        folder, sizes, per_shard = storage.join(out_dir, split), [], self.samples_per_shard
        storage.make_dirs(folder)
        with tqdm(total=len(items), desc=f"writing {split}", unit="image", disable=None) as bar:

            def counted(part: Sequence[Item]) -> Iterator[Files]:
                for each in mapped(functools.partial(self.files, split), part):
                    yield each
                    bar.update()

            for number, start in enumerate(range(0, len(items), per_shard)):
                part = items[start : start + per_shard]
                path = storage.join(folder, f"{self.name}-{split}-{number:05d}.tar")
                if not storage.exists(path):
                    write_tar(path, counted(part))
                bar.update(start + len(part) - bar.n)
                sizes.append(storage.size_and_tag(path)[0])
        return {"shards": len(sizes), "samples": len(items), "bytes": sum(sizes)}


# (function, items) → the values of the function, in order
Map = Callable[[Callable[[Any], Files], Iterable[Any]], Iterable[Files]]


@contextlib.contextmanager
def _mapping(processes: int) -> Iterator[Map]:
    """``map``, by several processes if asked for."""
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # the former starts at once
    ignore = (signal.SIGINT, signal.SIG_IGN)  # the first process ends them
    with ProcessPoolExecutor(processes, context, signal.signal, ignore) as pool:
        yield functools.partial(pool.map, chunksize=AT_ONCE)


def _read(path: str) -> dict[str, Any]:
    return dict(load_mapping(storage.read_text(path, MAX_TEXT), path))
