"""``guided_diffusion.unet``: its networks, called as ``model(x, timesteps, y=…, low_res=…)``.

They are this library's U-Net and classifier. Their state dicts have Guided-Diffusion's names and shapes, so that files
of weights go both ways; the names of ``named_parameters`` are ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Conditioning
from .checkpoints.foreign.names import Weight, weights_of
from .config import InputError
from .models.generator import resized
from .models.noised_clip import POOLS, NoisyClassifier, NoisyClassifierConfig
from .models.precision import autocast
from .models.unet import UNet, UNetConfig

DEFAULTS = {
    "conv_resample": True,
    "use_checkpoint": False,
    "num_heads": 1,
    "num_head_channels": -1,
    "num_heads_upsample": -1,
    "use_scale_shift_norm": False,
    "resblock_updown": False,
}  # settings that are ours too, as Guided-Diffusion has them unless told otherwise


class _Network(nn.Module):
    """What both kinds of networks have: half precision, and weights under Guided-Diffusion's names.

    Half precision is autocast: the weights stay in fp32, so that an optimizer trains them as they are.
    """

    precision = "fp32"
    layout: tuple[Weight, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}  # by the names there

    def publish(self, new_order: bool, use_fp16: bool) -> None:
        """To be called once the network is built. new_order: of the rows of attention's projections in state dicts."""
        self.layout = tuple(weights_of(self, original=False, new_order=new_order))
        self.shapes = {}
        for weight in self.layout:  # of which several may be one there
            rows, *rest = weight.other_shape
            before = self.shapes.get(weight.other, (0,))[0]
            self.shapes[weight.other] = (before + rows, *rest)
        self.register_state_dict_post_hook(_give)
        self.register_load_state_dict_pre_hook(_take)
        if use_fp16:
            self.convert_to_fp16()

    def convert_to_fp16(self) -> None:
        """Compute in fp16 from now on; norms, softmax and the last layer stay in fp32."""
        self.precision = "fp16"

    def convert_to_fp32(self) -> None:
        """Compute in fp32 from now on."""
        self.precision = "fp32"


