"""Flags of sampling that take the place of what a checkpoint records, where they are given."""

from __future__ import annotations

from ..config import overrides
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig

GivenSampler = overrides(
    SamplerConfig, "Sampler (none = as the checkpoint says; a generator: dpm++2m with 30 steps and eta 0)"
)
GivenGuidance = overrides(GuidanceConfig, "Guidance (none = as the checkpoint says; a generator: as in its previews)")
