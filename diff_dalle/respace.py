"""``guided_diffusion.respace``: processes on some steps of another."""

from .diffusion.respace import SpacedDiffusion, space_timesteps

__all__ = ["SpacedDiffusion", "space_timesteps"]
