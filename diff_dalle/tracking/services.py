"""What the settings of loaders and savers have in common: a kind, and the keys of that kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import Fault, InputError, named

Keys = Mapping[str, Mapping[str, bool]]  # by kind: its settings beside those that all kinds have; True = required


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
