"""The command line of ``train_cascade.py``: a file as its argument, and the kind that the file is about."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ...checkpoints.lora_file import ENDING
from ...errors import InputError
from ..command_line import parse_kind
from ..sources import sources_on
from ..training_commands import TRAINING_COMMANDS
from .run import CascadeRun
from .sections import LORA_KEYS
from .stages import STAGE_B_SIZES, STAGE_C_SIZES

KINDS = ("stage_a", "semantic", "stage_b", "stage_c", "stage_c_controlnet", "stage_b_lora", "stage_c_lora")


def parse_cascade(argv: Sequence[str] | None = None, description: str = "") -> CascadeRun:
    """The command line ``CONFIG.yaml [flags]``, or with ``--config`` or ``--preset``, as the run of a kind.

    Raises InputError as ``parse_kind``, and when nothing says the kind.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):
        argv[:1] = ["--config", argv[0]]
    classes = {kind: TRAINING_COMMANDS[kind].config_class for kind in KINDS}
    if not {"--help", "-h"} & {*argv} and not any(word.partition("=")[0] == "--kind" for word in argv):
        argv += ["--kind", _kind_of(argv)]
    return parse_kind(classes, argv, description)


def _kind_of(argv: Sequence[str]) -> str:
    """The kind of the preset and file on a command line. InputError when they do not say it."""
    sources = sources_on(argv)
    if not sources:
        raise InputError("no settings are given: name a file, as in train_cascade.py CONFIG.yaml, or a --preset")
    found = [source.kind or inferred_kind(source.settings) for source in sources]
    if kind := next(filter(None, found), None):
        return kind
    names = ", ".join(source.name for source in sources)
    raise InputError(f"{names} does not say what is trained: add the line kind: with one of {', '.join(KINDS)}")


def inferred_kind(settings: Mapping) -> str | None:
    """The kind of a file that does not say it, from what only one kind has; None if that leaves it open."""
    stage = _inferred_stage(settings)
    return stage + ENDING if stage in ("stage_b", "stage_c") and not LORA_KEYS.isdisjoint(settings) else stage


def _inferred_stage(settings: Mapping) -> str | None:
    version = str(settings.get("model_version", ""))
    if any(str(key).startswith("controlnet_") for key in settings):
        return "stage_c_controlnet"
    if "stage_a_checkpoint_path" in settings:
        return "stage_b"
    if "previewer_checkpoint_path" in settings:
        return "stage_c"
    sizes = {"stage_b": STAGE_B_SIZES.keys(), "stage_c": STAGE_C_SIZES.keys()}
    fitting = [kind for kind, names in sizes.items() if version in names]
    return fitting[0] if len(fitting) == 1 else None
