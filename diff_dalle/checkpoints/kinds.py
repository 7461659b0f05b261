"""The kinds of networks: one line each. Nothing here imports torch, so that commands can ask for names quickly."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..config import lookup

if TYPE_CHECKING:
    from .kind import NetworkKind

PACKAGE = "diff_dalle"
LORA_ENDING = "_lora"  # of the kinds of runs that train one
_GENERATOR, _CLASSIFIER, _DECODER = (f"scripts/train_{name}.py" for name in ("generator", "classifier", "decoder"))
_CASCADE, _CONTROLNET, _LORA = (f"scripts/train_{name}.py" for name in ("cascade", "controlnet", "lora"))


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    script:    the command, its path in the checkout.
    config:    the settings, MODULE.CLASS of the room ``recipes``, which is imported when it is needed.
    over_base: it trains an adapter, whose network is known only with the checkpoint of its base.
    """

    script: str
    config: str
    over_base: bool = False

    @property
    def config_class(self) -> Any:
        return _imported(f"recipes.{self.config}")


@dataclass(frozen=True)
class Entry:
    """network: its ``NetworkKind``, MODULE.CLASS of this room. training: None = it comes from other projects only.
    lora: how a LoRA for it is trained."""

    network: str
    training: Training | None = None
    lora: Training | None = None


def _lora(config: str, script: str = _LORA) -> Training:
    return Training(script, f"lora.{config}", over_base=True)


# The first is what ``info.py`` describes when nothing says the kind.
KINDS = {
    "generator": Entry(
        "pixels.GeneratorSettings", Training(_GENERATOR, "generator.GeneratorRun"), _lora("GeneratorLora")
    ),
    "classifier": Entry(
        "pixels.ClassifierSettings", Training(_CLASSIFIER, "classifier.ClassifierRun"), _lora("ClassifierLora")
    ),
    "noisy_classifier": Entry("pixels.NoisyClassifierSettings"),
    "vit_clip": Entry("pixels.VitClipSettings"),
    "decoder": Entry("pixels.DecoderSettings", Training(_DECODER, "decoder.DecoderRun"), _lora("DecoderLora")),
    "stage_a": Entry("cascade.StageASettings", Training(_CASCADE, "cascade.autoencoders.StageARun")),
    "semantic": Entry("cascade.SemanticSettings", Training(_CASCADE, "cascade.autoencoders.SemanticRun")),
    "stage_b": Entry(
        "cascade.StageBSettings", Training(_CASCADE, "cascade.stages.StageBRun"), _lora("StageBLora", _CASCADE)
    ),
    "stage_c": Entry(
        "cascade.StageCSettings", Training(_CASCADE, "cascade.stages.StageCRun"), _lora("StageCLora", _CASCADE)
    ),
    "controlnet": Entry(
        "controlnets.ControlNetSettings", Training(_CONTROLNET, "control.ControlNetRun", over_base=True)
    ),
    "stage_c_controlnet": Entry(
        "controlnets.StageCControlNetSettings",
        Training(_CASCADE, "cascade.controlnet.StageCControlNetRun", over_base=True),
    ),
}

# The training commands, by what they train: kinds of networks, then LoRAs for them.
TRAINING_COMMANDS: dict[str, Training] = {
    **{kind: entry.training for kind, entry in KINDS.items() if entry.training},
    **{kind + LORA_ENDING: entry.lora for kind, entry in KINDS.items() if entry.lora},
}


def find_kind(name: str) -> type[NetworkKind]:
    """The class of a kind; InputError for a name that is not there."""
    return _imported(f"checkpoints.{lookup(KINDS, name, 'kind').network}")


def _imported(place: str) -> Any:
    """What is at MODULE.NAME of the package."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)
