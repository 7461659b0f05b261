"""``guided_diffusion.respace``: processes on some steps of another."""

from .diffusion.gaussian_diffusion import SpacedDiffusion
from .diffusion.spacing import space_timesteps

__all__ = ["SpacedDiffusion", "space_timesteps"]