def _give(network: _Network, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Our names and shapes in a state dict become Guided-Diffusion's."""
    for weight in network.layout:
        value, name = weight.give(state.pop(prefix + weight.own)), prefix + weight.other
        state[name] = torch.cat([state[name], value]) if name in state else value.contiguous()


def _take(
    network: _Network,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """The inverse of ``_give``. A weight that is missing or does not fit stays as it is, and is reported."""
    present = dict(network.named_parameters())
    given = {name: state.pop(prefix + name, None) for name in network.shapes}
    for name, value in given.items():
        if value is None:
            missing.append(prefix + name)
        elif value.shape != network.shapes[name]:
            errors.append(f"{prefix}{name} has the shape {tuple(value.shape)}, not {network.shapes[name]}")
            given[name] = None
    for weight in network.layout:
        value = given[weight.other]
        state[prefix + weight.own] = present[weight.own].detach() if value is None else weight.take(value)


def unet_config(
    image_size: int,
    model_channels: int,
    num_res_blocks: int,
    attention_resolutions: Sequence[int],
    dropout: float,
    channel_mult: Sequence[float],
    dims: int,
    num_classes: int | None = None,
    **others: Any,
) -> UNetConfig:
    """Our settings of a network.

    attention_resolutions: the factors of downsampling at which it has attention.
    others:                in place of ``DEFAULTS``. TypeError for any that is not among them.
    """
    if dims != 2:
        raise InputError(f"dims is {dims}, but these networks are for images: set it to 2")
    if odd_names := others.keys() - DEFAULTS.keys():
        raise TypeError(f"{min(odd_names)} is no setting of a network")
    levels = [2**level for level in range(len(channel_mult))]
    odd = sorted(set(attention_resolutions) - set(levels))
    if odd:
        warnings.warn(
            f"attention_resolutions select the levels of {_listed(odd)} times lower resolution, but the network has "
            f"those of {_listed(levels)}: the others have no effect",
            stacklevel=4,
        )
    return UNetConfig(
        image_size=image_size,
        num_channels=model_channels,
        num_res_blocks=num_res_blocks,
        attention_resolutions=tuple(image_size // factor for factor in levels if factor in attention_resolutions),
        channel_mult=tuple(map(float, channel_mult)),
        num_classes=num_classes or 0,
        dropout=float(dropout),
        **{**DEFAULTS, **others},
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


class UNetModel(_Network):
    """The U-Net of Dhariwal & Nichol 2021.

    attention_resolutions: factors of downsampling with attention, such as (4, 8) for feature maps of a quarter and an
        eighth of the resolution.
    num_classes: of a class-conditional network, which is called with ``y``; None = unconditional.
    use_new_attention_order: the order of the rows of attention's projections in state dicts.
    others: further arguments of ``unet_config``.

    Raises InputError for settings that make no network.
    """

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        model_channels: int,
        out_channels: int,
        num_res_blocks: int,
        attention_resolutions: Sequence[int],
        dropout: float = 0,
        channel_mult: Sequence[float] = (1, 2, 4, 8),
        *,
        dims: int = 2,
        num_classes: int | None = None,
        use_fp16: bool = False,
        use_new_attention_order: bool = False,
        **others: Any,
    ):
        super().__init__()
        self.num_classes = num_classes
        shape = image_size, model_channels, num_res_blocks, attention_resolutions, dropout, channel_mult, dims
        self.config = unet_config(*shape, num_classes, **others)
        self.unet = UNet(self.config, in_channels, out_channels)
        self.publish(use_new_attention_order, use_fp16)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None) -> Tensor:
        """x: [N, C, H, W]; timesteps: [N], steps of the original process; y: [N] classes, of a class-conditional
        network only. Returns [N, out_channels, H, W] float32. InputError for a missing y, and for one too many."""
        if y is not None and self.num_classes is None:
            raise InputError("y is given, but the network is not class-conditional: set class_cond, or leave y out")
        with autocast(self.precision, x.device):
            return self.unet(x, timesteps, Conditioning(labels=y))


class SuperResModel(UNetModel):
    """An upsampler: ``UNetModel`` of the noisy image and the low-resolution one. in_channels: of each of the two."""

    def __init__(self, image_size: int, in_channels: int, *args: Any, **kwargs: Any):
        super().__init__(image_size, 2 * in_channels, *args, **kwargs)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None, low_res: Tensor | None = None) -> Tensor:
        """low_res: [N, C, h, w] in [-1, 1], which is resized bilinearly; required. Else as for ``UNetModel``."""
        if low_res is None:
            raise InputError("an upsampler requires a low-resolution image: give low_res")
        return super().forward(torch.cat([x, resized(low_res, x.shape[2:]).to(x.dtype)], 1), timesteps, y)


class EncoderUNetModel(NoisyClassifier, _Network):
    """The encoder half with a pool: ``model(x, timesteps)`` gives logits [N, out_channels]. Arguments as for
    ``UNetModel``; in_channels must be 3, and pool one of ``POOLS``."""

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        model_channels: int,
        out_channels: int,
        num_res_blocks: int,
        attention_resolutions: Sequence[int],
        dropout: float = 0,
        channel_mult: Sequence[float] = (1, 2, 4, 8),
        *,
        dims: int = 2,
        use_fp16: bool = False,
        use_new_attention_order: bool = False,
        pool: str = "adaptive",
        **others: Any,
    ):
        if in_channels != 3:
            raise InputError(f"in_channels is {in_channels}, but classifiers see RGB images: set it to 3")
        if pool not in POOLS:
            raise InputError(f"pool is {pool!r}, but must be one of {', '.join(POOLS)}")
        shape = image_size, model_channels, num_res_blocks, attention_resolutions, dropout, channel_mult, dims
        tower = unet_config(*shape, **others)
        super().__init__(NoisyClassifierConfig(tower, out_channels, pool))
        self.publish(use_new_attention_order, use_fp16)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """x: [N, 3, image_size, image_size]; timesteps: [N]. Returns logits [N, out_channels] float32."""
        with autocast(self.precision, x.device):
            return super().forward(x, timesteps)
