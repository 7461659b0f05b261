"""The commands of ``share.py``: send a model with its card to where others read it, and fetch one.

To add one: a config class, a function of it that returns lines to print, and a line in ``COMMANDS``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import storage
from ..config import Fault, InputError, named, option, setting_changes, settings, to_dict
from .command_line import Subcommand

PLACE = "hf://USER/NAME, a repository of the Hugging Face hub, or a folder, local or remote (s3://, gs://, az://)"


@settings
class PushConfig:
    """Sending a model"""

    model_path: tuple[str, ...] = option(
        (), "checkpoint of a generator, decoder, stage C or ControlNet; or a model folder, sent unchanged"
    )
    upsampler_paths: tuple[str, ...] = option((), "checkpoints of upsamplers, in order of increasing resolution")
    classifier_path: str = option("", "checkpoint of a classifier")
    stage_b: str = option("", "checkpoint of stage B of a latent cascade")
    stage_a: str = option("", "checkpoint of stage A of a latent cascade")
    semantic: str = option("", "checkpoint of the semantic encoder of a latent cascade")
    lora: str = option("", "LoRA instead of a model, as for sample.py --lora")
    to: str = option("", f"destination: {PLACE}", needed=PLACE)
    private: bool = option(True, "a new repository on the hub is visible to its owner only")
    precision: str = option("fp16", "precision of the weights", choices=("fp16", "fp32"))
    report_dir: str = option("", "folder of evaluate.py's report, whose scores and pictures go with the model")
    title: str = option("", "title of the card; empty = the last part of to")
    description: str = option("", "text for the card: what the model is for, and what the data show")
    limits: str = option("", "text for the card: what the model cannot do")
    license: str = option("", "license of the weights as the hub names it, such as mit; empty = not recorded")
    example_prompt: str = option("a red circle", "prompt of the examples on the card")

    def faults(self) -> Iterator[Fault]:
        if not self.paths and not self.lora:
            yield Fault("model_path", "is required: there is nothing to send, give a checkpoint or a model folder")
        if self.lora and self.paths:
            yield Fault("lora", f"is sent alone: leave out {', '.join(map(named, self.paths))}, or it")
        if self.lora and self.precision != "fp16":
            yield Fault.of(self, "precision", "a LoRA is sent as it is: leave it out")
        if not self.private and storage.scheme(self.to) != "hf":
            yield Fault("private", f"is False, but only hf:// can be private, not {self.to}: leave it out")

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The checkpoints by the settings that take them."""
        found = {
            "model_path": self.model_path,
            "upsampler_paths": self.upsampler_paths,
            "classifier_path": (self.classifier_path,),
            "stage_b": (self.stage_b,),
            "stage_a": (self.stage_a,),
            "semantic": (self.semantic,),
        }
        return {name: paths for name, paths in found.items() if any(paths)}


def push(config: PushConfig) -> list[str]:
    from ..checkpoints.model_folder import open_model
    from ..sharing.card import CardTexts
    from ..sharing.transfer import push_checkpoints, push_lora, push_model

    to = config.to.rstrip("/")
    if len(config.model_path) == 1 and (model := open_model(config.model_path[0])):
        plain = PushConfig(config.model_path, to=config.to, private=config.private)
        if other := [each.name for each in setting_changes(to_dict(plain), to_dict(config), PushConfig)]:
            raise InputError(f"{model.path} is a model folder, which is sent as it is: leave out {', '.join(other)}")
        names = push_model(model, to, config.private)
    else:
        title = config.title or to.rpartition("/")[2].partition("@")[0]
        texts = CardTexts(title, to, config.example_prompt, config.license, config.description, config.limits)
        if config.lora:
            names = push_lora(config.lora, texts, config.report_dir, config.private)
        else:
            names = push_checkpoints(config.paths, texts, config.report_dir, config.precision, config.private)
    return [f"{to}: {', '.join(names)}"]


@settings
class PullConfig:
    """Fetching a model"""

    # "from", as the command is written, cannot be the name of a field.
    model_path: str = option(
        "", f"model to fetch, also --from: {PLACE}; hf://USER/NAME@REVISION is a revision", was=("from",)
    )
    to: str = option("", "folder for the model, local or remote")

    def faults(self) -> Iterator[Fault]:
        for flag, given in {"from": self.model_path, "to": self.to}.items():
            if not given:
                yield Fault("", f"--{flag} is required: pull --from hf://USER/NAME --to FOLDER")


def pull(config: PullConfig) -> list[str]:
    from ..sharing.transfer import pull_model

    to = config.to.rstrip("/")
    return [f"{to}: {', '.join(pull_model(config.model_path.rstrip('/'), to))}"]


COMMANDS = {
    "push": Subcommand("Publish checkpoints as a model with a card.", PushConfig, push),
    "pull": Subcommand("Copy a model to a folder.", PullConfig, pull),
}
