"""Stage C: the text-to-image network, which makes semantic latents."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Fault, option, quantity, settings
from ...config.bounds import MAX_WIDTH
from .config import LatentTextConfig, LatentUnetConfig, redefined
from .unet import LatentUnet


@settings
class StageCConfig(LatentUnetConfig):
    """Stage C"""

    channels: int = option(16, "channels of the semantic latents", least=1, most=MAX_WIDTH)
    widths: tuple[int, ...] = redefined("widths", (2048, 2048))
    heads: tuple[int, ...] = redefined("heads", (32, 32))
    levels: tuple[str, ...] = redefined("levels", ("CTA", "CTA"))
    switch_level: tuple[bool, ...] = option(
        (False,), "halve the resolution after each level but the last; one for all or for each"
    )
    down_blocks: tuple[int, ...] = redefined("down_blocks", (8, 24))
    up_blocks: tuple[int, ...] = redefined("up_blocks", (24, 8))
    dropout: tuple[float, ...] = redefined("dropout", (0.1, 0.1))
    cond_width: int = redefined("cond_width", 2048)
    micro_conditions: tuple[str, ...] = redefined("micro_conditions", ("sca", "crp"))
    text_width: int = option(
        1280,
        "width of the CLIP's text states; 0 = not conditioned on them",
        needs=("enc_attn_dim", "0"),
        least=0,
        most=MAX_WIDTH,
    )
    image_width: int = option(768, "width of the image embedding; 0 = not conditioned on it", least=0, most=MAX_WIDTH)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if len(self.switch_level) not in (1, self.depth - 1):
            wanted = f"1, or one for each of the {quantity(self.depth - 1, 'transition')} between levels"
            found = quantity(len(self.switch_level), "value")
            yield Fault("switch_level", f"has {found}, but must have {wanted}")

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
