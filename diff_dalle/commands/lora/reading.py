"""The command line of ``train_lora.py``: the kind of network is that of the checkpoint to adapt."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from ... import storage
from ...checkpoints.checkpoint import load_file
from ...checkpoints.lora_file import ENDING
from ...errors import InputError
from ..command_line import parse_kind
from ..sources import sources_on
from ..training_commands import TRAINING_COMMANDS
from .run import LoraRun

KINDS = ("generator_lora", "classifier_lora", "decoder_lora")
_CASCADE = ("stage_b", "stage_c")
_HINTS = {
    "noisy_classifier": ": classifiers of classes come from other projects and cannot be trained here",
    **{kind: ": give the model_path of its base" for kind in KINDS},
}


def parse_lora(argv: Sequence[str] | None = None, description: str = "") -> LoraRun:
    """The command line as the run of the kind of ``--model_path``. Raises InputError as ``parse_kind``, and for a
    checkpoint that no LoRA can be trained for here."""
    argv = list(sys.argv[1:] if argv is None else argv)
    classes = {kind: TRAINING_COMMANDS[kind].config_class for kind in KINDS}
    words = [part for word in argv for part in word.split("=", 1)]
    said = [source.settings.get("model_path") for source in reversed(sources_on(argv))]
    found = [dict(itertools.pairwise(words)).get("--model_path"), *said]
    path = next((path for path in found if isinstance(path, str)), "")
    if path and storage.exists(path):  # or else the run says that it is not there
        kind = load_file(path)["kind"]
        if kind + ENDING not in classes:
            hint = ": use train_cascade.py with kind: " + kind + ENDING if kind in _CASCADE else _HINTS.get(kind, "")
            known = ", ".join(name.removesuffix(ENDING) for name in classes)
            raise InputError(f"model_path {path} holds a {kind}, but must hold one of {known}{hint}")
        if "--kind" not in words:
            argv += ["--kind", kind + ENDING]
    return parse_kind(classes, argv, description)
