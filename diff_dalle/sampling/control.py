"""A ControlNet beside the network of a stage, and the pictures by which it controls samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..config import Fault, InputError, differences, named, option, quantity, settings, to_dict
from ..diffusion.sampling import seeds_draw
from ..embeddings.contract import weights_digest
from ..images.control_filters.contract import ControlFilter, Materials, as_control
from ..images.control_filters.table import ControlConfig
from ..images.files import check_mask, fit_image, fit_mask
from ..images.signal import LatentSignal, Signal, check_pixels
from ..models.adapters.controlnet import Controlled, ControlNet
from ..models.precision import for_inference


@settings
class SteeringConfig:
    """ControlNet (steers the base generator or stage C)"""

    controlnet: str = option("", "checkpoint of a ControlNet for model_path: ema_….pt or model….pt")
    control_image: tuple[str, ...] = option(
        (),
        "pictures that control the samples, files and folders, used in turn; other sizes are scaled to cover the "
        "samples and center-cropped, except with control_ready",
        needs=("controlnet",),
    )
    control_mask: tuple[str, ...] = option(
        (),
        "masks of control_image, of the same sizes, used in turn, for a ControlNet that inpaints: white = inpainted; "
        "none = random",
        needs=("controlnet",),
    )
    control_ready: bool = option(
        False,
        "control_image is already a control, such as a drawing of edges, of the samples' size: skip the ControlNet's "
        "filter",
        needs=("controlnet",),
    )
    control_scale: float = option(1.0, "strength of the control; 0 = none", needs=("controlnet",))
    control_interval: tuple[float, ...] = option(
        (0.0, 1.0),
        "controlled part of the process, LOW,HIGH as fractions of T; 0 = image, 1 = noise",
        needs=("controlnet",),
    )

    def faults(self) -> Iterator[Fault]:
        if self.controlnet and not self.control_image:
            rule = f"is set, but there is no picture to control by: give it with {named('control_image')}"
            yield Fault("controlnet", rule)


@dataclass(frozen=True, eq=False)
class Control:
    """Pictures that control samples, of any size: scaled to cover the generated size and center-cropped. Controls that
    are ready-made have the generated size.

    images:   uint8 [H, W, 3] each, used in turn.
    masks:    bool [H, W] each, True where new content is generated, for a ControlNet that inpaints: one for all, or one
              for each; None = random ones, which follow from the seed of the sample.
    ready:    whether the pictures are controls already.
    scale:    strength; 0 = none.
    interval: controlled part of the process, as fractions of it: 0 = image, 1 = noise.

    Raises InputError for no picture, one of the wrong type, a mask that does not fit, and an impossible interval.
    """

    images: Sequence[np.ndarray]
    masks: Sequence[np.ndarray] | None = None
    ready: bool = False
    scale: float = 1.0
    interval: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self):
        count, ends = len(self.images), self.interval
        if not count:
            raise InputError(f"there is no picture to control by: give at least one ({named('control_image')})")
        if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= 1:
            raise InputError(Fault("control_interval", "must be LOW,HIGH with 0 <= LOW <= HIGH <= 1", ends))
        if not np.isfinite(self.scale):
            raise InputError(Fault("control_scale", "must be a finite number", self.scale))
        if self.masks is None:
            return
        if self.ready:
            raise InputError(
                f"a mask ({named('control_mask')}) belongs to a picture, not to a ready-made control: leave one out"
            )
        if len(self.masks) not in (1, count):
            raise InputError(
                f"there are {len(self.masks)} masks ({named('control_mask')}) for {quantity(count, 'picture')}: give "
                "one for all, or one for each"
            )

    def at(self, index: Sequence[int], size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """The pictures of the samples with these indices, [N, 3, *size] in [0, 1], and their masks, bool [N, 1, *size].
        InputError for another type, for masks of another size than their pictures, and for a ready-made control of
        another size, whose lines scaling would blur."""
        images, masks = [], []
        for i in index:
            image = self.images[i % len(self.images)]
            check_pixels("a picture to control by", image, "[H, W, 3]")
            if self.ready and image.shape[:2] != size:
                raise InputError(
                    f"a ready-made control ({named('control_image')}) has {image.shape[1]} × {image.shape[0]} pixels, "
                    f"but must have the size of the sample, {size[1]} × {size[0]}"
                )
            images.append(fit_image(image, size))
            if self.masks is not None:
                mask = self.masks[i % len(self.masks)]
                check_mask(mask, image, named("control_mask"))
                masks.append(fit_mask(mask, size))
        pictures = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        return pictures, torch.from_numpy(np.stack(masks))[:, None] if masks else None


class Steering:
    """A ControlNet that steers the network of a stage.

    path:      its checkpoint.
    base:      that of the network. accept_changed_base: also with other weights than those that it was trained for.
    precision: fp32, bf16 or fp16.
    keep:      keep the weights in memory after use.

    Raises InputError for a checkpoint of anything else, and for one for another network.
    """

    def __init__(
        self,
        path: str,
        base: SavedNetwork,
        device: torch.device,
        precision: str = "fp32",
        keep: bool = True,
        accept_changed_base: bool = False,
    ):
        (self.saved,) = open_networks(path, tuple(kind for kind in KINDS if find_kind(kind).role == "controlnet"))
        self.base, self.settings = base, self.saved.settings
        self.device, self.precision, self.keep = device, precision, keep
        required, found = self.settings.of, base.settings.name
        if required != found:
            raise InputError(f"{path} is a ControlNet for a {required}, but {base.path} holds a {found}")
        own, given = self.settings.model, base.settings.model
        if changed := differences(to_dict(own), to_dict(given), type(own)):
            raise InputError(
                f"{path} is a ControlNet for a {required} with other settings than {base.path}: {changed[0]}; give the "
                "base of its training"
            )
        if not accept_changed_base:
            self._check_base()
        self._network: nn.Module | None = None
        self._filter: ControlFilter | None = None

    def _check_base(self) -> None:
        known, found = self.settings.base.identity, weights_digest(self.base.weights())
        if known and known != found:  # files of other projects do not say it
            raise InputError(
                f"{self.saved.path} is a ControlNet for the weights {known}, but those of {self.base.path} are "
                f"{found}: give the base of its training, or accept this one by {named('accept_changed_base')}"
            )

    def check(self, control: Control, size: tuple[int, int], signal: Signal) -> None:
        """InputError for pictures that cannot control samples of this size."""
        pixels = (signal.scale * size[0], signal.scale * size[1])
        for i in range(len(control.images)):  # one at a time to save memory
            control.at([i], pixels)
        self.controls(control, [0], size, signal, [0])

    def controls(
        self,
        control: Control,
        index: Sequence[int],
        size: tuple[int, int],
        signal: Signal,
        seeds: Sequence[int],
        stage: int = 0,
    ) -> Tensor:
        """The controls of the samples with these indices and seeds [N, channels, h, w], on the CPU.

        size, signal: height, width and signal of the samples. stage: its index in the cascade.
        """
        pixels = (signal.scale * size[0], signal.scale * size[1])
        pictures, masks = control.at(index, pixels)
        config: ControlConfig = self.settings.control
        if control.ready:
            return as_control(pictures, config.channels)
        control_filter = self.control_filter(signal)
        if masks is not None and not control_filter.takes_masks:
            raise InputError(
                f"a mask ({named('control_mask')}) is given, but the ControlNet's filter {config.controlnet_filter} "
                "has none: leave it out"
            )
        return control_filter(pictures, seeds_draw(seeds, stage, torch.device("cpu")), masks)

    def control_filter(self, signal: Signal) -> ControlFilter:
        """What makes the controls of pictures, for samples of this signal. InputError for what it lacks."""
        if self._filter is None:
            self._filter = self.settings.control.create(_materials(signal))
        return self._filter

    def around(self, network: nn.Module, scale: float) -> Controlled:
        """The stage's network, steered."""
        found = self._network or for_inference(self.saved.load(self.device), self.precision)
        self._network = found if self.keep else None
        assert isinstance(found, ControlNet)
        return Controlled(network, found, scale)


def _materials(signal: Signal) -> Materials:
    if isinstance(signal, LatentSignal) and signal.encode is not None:
        return Materials(signal.encode, signal.channels, signal.scale)
    return Materials()
