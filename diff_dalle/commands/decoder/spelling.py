"""Messages of the rooms below, which name settings by flags, in the words of a file that has none of these flags."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from ...config import leaves
from ...errors import InputError

# Settings that a decoder's file calls otherwise.
RENAMED = {
    "data_dir": "data.webdataset_base_url",
    "val_data_dir": "data.webdataset_base_url",
    "logdir": "tracker.data_path",
    "trackers": "tracker.log",
    "iterations": "train.epochs",
    "microbatch": "train.max_batch_size",
}


def file_names(config_class) -> dict[str, str]:
    """The path of every setting that is in the file alone, by its last key; keys must differ."""
    found = list(leaves(config_class))
    flags = {leaf.path[-1] for leaf in found if leaf.has_flag}
    own = {leaf.path[-1]: ".".join(leaf.path) for leaf in found if leaf.in_file and leaf.path[-1] not in flags}
    return RENAMED | own


def respelled(text: str, names: Mapping[str, str]) -> str:
    """A message with ``--name`` as the path in the file."""
    return re.sub(r"--(\w+)\b", lambda found: names.get(found[1], found[0]), text)


@contextlib.contextmanager
def spelled_as_in_file(config_class) -> Iterator[None]:
    """InputErrors of the block name settings as the file of this command does."""
    try:
        yield
    except InputError as error:
        error.args = (respelled(str(error), file_names(config_class)),)
        raise
