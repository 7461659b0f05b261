"""Settings in messages of the rooms below, in the words of a command that a file sets."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ..config import Fault, InputError, Spelling, as_flag, leaves


def spelling_of(config_class) -> Spelling:
    """What users of a command call a setting: its flag; of a command that a file sets, its key at the root, its path,
    or what ``renamed`` of the class says, a mapping of flags that only other commands have."""
    renamed = getattr(config_class, "renamed", None)
    if renamed is None:
        return as_flag
    found = list(leaves(config_class))
    counts = Counter(leaf.path[-1] for leaf in found)
    names = {leaf.path[-1]: ".".join(leaf.path) for leaf in found if leaf.in_file and counts[leaf.path[-1]] == 1}
    names |= {leaf.path[0]: leaf.path[0] for leaf in found if len(leaf.path) == 1} | dict(renamed)
    return lambda setting: names.get(setting, setting)


@contextlib.contextmanager
def spelled_as_in_file(config_class) -> Iterator[None]:
    """InputErrors of the block name settings as the file of this command does, if it is set by one."""
    try:
        yield
    except InputError as error:
        if not hasattr(config_class, "renamed"):
            raise
        sentences = (fault.sentence(spelling_of(config_class)) for fault in error.faults)
        error.faults = tuple(Fault("", sentence) for sentence in sentences)
        raise
