"""How a generator's previews are sampled while it is trained. Their guidance is in its checkpoint, and is that of all
sampling from it unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..config import Fault, named, option, section, settings
from ..config.bounds import MAX_BATCH
from ..images.signal import Signal
from .diffusion_config import DiffusionConfig
from .guidance import GuidanceConfig, thresholding
from .sampling import SamplerConfig


def preview_share_option(needs: Sequence[str] = ()) -> Any:
    """The setting that all previews share."""
    return option(
        0.05,
        "maximum share of the run for all previews, in forward passes (three per sample in a training step): in "
        "short runs they have fewer images and sampling steps, at least one; none = no limit",
        free=True,
        needs=needs,
        above=0,
    )


@settings
class PreviewConfig:
    """Preview grids"""

    sample_interval: int = option(
        5000, "steps between preview grids, with another at the last step; 0 = no previews", free=True, least=0
    )
    preview_samples: int = option(
        16,
        "images in a preview grid, of the first captions of val_data_dir, or else of data_dir",
        free=True,
        needs=("sample_interval",),
        most=MAX_BATCH,
    )
    preview_share: float | None = preview_share_option(needs=("sample_interval",))
    sampler: SamplerConfig = section(
        SamplerConfig, needs=("sample_interval",), free=True, called={"steps": "preview_steps"}
    )
    guidance: GuidanceConfig = section(GuidanceConfig, free=True)

    def faults(self) -> Iterator[Fault]:
        if self.preview_samples < 1:
            off = f"{named('sample_interval')} 0 turns previews off"
            yield Fault.of(self, "preview_samples", f"must be at least 1 ({off})")

    def check(self, diffusion: DiffusionConfig, signal: Signal, conditional: bool) -> None:
        """InputError for previews that cannot be sampled, before training instead of at the first preview.

        conditional: whether the generator has captions or classes.
        """
        self.guidance.scales(conditional)
        if self.sample_interval:
            self.sampler.process(diffusion)
            thresholding(self.guidance, signal.value_range)
