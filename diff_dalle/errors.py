"""Errors that a user can fix: one sentence naming the value, the rule, and the flag or field to change."""


class InputError(ValueError):
    """Bad input of any kind: a flag, a file, a dataset, a log directory.

    Scripts print its message as one line and exit with status 2; library users catch it as a ValueError.
    """


def quantity(count: int, noun: str) -> str:
    """``quantity(1, "file") == "1 file"``, ``quantity(2, "process") == "2 processes"``."""
    plural = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else plural)
