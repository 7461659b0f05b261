"""Published checkpoints, by the structure of their networks, and what that structure does not tell.

Sources: the commands in the READMEs of Improved Diffusion and Guided-Diffusion, and the defaults of GLIDE's package. To
add one: a line in ``RELEASES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .structure import Structure, TextStructure


@dataclass(frozen=True)
class Unseen:
    """What the shapes of a network's weights do not tell.

    num_heads, num_head_channels: one of them, as in ``UNetConfig``.
    enc_heads: attention heads of the text encoder. text_length: Diff-DALLE's, where no weight has it.
    use_new_attention_order: queries, keys and values come before heads in the rows of the U-Net's projections.
    """

    image_size: int
    small_size: int = 0
    num_heads: int = 4
    num_head_channels: int = -1
    enc_heads: int = 8
    text_length: int = 48
    use_new_attention_order: bool = False
    noise_schedule: str = "linear"
    diffusion_steps: int = 1000
    rescale_timesteps: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))

    @staticmethod
    def of_original(structure: Structure, given: Mapping[str, Any]) -> Unseen:
        """What is not ``given`` as its code has it: heads of 64 channels."""
        heads = {"enc_heads": max(structure.text.width // 64, 1)} if structure.text else {}
        return Unseen(**{"num_head_channels": 64, **heads, **given})


@dataclass(frozen=True)
class Release:
    """name: of the published file, without ``.pt``; of several with equal structure and settings, the first."""

    project: str
    name: str
    structure: Structure
    unseen: Unseen


WIDTHS = {
    512: (0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0),
    256: (1.0, 1.0, 2.0, 2.0, 4.0, 4.0),
    128: (1.0, 1.0, 2.0, 3.0, 4.0),
    64: (1.0, 2.0, 3.0, 4.0),
    32: (1.0, 2.0, 2.0, 2.0),
}  # by image_size


def _release(
    project: str, name: str, size: int, channels: int, blocks: int, attention: tuple[int, ...], **others: Any
) -> Release:
    """attention: the resolutions with it; others: fields of ``Structure`` and of ``Unseen``."""
    unseen = {field.name: others.pop(field.name) for field in fields(Unseen) if field.name in others}
    settings = {"channel_mult": WIDTHS[size], "in_channels": 3, "out_channels": 6, **others}
    has_attention = tuple(size >> level in attention for level in range(len(settings["channel_mult"])))
    structure = Structure(num_channels=channels, num_res_blocks=blocks, attention=has_attention, **settings)
    return Release(project, name, structure, Unseen(size, **unseen))


def _guided(name: str, size: int, channels: int, blocks: int, **others: Any) -> Release:
    attention = others.pop("attention", (32, 16, 8))
    return _release("Guided-Diffusion", name, size, channels, blocks, attention, **others)


def _improved(name: str, size: int, channels: int, blocks: int, **others: Any) -> Release:
    others = {"attention": (16, 8), "diffusion_steps": 4000, **others}
    attention = others.pop("attention")
    return _release("Improved Diffusion", name, size, channels, blocks, attention, resblock_updown=False, **others)


def _glide(name: str, size: int, blocks: int, **others: Any) -> Release:
    text = TextStructure(length=128, width=512, depth=16)
    return _release("GLIDE", name, size, 192, blocks, (32, 16, 8), num_head_channels=64, text=text, **others)


CLASSES = 1000  # of ImageNet
RELEASES = (
    _guided(
        "64x64_diffusion",
        64,
        192,
        3,
        num_classes=CLASSES,
        num_head_channels=64,
        use_new_attention_order=True,
        noise_schedule="cosine",
    ),
    _guided("128x128_diffusion", 128, 256, 2, num_classes=CLASSES),
    _guided("256x256_diffusion", 256, 256, 2, num_classes=CLASSES, num_head_channels=64),
    _guided("256x256_diffusion_uncond", 256, 256, 2, num_head_channels=64),
    _guided("512x512_diffusion", 512, 256, 2, num_classes=CLASSES, num_head_channels=64),
    _guided("64_256_upsampler", 256, 192, 2, in_channels=6, num_classes=CLASSES, small_size=64),
    _guided(
        "128_512_upsampler",
        512,
        192,
        2,
        attention=(32, 16),
        channel_mult=WIDTHS[256],
        in_channels=6,
        num_classes=CLASSES,
        small_size=128,
        num_head_channels=64,
    ),
    _guided(
        "64x64_classifier",
        64,
        128,
        4,
        out_channels=0,
        classes=CLASSES,
        num_head_channels=64,
        noise_schedule="cosine",
    ),
    *(
        _guided(f"{size}x{size}_classifier", size, 128, 2, out_channels=0, classes=CLASSES, num_head_channels=64)
        for size in (128, 256, 512)
    ),
    _improved("imagenet64_uncond_100M_1500K", 64, 128, 3, noise_schedule="cosine", rescale_timesteps=True),
    _improved("cifar10_uncond_50M_500K", 32, 128, 3, noise_schedule="cosine", rescale_timesteps=True),
    _improved("imagenet64_cond_270M_250K", 64, 192, 3, num_classes=CLASSES, noise_schedule="cosine"),
    _improved("upsample_cond_500K", 256, 192, 2, in_channels=6, num_classes=CLASSES, small_size=64),
    _improved(
        "lsun_uncond_100M_1200K_bs128",
        256,
        128,
        2,
        attention=(16,),
        use_scale_shift_norm=False,
        num_heads=1,
        diffusion_steps=1000,
    ),
    _glide("base", 64, 3, noise_schedule="cosine"),
    _glide("upsample", 256, 2, in_channels=6, small_size=64),
)


def find_release(structure: Structure) -> Release | None:
    """The published checkpoint with this structure."""
    return next((release for release in RELEASES if release.structure == structure), None)
