"""Stage C: the text-to-image network, which makes semantic latents."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import option
from ...errors import InputError, quantity
from .config import LatentTextConfig, LatentUnetConfig
from .unet import LatentUnet


@dataclass(frozen=True)
class StageCConfig(LatentUnetConfig):
    """Stage C"""

    channels: int = option(16, "channels of the semantic latents")
    widths: tuple[int, ...] = option((2048, 2048), "channels of each level")
    heads: tuple[int, ...] = option((32, 32), "attention heads of each level; 0 where there is no attention")
    levels: tuple[str, ...] = option(
        ("CTA", "CTA"),
        "what one block of each level consists of: C convolution, T timestep, A attention, F feed-forward",
    )
    switch_level: tuple[bool, ...] = option(
        (False,), "whether the resolution is halved after each level but the last; one for all or for each"
    )
    down_blocks: tuple[int, ...] = option((8, 24), "blocks of each level on the way down")
    up_blocks: tuple[int, ...] = option((24, 8), "blocks of each level on the way up, deepest level first")
    dropout: tuple[float, ...] = option((0.1, 0.1), "dropout rate in the blocks C and F of each level")
    cond_width: int = option(2048, "width of the condition tokens")
    micro_conditions: tuple[str, ...] = option(
        ("sca", "crp"),
        "numbers in [0, 1] that condition the network besides the noise, by name; one that is not given is 0",
    )
    text_width: int = option(
        1280, "width of the text states from outside; 0 = not conditioned on them", needs=("enc_attn_dim", "0")
    )
    image_width: int = option(768, "width of the image embedding; 0 = not conditioned on it")

    def __post_init__(self):
        super().__post_init__()
        for name in ("text_width", "image_width"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 0")
        if len(self.switch_level) not in (1, self.depth - 1):
            raise InputError(
                f"switch_level has {quantity(len(self.switch_level), 'value')}, but must have 1, or one for each of "
                f"the {quantity(self.depth - 1, 'transition')} between levels"
            )

    @property
    def transitions(self) -> tuple[str, ...]:
        switches = self.switch_level * (self.depth - 1 if len(self.switch_level) == 1 else 1)
        return tuple("resized" if switch else "same" for switch in switches)

    @property
    def states_width(self) -> int:
        return self.text.enc_attn_dim or self.text_width

    @property
    def embedding_width(self) -> int:
        return self.image_width


#: The released sizes, by their names there, and one for two CPU cores.
STAGE_C_SIZES = {
    "3.6B": StageCConfig(),
    "1B": StageCConfig(widths=(1536, 1536), heads=(24, 24), down_blocks=(4, 12), up_blocks=(12, 4), cond_width=1536),
    "tiny": StageCConfig(
        widths=(128, 128),
        heads=(4, 4),
        down_blocks=(1, 1),
        up_blocks=(1, 1),
        dropout=(0.0, 0.0),
        cond_width=128,
        vector_tokens=2,
        text=LatentTextConfig(enc_attn_dim=128, enc_depth=2, enc_heads=4, text_length=24),
        image_width=0,
    ),
}


class StageC(LatentUnet):
    """A denoiser of semantic latents, conditioned on text states, pooled text and an image embedding, which is 0 where
    none is given."""

    config: StageCConfig
