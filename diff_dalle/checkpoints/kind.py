"""What the house asks of a kind of network: one class, whose instances are the settings in its checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from torch import nn

from ..config import Section, from_dict, members, present_keys
from ..images.signal import Signal
from .probe import Probe

Self = TypeVar("Self", bound="NetworkKind")


class NetworkKind(ABC):
    """The settings without which a network of one kind cannot be used, the sections of its checkpoints' config; and
    what there is to know about the kind.

    Where a run trains several networks, the name of the trainee says which one; "" is all of them together, as the
    modules of a ModuleDict.

    To add a kind: a class of ``settings`` based on this one, and a line in ``kinds.KINDS``.

    name:  the kind's name in checkpoints.
    title: what it is, for people.
    does:  the hub's name for what it does.
    role:  the setting that takes its checkpoint in sampling, of ``model_folder.ROLES``.
    stage: the class that samples with it, MODULE.CLASS of the room ``sampling``; "" = it is no stage of a cascade.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    does: ClassVar[str]
    role: ClassVar[str] = "model_path"
    stage: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "name" not in vars(cls):  # a base of several kinds
            return
        needed = ("title", "does", "build", "probe", "signal")
        missing = [each for each in needed if getattr(cls, each, None) is getattr(NetworkKind, each, None)]
        if missing:
            raise TypeError(f"the kind {cls.name} lacks {', '.join(missing)}")

    @abstractmethod
    def build(self, vocab_size: int = 0, trainee: str = "") -> nn.Module:
        """The network with its initial weights."""

    @abstractmethod
    def probe(self, trainee: str = "") -> Probe:
        """How to find the cost of one network."""

    @property
    @abstractmethod
    def signal(self) -> Signal:
        """What the network denoises or sees."""

    @property
    def trainees(self) -> tuple[str, ...]:
        """The names of the networks, if there can be several."""
        return ("",)

    def summary(self, names: Sequence[str]) -> list[str]:
        """Lines for people about what the settings mean together. names: of networks."""
        return []

    @property
    def described(self) -> tuple[str, str]:
        """``title`` and ``does`` of a network with these settings."""
        return self.title, self.does

    def with_checkpoint(self: Self, value: bool) -> Self:
        """The settings with activation checkpointing on or off, where ``model`` has the setting."""
        return replace(self, model=replace(self.model, use_checkpoint=value))  # type: ignore[type-var, attr-defined]

    @classmethod
    def read(cls: type[Self], config: Mapping) -> Self:
        """The settings in a checkpoint's config. Raises InputError for one that does not exist or is mistyped; a
        section that the checkpoint is too old to have takes its defaults."""
        present = present_keys(cls)
        config = {present.get(key, key): value for key, value in config.items()}
        sections = {key: member.config for key, member in members(cls).items() if isinstance(member, Section)}
        return cls(**{key: from_dict(section, config.get(key, {}), key) for key, section in sections.items()})

    @classmethod
    def of_run(cls: type[Self], run: Any) -> Self:
        """The settings of a training run, whose config has them among its sections."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(cls)})  # type: ignore[arg-type]
