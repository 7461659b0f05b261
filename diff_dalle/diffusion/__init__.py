"""Diffusion mathematics on torch and numpy: no files, no process groups, no networks."""

from .diffusion_config import DiffusionConfig, create_gaussian_diffusion
from .gaussian_diffusion import GaussianDiffusion, SpacedDiffusion
from .guidance import ClassifierGuidance, GuidanceConfig, guided_denoiser
from .log_snr import LogSnrProcess
from .log_snr_config import LogSnrConfig
from .log_snr_schedules import LOG_SNR_SCHEDULES
from .parametrization import LossType, ModelMeanType, ModelVarType
from .resample import LossSecondMomentResampler, ScheduleSampler, UniformSampler, create_named_schedule_sampler
from .samplers import SAMPLERS, Prediction, Step
from .schedules import SCHEDULES, betas_for_alpha_bar, get_named_beta_schedule
from .spacing import space_timesteps

__all__ = [
    "LOG_SNR_SCHEDULES",
    "SAMPLERS",
    "SCHEDULES",
    "ClassifierGuidance",
    "DiffusionConfig",
    "GaussianDiffusion",
    "GuidanceConfig",
    "LogSnrConfig",
    "LogSnrProcess",
    "LossSecondMomentResampler",
    "LossType",
    "ModelMeanType",
    "ModelVarType",
    "Prediction",
    "ScheduleSampler",
    "SpacedDiffusion",
    "Step",
    "UniformSampler",
    "betas_for_alpha_bar",
    "create_gaussian_diffusion",
    "create_named_schedule_sampler",
    "get_named_beta_schedule",
    "guided_denoiser",
    "space_timesteps",
]
