"""A rendered world as a folder: shards of its splits, and the record of its settings, so that no folder ever holds two
worlds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from .. import storage
from ..config import MAX_TEXT, from_dict, load_mapping, to_dict
from ..errors import InputError, named
from .tar import write_tar

Config = TypeVar("Config")
Sample = TypeVar("Sample")
MADE_WITH = "made_with"  # the key, beside the settings, of what is not set but decides as well


@dataclass(frozen=True)
class MadeFolder(Generic[Config]):
    """Folders of one kind of world.

    name:   of the world, which begins the names of its files, such as "shapes".
    title:  with its article, for messages: "a shapes world".
    config: the class of its settings.
    """

    name: str
    title: str
    config: type[Config]

    @property
    def record(self) -> str:
        """The file with the settings."""
        return f"{self.name}.json"

    def claim(self, config: Config, out_dir: str, made_with: Mapping[str, str] = MappingProxyType({})) -> None:
        """Record the settings in a new folder, or check them against those of an earlier call.

        made_with: what else decides about the content, such as the version of a package, by its name; unknown of
                   folders of earlier versions.

        Raises InputError for a folder that contains other files, or the same kind of world with different settings or
        made with something else.
        """
        path, choose = storage.join(out_dir, self.record), f"choose another {named('out_dir')}"
        storage.make_dirs(out_dir)
        if storage.exists(path):
            if self.read(out_dir) != config:
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
            tree = to_dict(config) | ({MADE_WITH: dict(made_with)} if made_with else {})
            storage.write_bytes(path, json.dumps(tree, indent=1).encode())

    def read(self, out_dir: str) -> Config:
        """The settings of a folder that was claimed. InputError for any other folder."""
        path = storage.join(out_dir, self.record)
        if not storage.exists(path):
            raise InputError(f"{out_dir or 'the empty path'} is not {self.title}: {self.record} is missing")
        return from_dict(self.config, {name: value for name, value in _read(path).items() if name != MADE_WITH})

    def write_split(
        self,
        out_dir: str,
        split: str,
        samples: Sequence[Sample],
        per_shard: int,
        files: Callable[[Sequence[Sample]], Iterable[tuple[str, dict[str, bytes]]]],
    ) -> dict[str, int]:
        """Write the shards of a split. Complete ones of an earlier call are kept.

        files: of samples, in order: the key of each, and its members by extension.

        Returns the numbers of ``shards``, ``samples`` and ``bytes``.
        """
        folder, sizes = storage.join(out_dir, split), []
        storage.make_dirs(folder)
        with tqdm(total=len(samples), desc=f"writing {split}", unit="image", disable=None) as bar:

            def counted(part: Sequence[Sample]) -> Iterable[tuple[str, dict[str, bytes]]]:
                for each in files(part):
                    yield each
                    bar.update()

            for number, start in enumerate(range(0, len(samples), per_shard)):
                part = samples[start : start + per_shard]
                path = storage.join(folder, f"{self.name}-{split}-{number:05d}.tar")
                if not storage.exists(path):
                    write_tar(path, counted(part))
                bar.update(start + len(part) - bar.n)
                sizes.append(storage.size_and_tag(path)[0])
        return {"shards": len(sizes), "samples": len(samples), "bytes": sum(sizes)}


def _read(path: str) -> dict[str, Any]:
    return dict(load_mapping(storage.read_text(path, MAX_TEXT), path))
