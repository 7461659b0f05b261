"""The settings of a diffusion process, and the process made from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from ..config import lookup, option
from ..errors import InputError
from .losses import min_snr_weights, p2_weights
from .parametrization import LOSSES, PREDICTIONS, VARIANCES
from .respace import SpacedDiffusion, space_timesteps
from .schedules import SCHEDULES, get_named_beta_schedule

WEIGHTINGS = ("none", "min_snr", "p2")


@dataclass(frozen=True)
class NoiseConfig:
    """Diffusion process"""

    diffusion_steps: int = option(1000, "noising steps T of the process that the network is trained on")
    noise_schedule: str = option("linear", "how the noise grows over the steps", choices=tuple(SCHEDULES))
    rescale_timesteps: bool = option(False, "show the network timesteps spread over 0 to 1000, whatever T is")

    def __post_init__(self):
        get_named_beta_schedule(self.noise_schedule, self.diffusion_steps)


@dataclass(frozen=True)
class DiffusionConfig(NoiseConfig):
    """Diffusion process"""

    prediction: str = option("eps", "what the network predicts", choices=tuple(PREDICTIONS))
    variance: str = option(
        "fixed_large", "variance of a sampling step; the learned ones double the output channels",
        choices=tuple(VARIANCES),
    )  # fmt: skip
    loss_type: str = option(
        "mse", "what is minimised: an error (plus the variational term of a learned variance), or the variational "
        "bound itself (kl, rescaled_kl)", choices=tuple(LOSSES),
    )  # fmt: skip
    loss_weighting: str = option("none", "weight of the error by signal-to-noise ratio (SNR)", choices=WEIGHTINGS)
    min_snr_gamma: float = option(5.0, "SNR above which min_snr lowers the weight of the eps-loss as gamma / SNR")
    p2_k: float = option(1.0, "k in the weight 1 / (k + SNR)^gamma of the eps-loss under p2")
    p2_gamma: float = option(1.0, "gamma in the weight 1 / (k + SNR)^gamma of the eps-loss under p2")

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("prediction", PREDICTIONS), ("variance", VARIANCES), ("loss_type", LOSSES)):
            lookup(known, getattr(self, name), name)
        lookup(dict.fromkeys(WEIGHTINGS), self.loss_weighting, "loss_weighting")
        if self.loss_weighting != "none" and LOSSES[self.loss_type].is_vb():
            raise InputError(
                f"loss_weighting {self.loss_weighting} weights an error, but loss_type {self.loss_type} is a bound "
                "with weights of its own: set loss_weighting none, or loss_type rescaled_mse"
            )
        for name in ("min_snr_gamma", "p2_k"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.p2_gamma < 0:
            raise InputError(f"p2_gamma is {self.p2_gamma}, but must be at least 0")

    @property
    def variance_is_learned(self) -> bool:
        """Whether the network returns as many channels again for the variance."""
        return VARIANCES[self.variance].is_learned


def create_gaussian_diffusion(config: DiffusionConfig, respacing: str = "") -> SpacedDiffusion:
    """The process that ``config`` describes.

    respacing: which steps to keep, as for ``space_timesteps``; empty = every step.
    """
    weighting = {
        "none": None,
        "min_snr": functools.partial(min_snr_weights, gamma=config.min_snr_gamma),
        "p2": functools.partial(p2_weights, k=config.p2_k, gamma=config.p2_gamma),
    }[config.loss_weighting]
    return SpacedDiffusion(
        use_timesteps=space_timesteps(config.diffusion_steps, respacing or [config.diffusion_steps]),
        betas=get_named_beta_schedule(config.noise_schedule, config.diffusion_steps),
        model_mean_type=PREDICTIONS[config.prediction],
        model_var_type=VARIANCES[config.variance],
        loss_type=LOSSES[config.loss_type],
        rescale_timesteps=config.rescale_timesteps,
        loss_weighting=weighting,
    )


def create_noise_process(config: NoiseConfig) -> SpacedDiffusion:
    """The process of that noise, for a network that does not denoise but must know how images get noisy."""
    return create_gaussian_diffusion(DiffusionConfig(**{f.name: getattr(config, f.name) for f in fields(NoiseConfig)}))
