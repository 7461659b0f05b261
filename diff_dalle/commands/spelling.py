"""Messages of the rooms below, which name settings by flags, in the words of a command that a file sets."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from ..config import leaves
from ..errors import InputError

# Group 1: the command line of another script, up to the end of its clause; group 2: the name of a flag.
_FLAG = re.compile(r"(\w+\.py\b[^,;]*)|--(\w+)\b")


def file_names(config_class) -> dict[str, str]:
    """What a file calls the settings that messages call ``--name``: its own keys at the root, the paths of those below
    that have no flags, and what ``renamed`` of the class says; nothing for a command that flags set.

    ``renamed`` is a class variable: flags that only other commands have, by their names, and phrases about them.
    """
    renamed = getattr(config_class, "renamed", None)
    if renamed is None:
        return {}
    found = list(leaves(config_class))
    counts = Counter(leaf.path[-1] for leaf in found)
    own = {leaf.path[-1]: ".".join(leaf.path) for leaf in found if leaf.in_file and counts[leaf.path[-1]] == 1}
    return own | {leaf.path[0]: leaf.path[0] for leaf in found if len(leaf.path) == 1} | dict(renamed)


def respelled(text: str, names: Mapping[str, str]) -> str:
    """A message with the words of the file in place of ``--name``, and of whole phrases."""
    for phrase, words in names.items():
        if " " in phrase:
            text = text.replace(phrase, words)
    return _FLAG.sub(lambda found: found[1] or names.get(found[2], found[0]), text)


@contextlib.contextmanager
def spelled_as_in_file(config_class) -> Iterator[None]:
    """InputErrors of the block name settings as the file of this command does."""
    try:
        yield
    except InputError as error:
        error.args = (respelled(str(error), file_names(config_class)),)
        raise
