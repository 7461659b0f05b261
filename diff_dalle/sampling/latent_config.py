"""Settings of a latent cascade's sampling: its files, and how stage B is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..config import faults_of, given, option, settings
from ..diffusion.samplers import SAMPLERS
from ..diffusion.spacing import TIME_SPACINGS
from ..errors import Fault
from .request import StageSettings, combined

_PREFIX = "stage_b_"
_STAGE_B = ("stage_b",)


@settings
class LatentCascadeConfig:
    """Latent cascade (model_path is stage C, with the flags of a base generator; none = as the checkpoint says)"""

    stage_b: str = option("", "checkpoint of stage B, which makes latents of stage A from semantic ones")
    stage_a: str = option("", "checkpoint of stage A, which decodes what stage B makes", needs=_STAGE_B)
    semantic: str = option(
        "",
        "checkpoint of the semantic encoder of the training, for init_image and reconstruct; without stage_b its "
        "previewer shows what stage C makes",
    )
    shift: float | None = option(
        None, "stage C: α/σ is divided by this, beside the shift of training; above 1 = more of the steps at high noise"
    )
    t_start: float | None = option(None, "stage C: time of the first step, 0–1; none = 1, at which everything is noise")
    t_end: float | None = option(
        None, "stage C: time up to which the steps are evenly spaced; the last one always leads to the clean sample"
    )
    stage_b_sampler: str | None = option(None, "sampling algorithm", choices=SAMPLERS, needs=_STAGE_B)
    stage_b_timestep_respacing: str | None = option(None, "sampling steps", needs=_STAGE_B)
    stage_b_spacing: str | None = option(
        None, "spacing of the steps; none = even", choices=TIME_SPACINGS, needs=_STAGE_B
    )
    stage_b_eta: float | None = option(None, "randomness of ddim; 0 = deterministic", needs=_STAGE_B, least=0)
    stage_b_guidance_scale: float | None = option(
        None, "scale of classifier-free guidance by prompt and semantic latents; 1 = off", needs=_STAGE_B
    )
    stage_b_guidance_scale_end: float | None = option(None, "as guidance_scale_end", needs=_STAGE_B)
    stage_b_guidance_rescale: float | None = option(None, "as guidance_rescale", needs=_STAGE_B)
    stage_b_guidance_interval: tuple[float, ...] | None = option(None, "as guidance_interval", needs=_STAGE_B)
    stage_b_perturbed_attention_scale: float | None = option(None, "as perturbed_attention_scale", needs=_STAGE_B)
    stage_b_perturbed_attention_interval: tuple[float, ...] | None = option(
        None, "as perturbed_attention_interval", needs=_STAGE_B
    )
    stage_b_shift: float | None = option(None, "as shift", needs=_STAGE_B)
    stage_b_t_start: float | None = option(None, "as t_start", needs=_STAGE_B)
    stage_b_t_end: float | None = option(None, "as t_end", needs=_STAGE_B)
    stage_b_seed: int | None = option(
        None, "seed of its noise: image i uses seed + i; none = as stage C", needs=_STAGE_B, least=0
    )
    stage_b_batch_size: int | None = option(None, "images per batch and process; none = 4", needs=_STAGE_B, least=1)
    stage_b_tile_size: int | None = option(
        None,
        "width and height in pixels of overlapping tiles, which the network processes one after another to save "
        "memory; none = no tiles",
        needs=_STAGE_B,
    )
    stage_b_tile_overlap: int | None = option(
        None,
        f"pixels shared by neighboring tiles; none = {StageSettings.tile_overlap}",
        needs=("stage_b_tile_size",),
    )

    def faults(self) -> Iterator[Fault]:
        # Without a sampler, its settings depend on the checkpoint's.
        known = self.stage_b_sampler is not None
        yield from faults_of(partial(combined, StageSettings(), self._stage_b, _PREFIX, with_sampler=known))

    @property
    def stage_c(self) -> dict[str, Any]:
        """The settings of stage C that are given."""
        return {name: value for name, value in given(self).items() if name in ("shift", "t_start", "t_end")}

    @property
    def _stage_b(self) -> dict[str, Any]:
        values = {name: value for name, value in given(self).items() if name.startswith(_PREFIX)}
        return {name.removeprefix(_PREFIX): value for name, value in values.items()}

    def settings(self, default: StageSettings) -> StageSettings:
        """Those of stage B, whose checkpoint says ``default``. InputError for impossible ones."""
        return combined(default, self._stage_b, _PREFIX)
