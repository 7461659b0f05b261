"""A folder of rendered shards and the record of its settings, so that no folder ever holds two worlds."""

from __future__ import annotations

import json
from typing import TypeVar

from .. import storage
from ..config import MAX_TEXT, from_dict, load_mapping, to_dict
from ..errors import InputError

Config = TypeVar("Config")


def claim_folder(config: object, out_dir: str, record: str, world: str) -> None:
    """Record the settings in a new folder as the file ``record``, or check them against that of an earlier call.

    world: what the folder holds, with its article, for messages.

    Raises InputError for a folder that contains other files, or the same kind of world with different settings.
    """
    path = storage.join(out_dir, record)
    storage.make_dirs(out_dir)
    if storage.exists(path):
        if read_claim(type(config), out_dir, record, world) != config:
            raise InputError(f"{out_dir} contains {world} with different settings; choose another --out_dir")
    elif storage.list_files(out_dir, recursive=True):
        raise InputError(f"{out_dir} is not empty and contains no {world.split(' ', 1)[1]}; choose another --out_dir")
    else:
        storage.write_bytes(path, json.dumps(to_dict(config), indent=1).encode())


def read_claim(config: type[Config], out_dir: str, record: str, world: str) -> Config:
    """The settings of a folder claimed so. InputError for any other folder."""
    path = storage.join(out_dir, record)
    if not storage.exists(path):
        raise InputError(f"{out_dir or 'the empty path'} is not {world}: {record} is missing")
    return from_dict(config, load_mapping(storage.read_text(path, MAX_TEXT), path))
