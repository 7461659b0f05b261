"""What the settings of loaders and savers have in common: a kind, and the keys of that kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..errors import InputError

Keys = Mapping[str, Mapping[str, bool]]  # by kind: its settings beside those that all kinds have; True = required


def wrong_keys(config: object, setting: str, table: Keys) -> Iterator[str]:
    """Sentences about settings that the kind in ``setting`` lacks, and about those of other kinds."""
    kind = getattr(config, setting)
    own = table.get(kind, {})
    for name in dict.fromkeys(name for names in table.values() for name in names):
        given = getattr(config, name) not in (None, "")
        if own.get(name) and not given:
            yield f"{name} is missing, but {setting} {kind} needs it"
        elif given and name not in own:
            owners = " or ".join(each for each, names in table.items() if name in names)
            yield f"{name} has no effect with {setting} {kind or 'null'}: it is for {owners}"


def told(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """The sentence with which a check fails, if it does."""
    try:
        check(*arguments)
    except InputError as error:
        yield str(error)


def check_run_path(path: str) -> None:
    """InputError unless ``path`` can name a run of wandb."""
    parts = path.split("/")
    if len(parts) != 3 or not all(parts):
        raise InputError(f"wandb_run_path is {path!r}, but must have the form entity/project/id")
