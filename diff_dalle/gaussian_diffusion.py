"""``guided_diffusion.gaussian_diffusion``: the process of this library, which has its names and numbers."""

from .diffusion.gaussian_diffusion import GaussianDiffusion
from .diffusion.parametrization import LossType, ModelMeanType, ModelVarType
from .diffusion.schedules import betas_for_alpha_bar, get_named_beta_schedule

__all__ = [
    "GaussianDiffusion",
    "LossType",
    "ModelMeanType",
    "ModelVarType",
    "betas_for_alpha_bar",
    "get_named_beta_schedule",
]
