"""The command lines of trainings that serve several kinds: LoRAs, ControlNets, and the networks of a latent cascade."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import storage
from ..checkpoints.checkpoint import load_file
from ..checkpoints.kinds import LORA_ENDING as ENDING
from ..checkpoints.kinds import TRAINING_COMMANDS
from ..checkpoints.model_folder import find_file
from ..config import InputError
from ..models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES
from ..recipes.cascade.sections import LORA_KEYS
from .command_line import HELPS, parse_kind
from .sources import sources_on, values_on

_HINTS = {
    "vit_clip": ": GLIDE's noised CLIP comes from its files only and cannot be trained here",
    "noisy_classifier": ": classifiers of classes come from other projects and cannot be trained here",
}


def classes_of(script: str) -> dict[str, Any]:
    """The settings of what a script trains, by kind."""
    return {kind: each.config_class for kind, each in TRAINING_COMMANDS.items() if each.script == f"scripts/{script}"}


def parse_controlnet(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as the run of a kind: of a generator's ControlNet, unless a file or ``--kind`` says another."""
    classes = classes_of("train_controlnet.py")
    stage_c = "stage_c_controlnet"
    return parse_kind({**classes, stage_c: TRAINING_COMMANDS[stage_c].config_class}, argv, description)


def parse_lora(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as the run of the kind of ``--model_path``. Raises InputError as ``parse_kind``, and for a
    checkpoint that no LoRA can be trained for here."""
    argv = list(sys.argv[1:] if argv is None else argv)
    classes = classes_of("train_lora.py")
    said = [source.settings.get("model_path") for source in reversed(sources_on(argv))]
    found = [*reversed(values_on(argv, ("--model_path",))), *said]
    path = next((path for path in found if isinstance(path, str)), "")
    if path and storage.exists(find_file(path)):  # or else the run says that it is not there
        kind = load_file(path)["kind"]
        lora = kind + ENDING
        if lora not in classes:
            hint = _HINTS.get(kind, ": give the model_path of its base" if kind in classes else "")
            hint = f": use train_cascade.py with kind: {lora}" if lora in TRAINING_COMMANDS else hint
            known = ", ".join(name.removesuffix(ENDING) for name in classes)
            raise InputError(f"model_path {path} holds a {kind}, but must hold one of {known}{hint}")
        if not values_on(argv, ("--kind",)):
            argv += ["--kind", lora]
    return parse_kind(classes, argv, description)


def parse_cascade(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line ``CONFIG.yaml [flags]``, or with ``--config`` or ``--preset``, as the run of a kind.

    Raises InputError as ``parse_kind``, and when nothing says the kind.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):
        argv[:1] = ["--config", argv[0]]
    classes = classes_of("train_cascade.py")
    if not {*HELPS} & {*argv} and not values_on(argv, ("--kind",)):
        argv += ["--kind", _kind_of(argv, classes)]
    return parse_kind(classes, argv, description)


def _kind_of(argv: Sequence[str], known: Iterable[str]) -> str:
    """The kind of the preset and file on a command line. InputError when they do not say it."""
    sources = sources_on(argv)
    if not sources:
        raise InputError("no settings are given: name a file, as in train_cascade.py CONFIG.yaml, or a --preset")
    found = [source.kind or inferred_kind(source.settings) for source in sources]
    if kind := next(filter(None, found), None):
        return kind
    names = ", ".join(source.name for source in sources)
    raise InputError(f"{names} does not say what is trained: add the line kind: with one of {', '.join(known)}")


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
