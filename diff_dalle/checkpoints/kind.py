"""What the house asks of a kind of network: one class, whose instances are the settings in its checkpoints; and how
the cost of a network is found, a forward pass on zeros."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..config import Section, from_dict, members, present_form, present_keys
from ..images.signal import Signal

Self = TypeVar("Self", bound="NetworkKind")


@dataclass(frozen=True)
class Probe:
    """A forward pass on zeros that measures a network's cost.

    sizes:           image resolution in pixels, and the resolution of the crops that are trained on.
    forward:         (network, number of images, resolution) → output, on torch's default device.
    checkpoint_flag: the setting that turns activation checkpointing on, and ``checkpointed`` whether it is set.
    with_checkpoint: the settings with that flag on or off.
    """

    sizes: tuple[int, int]
    forward: Callable[[Any, int, int], Tensor]
    checkpoint_flag: str
    checkpointed: bool
    with_checkpoint: Callable[[bool], Any]


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
    network: the class of its networks, which are made of ``model`` and, if ``reads_tokens``, of the number of tokens.
    stage: the class that samples with it, MODULE.CLASS of the room ``sampling``; "" = it is no stage of a cascade.
    image_size: the place of the setting with the resolution of its images in pixels.
    checkpoint_flag: what the setting that turns activation checkpointing on is called; checkpointing: its place.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    does: ClassVar[str]
    network: ClassVar[Callable[..., nn.Module]]
    reads_tokens: ClassVar[bool] = False
    role: ClassVar[str] = "model_path"
    stage: ClassVar[str] = ""
    image_size: ClassVar[str] = "model.image_size"
    checkpoint_flag: ClassVar[str] = "model.use_checkpoint"
    checkpointing: ClassVar[str] = "model.use_checkpoint"
    model: Any

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "name" not in vars(cls):  # a base of several kinds
            return
        needed = ("title", "does", "network", "forward", "signal")
        missing = [each for each in needed if getattr(cls, each, None) is getattr(NetworkKind, each, None)]
        if missing:
            raise TypeError(f"the kind {cls.name} lacks {', '.join(missing)}")

    def build(self, vocab_size: int = 0, trainee: str = "") -> nn.Module:
        """The network with its initial weights."""
        made_of = (self.model, vocab_size) if self.reads_tokens else (self.model,)
        return self.network(*made_of)

    def sizes(self, trainee: str) -> tuple[int, int]:
        """``Probe.sizes`` of one network."""
        size = attrgetter(self.image_size)(self)
        return size, size

    @abstractmethod
    def forward(self, network: Any, images: int, side: int, trainee: str) -> Tensor:
        """``Probe.forward`` of one network."""

    def probe(self, trainee: str = "") -> Probe:
        """How to find the cost of one network."""
        forward = functools.partial(self.forward, trainee=trainee)
        checkpointed = self.is_checkpointed(trainee)
        return Probe(self.sizes(trainee), forward, self.checkpoint_flag, checkpointed, self.with_checkpoint)

    def is_checkpointed(self, trainee: str) -> bool:
        """Whether one network has activation checkpointing."""
        return attrgetter(self.checkpointing)(self)

    def with_checkpoint(self: Self, value: bool) -> Self:
        """The settings with activation checkpointing on or off."""
        return _with(self, self.checkpointing, value)

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

    @classmethod
    def read(cls: type[Self], config: Mapping) -> Self:
        """The settings in a checkpoint's config. Raises InputError for one that does not exist or is mistyped; a
        section that the checkpoint is too old to have takes its defaults."""
        present, config = present_keys(cls), present_form(cls, config)
        config = {present.get(key, key): value for key, value in config.items()}
        sections = {key: member.config for key, member in members(cls).items() if isinstance(member, Section)}
        return cls(**{key: from_dict(section, config.get(key, {}), key) for key, section in sections.items()})

    @classmethod
    def of_run(cls: type[Self], run: Any) -> Self:
        """The settings of a training run, whose config has them among its sections."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(cls)})  # type: ignore[arg-type]


def _with(settings: Any, place: str, value: Any) -> Any:
    """Settings with a value at a place in their sections."""
    name, _, rest = place.partition(".")
    return replace(settings, **{name: _with(getattr(settings, name), rest, value) if rest else value})


def empty_images(count: int, channels: int, side: int) -> Tensor:
    return torch.zeros(count, channels, side, side)


def empty_text(count: int, length: int, width: int = 0) -> dict[str, Any]:
    """Conditioning on captions without padding: tokens, or states of a width."""
    mask = torch.ones(count, length, dtype=torch.bool)
    if width:
        return {"text_states": torch.zeros(count, length, width), "mask": mask}
    return {"tokens": torch.zeros(count, length, dtype=torch.int64), "mask": mask}
