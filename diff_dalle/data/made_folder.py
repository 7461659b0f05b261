"""A folder of rendered shards and the record of its settings, so that no folder ever holds two worlds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from .. import storage
from ..config import MAX_TEXT, from_dict, load_mapping, to_dict
from ..errors import InputError

Config = TypeVar("Config")
MADE_WITH = "made_with"  # the key, beside the settings, of what is not set but decides as well


def claim_folder(
    config: object, out_dir: str, record: str, world: str, made_with: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Record the settings in a new folder as the file ``record``, or check them against that of an earlier call.

    world:     what the folder holds, with its article, for messages.
    made_with: what else decides about the content, such as the version of a package, by its name; unknown of folders
               of earlier versions.

    Raises InputError for a folder that contains other files, or the same kind of world with different settings or made
    with something else.
    """
    path = storage.join(out_dir, record)
    storage.make_dirs(out_dir)
    if storage.exists(path):
        if read_claim(type(config), out_dir, record, world) != config:
            raise InputError(f"{out_dir} contains {world} with different settings; choose another --out_dir")
        earlier = _read(path).get(MADE_WITH)
        for name, value in made_with.items():
            if isinstance(earlier, dict) and (known := earlier.get(name, value)) != value:
                raise InputError(
                    f"{out_dir} contains {world} that was made with {name} {known}, which is {value} now: go on with "
                    "that, or choose another --out_dir"
                )
    elif storage.list_files(out_dir, recursive=True):
        raise InputError(f"{out_dir} is not empty and contains no {world.split(' ', 1)[1]}; choose another --out_dir")
    else:
        tree = to_dict(config) | ({MADE_WITH: dict(made_with)} if made_with else {})
        storage.write_bytes(path, json.dumps(tree, indent=1).encode())


def read_claim(config: type[Config], out_dir: str, record: str, world: str) -> Config:
    """The settings of a folder claimed so. InputError for any other folder."""
    path = storage.join(out_dir, record)
    if not storage.exists(path):
        raise InputError(f"{out_dir or 'the empty path'} is not {world}: {record} is missing")
    return from_dict(config, {name: value for name, value in _read(path).items() if name != MADE_WITH})


def _read(path: str) -> dict[str, Any]:
    return dict(load_mapping(storage.read_text(path, MAX_TEXT), path))
