"""What the names and shapes of a U-Net's weights tell about it, in the layout that Improved Diffusion, Guided-Diffusion
and GLIDE share, and that Diff-DALLE changes a little; and what they do not tell, which is known of published networks.

To add one: an entry of ``releases`` in ``tables.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .names import TABLES, TEXTS, guided_names

LATENTS = 4  # channels of those of latent diffusion
CHANNELS = (3, 1, LATENTS)  # of what is denoised: the shapes allow one of these at most
Shapes = Mapping[str, tuple[int, ...]]
_MARKS = ("time_embed.0.weight", "input_blocks.0.0.weight", "middle_block.1.qkv.weight")  # both halves have these


@dataclass(frozen=True)
class TextStructure:
    """length: of captions, without a start token; 0 = the shapes do not tell. padded: whether padding has embeddings of
    its own (xf_padding); normed: whether the states are normalized (xf_final_ln)."""

    length: int
    width: int
    depth: int
    padded: bool = True
    normed: bool = True


@dataclass(frozen=True)
class Structure:
    """A U-Net. attention: whether each level has it, from the highest resolution to the lowest; text: None without.

    A classifier of noisy images is the encoder half, with ``out_channels`` 0 and ``classes`` to tell apart; with text
    too, these are the dimensions of a noised CLIP. original: whether it has Diff-DALLE's layout.
    """

    num_channels: int
    channel_mult: tuple[float, ...]
    num_res_blocks: int
    attention: tuple[bool, ...]
    in_channels: int
    out_channels: int
    num_classes: int = 0
    use_scale_shift_norm: bool = True
    resblock_updown: bool = True
    conv_resample: bool = True
    text: TextStructure | None = None
    classes: int = 0
    original: bool = False
    pool: str = "attention"

    @property
    def image_channels(self) -> int:
        """Of the denoised signal; a learned variance doubles the output's, the low-resolution image the input's."""
        if self.classes:
            return self.in_channels
        fitting = [
            n for n in CHANNELS if self.in_channels in (n, 2 * n, *_inpainting(n)) and self.out_channels in (n, 2 * n)
        ]
        return fitting[0] if fitting else self.out_channels

    @property
    def variance_is_learned(self) -> bool:
        return self.out_channels == 2 * self.image_channels

    @property
    def is_upsampler(self) -> bool:
        return self.in_channels in (2 * self.image_channels, _inpainting(self.image_channels)[1])

    @property
    def inpaints(self) -> bool:
        return not self.classes and self.in_channels in _inpainting(self.image_channels)

    @property
    def kind(self) -> str:
        """Of our checkpoints."""
        if self.classes:
            return "classifier" if self.text else "noisy_classifier"
        return "generator"

    def attention_resolutions(self, image_size: int) -> tuple[int, ...]:
        return tuple(image_size >> level for level, has in enumerate(self.attention) if has)


def _inpainting(channels: int) -> tuple[int, int]:
    """Input channels of inpainting networks, without and with a low-resolution image: the image, the known part of it,
    and where that is."""
    return 2 * channels + 1, 3 * channels + 1


@dataclass(frozen=True)
class Unseen:
    """What the shapes of a network's weights do not tell.

    num_heads, num_head_channels: one of them, as in ``UNetConfig``. num_heads_upsample: as there, -1 = num_heads.
    enc_heads: attention heads of the text encoder. text_length: Diff-DALLE's, where no weight has it.
    use_new_attention_order: queries, keys and values come before heads in the rows of the U-Net's projections.
    """

    image_size: int
    small_size: int = 0
    num_heads: int = 4
    num_head_channels: int = -1
    num_heads_upsample: int = -1
    enc_heads: int = 8
    text_length: int = 48
    use_new_attention_order: bool = False
    noise_schedule: str = "linear"
    diffusion_steps: int = 1000
    rescale_timesteps: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

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


def _release(project: str, name: str, **settings: Any) -> Release:
    """settings: an entry of the table."""
    settings = {**TABLES["projects"][project], **settings}
    mult = settings.get("channel_mult") or TABLES["channel_mult"][settings["image_size"]]
    settings["channel_mult"] = tuple(map(float, mult))
    settings["attention"] = tuple(
        settings["image_size"] >> level in settings["attention"] for level in range(len(mult))
    )
    if text := settings.get("text"):
        settings["text"] = TextStructure(**text)
    unseen = {field.name: settings.pop(field.name) for field in fields(Unseen) if field.name in settings}
    return Release(project, name, Structure(**settings), Unseen(**unseen))


RELEASES = tuple(_release(**entry) for entry in TABLES["releases"])


def find_release(structure: Structure) -> Release | None:
    """The published checkpoint with this structure."""
    return next((release for release in RELEASES if release.structure == structure), None)


def is_unet(names: Iterable[str]) -> bool:
    """Whether weights have the names of such a U-Net or of its encoder half."""
    names = list(names)
    return set(_MARKS) <= set(guided_names(names) or names)


def structure_of(shapes: Shapes) -> Structure:
    """The structure of a U-Net whose weights have these shapes. KeyError, IndexError, ValueError or ZeroDivisionError
    where they are those of none."""
    guided = guided_names(shapes)
    if guided is not None:
        shapes = {name: shapes[other] for name, other in guided.items()}
    levels, blocks = _levels(shapes)
    starts = [1 + level * (blocks + 1) for level in range(levels)]
    channels = shapes["time_embed.0.weight"][1]
    widths = [shapes[f"input_blocks.{start}.0.out_layers.3.weight"][0] for start in starts]
    down = f"input_blocks.{blocks + 1}.0"
    text = None
    if "token_embedding.weight" in shapes:
        depth = len(_indices(shapes, r"transformer\.resblocks\.(\d+)\.ln_1\.weight"))
        length, width = shapes["positional_embedding"]
        text = TextStructure(length, width, depth, "padding_embedding" in shapes, "final_ln.weight" in shapes)
    elif f"{TEXTS}emb.weight" in shapes:
        depth = len(_indices(shapes, r"text_encoder\.encoder\.(\d+)\.attn1\.qkv\.weight"))
        text = TextStructure(0, shapes[f"{TEXTS}emb.weight"][1], depth)
    pool = _pool(shapes)
    head = _HEADS[pool]
    return Structure(
        channels,
        tuple(width / channels for width in widths),
        blocks,
        tuple(f"input_blocks.{start}.1.qkv.weight" in shapes for start in starts),
        shapes["input_blocks.0.0.weight"][1],
        shapes["out.2.weight"][0] if "out.2.weight" in shapes and not pool else 0,
        shapes["label_emb.weight"][0] if "label_emb.weight" in shapes else 0,
        shapes["input_blocks.1.0.emb_layers.1.weight"][0] == 2 * widths[0],
        f"{down}.in_layers.0.weight" in shapes,
        levels == 1 or f"{down}.op.weight" in shapes or f"{down}.in_layers.0.weight" in shapes,
        text,
        shapes[head][0] if pool else 0,
        guided is not None,
        pool or "attention",
    )


#: The last layer of a classifier, by its pool; "" = it is none.
_HEADS = {
    "": "",
    "attention": "out.2.c_proj.weight",
    "adaptive": "out.3.weight",
    "spatial": "out.2.weight",
    "spatial_v2": "out.3.weight",
}


def _pool(shapes: Shapes) -> str:
    """How a classifier pools; "" = it is none."""
    if _HEADS["attention"] in shapes:
        return "attention"
    if "out.3.weight" in shapes:
        return "adaptive" if len(shapes["out.3.weight"]) == 4 else "spatial_v2"
    return "spatial" if len(shapes.get("out.2.weight", ())) == 2 else ""


def _indices(shapes: Shapes, pattern: str) -> list[int]:
    found = (re.fullmatch(pattern, name) for name in shapes)
    return sorted({int(match[1]) for match in found if match})


def _levels(shapes: Shapes) -> tuple[int, int]:
    """Levels, and residual blocks of each in the encoder.

    After all blocks of a level but the last comes a layer that halves the resolution. Where it has no weights, its
    number is missing; where it is a residual block, only the block in the decoder that doubles the resolution again
    can be recognized: it is no block's first layer. An encoder without a decoder has no such block; there the widths
    tell.
    """
    encoder, decoder = (
        _indices(shapes, rf"{half}_blocks\.(\d+)\.0\.in_layers\.0\.weight") for half in ("input", "output")
    )
    ups = _indices(shapes, r"output_blocks\.(\d+)\.[12]\.(?:conv|in_layers\.0)\.weight")
    others = sorted(set(range(1, encoder[-1] + 1)) - set(encoder))  # they halve the resolution without a block
    total = encoder[-1] + 1
    if ups:
        blocks = ups[0]
    elif others:
        blocks = others[0] - 1
    elif decoder:
        blocks = total - 1
    else:
        blocks = _blocks_of_encoder(shapes, total)
    return total // (blocks + 1), blocks


def _blocks_of_encoder(shapes: Shapes, total: int) -> int:
    """Residual blocks of each level, where residual blocks halve the resolution: these keep the width and have no
    attention; what follows them may change the width; and the blocks of a level all have attention, or none has."""
    attention = {i for i in range(1, total) if f"input_blocks.{i}.1.qkv.weight" in shapes}
    changes = {i for i in range(1, total) if f"input_blocks.{i}.0.skip_connection.weight" in shapes}
    for blocks in range(total - 1, 0, -1):
        downs = set(range(blocks + 1, total, blocks + 1))
        starts = {0, *downs}
        spans = [set(range(start + 1, start + 1 + blocks)) for start in starts]
        uniform = all(span <= attention or not span & attention for span in spans)
        fits = not downs & (attention | changes) and changes <= {start + 1 for start in starts}
        if total % (blocks + 1) == 0 and uniform and fits:
            return blocks
    raise ValueError("no number of residual blocks explains the widths")
