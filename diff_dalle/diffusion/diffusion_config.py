"""Settings of a diffusion process, and the process built from them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import fields

import numpy as np

from ..config import Fault, faults_of, named, option, settings
from .gaussian_diffusion import GaussianDiffusion, SpacedDiffusion
from .log_snr import LogSnrProcess
from .log_snr_config import LogSnrConfig
from .losses import LOSSES, MIN_SNR_GAMMA, P2_GAMMA, P2_K, is_bound, min_snr_weights, p2_weights
from .parametrization import PREDICTIONS, TARGETS, VARIANCES, LossType
from .schedules import MAX_STEPS, SCHEDULES, get_named_beta_schedule
from .spacing import check_spacing, space_timesteps, spaced_steps

FLOW = "flow"  # a noise schedule in continuous time, and a prediction type that goes with it
TrainingProcess = GaussianDiffusion | LogSnrProcess


@settings
class NoiseConfig:
    """Diffusion process"""

    diffusion_steps: int = option(1000, "number of noising steps T in training", least=1, most=MAX_STEPS)
    noise_schedule: str = option("linear", "noise schedule", choices=SCHEDULES)
    rescale_timesteps: bool = option(False, "scale the network's timesteps to 0–1000, whatever T is")

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: self.betas, "noise_schedule")

    @property
    def betas(self) -> np.ndarray:
        """[T] float64."""
        return get_named_beta_schedule(self.noise_schedule, self.diffusion_steps)


@settings
class DiffusionConfig(NoiseConfig):
    """Diffusion process"""

    noise_schedule: str = option(
        "linear",
        "noise schedule; flow is (1 − t) x_start + t noise (rectified flow), in continuous time: no diffusion_steps",
        choices=(*SCHEDULES, FLOW),
    )
    prediction: str = option(
        "eps",
        "prediction type of the network; flow is noise − x_start, and requires the noise schedule flow",
        choices=(*PREDICTIONS, FLOW),
    )
    flow_shift: float = option(
        1.0,
        "flow: α/σ is divided by this, in training and sampling; above 1 = more noise, for larger images",
        needs=("noise_schedule", FLOW),
        above=0,
    )
    loss_space: str | None = option(
        None,
        "flow: quantity whose error is the loss, converted from that of the prediction; none = the prediction",
        choices=TARGETS,
        needs=("noise_schedule", FLOW),
    )
    variance: str = option(
        "fixed_large",
        "variance of a sampling step; learned variances double the output channels",
        choices=VARIANCES,
    )
    loss_type: str = option(
        "mse",
        "training loss: an error (plus the variational term of a learned variance), the variational bound (kl, "
        "rescaled_kl), or one of your own (--import)",
        choices=LOSSES,
    )
    learned_variance_constrain_frac: bool = option(
        False,
        "keep a learned variance between the two fixed ones, by a sigmoid of its fraction",
        needs=("variance", "learned_range"),
    )
    vb_loss_weight: float | None = option(
        None,
        "weight of the variational term of a learned variance, in bits per dimension of one step; none = 1 with mse, "
        "else T/1000",
        needs=("variance", "learned", "learned_range"),
        least=0,
    )
    loss_weighting: str = option(
        "none", "weighting of the error by signal-to-noise ratio (SNR)", choices=("none", "min_snr", "p2")
    )
    min_snr_gamma: float = option(
        MIN_SNR_GAMMA,
        "min_snr: SNR above which the weight of the eps loss is gamma / SNR",
        needs=("loss_weighting", "min_snr"),
        above=0,
    )
    p2_k: float = option(
        P2_K, "p2: k in the weight 1 / (k + SNR)^gamma of the eps loss", needs=("loss_weighting", "p2"), above=0
    )
    p2_gamma: float = option(
        P2_GAMMA, "p2: gamma in the weight 1 / (k + SNR)^gamma of the eps loss", needs=("loss_weighting", "p2"), least=0
    )

    def faults(self) -> Iterator[Fault]:
        if self.is_flow:
            yield from self._faults_of_flow()
        else:
            yield from super().faults()
            if self.prediction == FLOW:
                remedy = f"set {named('noise_schedule')} to flow, or this to v"
                yield Fault.of(self, "prediction", f"{named('noise_schedule')} is {self.noise_schedule}: {remedy}")
        if self.loss_weighting != "none" and is_bound(LOSSES[self.loss_type]):
            loss = named("loss_type")
            rule = f"the variational bound ({loss} {self.loss_type}) has its own weights"
            yield Fault.of(self, "loss_weighting", f"{rule}: set it to none, or {loss} to rescaled_mse")

    def _faults_of_flow(self) -> Iterator[Fault]:
        schedule = f"{named('noise_schedule')} flow"
        for name in ("diffusion_steps", "rescale_timesteps"):
            if getattr(self, name) != getattr(DiffusionConfig, name):
                yield Fault.of(self, name, f"{schedule} has no steps of training: leave it out")
        if self.prediction not in TARGETS:
            yield Fault.of(self, "prediction", f"{schedule} has {', '.join(TARGETS)}: set it to one of them")
        if self.variance_is_learned:
            yield Fault.of(self, "variance", f"{schedule} learns none: set it to fixed_small or fixed_large")
        if is_bound(loss := LOSSES[self.loss_type]) or loss is LossType.RESCALED_MSE:
            yield Fault.of(self, "loss_type", f"{schedule} has no variational term: set it to mse, l1 or huber")
        if self.loss_space and self.loss_weighting != "none":
            rule = f"{named('loss_space')} weighs the error too: leave one of them out"
            yield Fault.of(self, "loss_weighting", rule)

    @property
    def is_flow(self) -> bool:
        """Whether the process is in continuous time, that of ``flow``."""
        return self.noise_schedule == FLOW

    @property
    def flow(self) -> LogSnrConfig:
        """The process of the noise schedule flow. The network's time input is t × 1,000, as with rescaled steps."""
        # The weights are those of ``create_gaussian_diffusion``: of the error of eps, min_snr's told of x_start.
        space, weight, limit = {
            "none": (self.loss_space, "none", LogSnrConfig.loss_space_limit),
            "min_snr": ("x_start", "min_snr", 0.0),
            "p2": ("eps", "p2", 0.0),
        }[self.loss_weighting]
        return LogSnrConfig(
            FLOW,
            shift=self.flow_shift,
            scaler="lerp",
            prediction=self.prediction,
            noise_condition="flow_steps",
            loss_weighting=(weight,),
            loss_space=space,
            loss_space_limit=limit,
            p2_k=self.p2_k,
            p2_gamma=self.p2_gamma,
            min_snr_gamma=self.min_snr_gamma,
        )

    @property
    def variance_is_learned(self) -> bool:
        """Whether the network has twice the output channels, the second half for the variance."""
        return VARIANCES[self.variance].is_learned


def training_process(config: DiffusionConfig) -> TrainingProcess:
    """The process that a network is trained in. ``SamplerConfig.process`` gives that of its sampling."""
    return LogSnrProcess(config.flow, LOSSES[config.loss_type]) if config.is_flow else create_gaussian_diffusion(config)


def create_gaussian_diffusion(config: DiffusionConfig, respacing: str = "", spacing: str = "even") -> SpacedDiffusion:
    """The process in discrete steps described by ``config``.

    respacing: steps to keep, as for ``space_timesteps``; empty = all steps.
    spacing:   of SPACINGS, for a ``respacing`` that is a number of steps.

    Raises InputError if there are no such steps, and for the noise schedule flow.
    """
    betas = config.betas
    steps: Collection[int] = space_timesteps(config.diffusion_steps, respacing or [config.diffusion_steps])
    if spacing != "even":
        check_spacing(spacing, respacing)
        steps = spaced_steps(np.cumprod(1 - betas), len(steps), spacing)
    weighting = {
        "none": None,
        "min_snr": functools.partial(min_snr_weights, gamma=config.min_snr_gamma),
        "p2": functools.partial(p2_weights, k=config.p2_k, gamma=config.p2_gamma),
    }[config.loss_weighting]
    return SpacedDiffusion(
        use_timesteps=steps,
        betas=betas,
        model_mean_type=PREDICTIONS[config.prediction],
        model_var_type=VARIANCES[config.variance],
        loss_type=LOSSES[config.loss_type],
        rescale_timesteps=config.rescale_timesteps,
        loss_weighting=weighting,
        constrain_variance=config.learned_variance_constrain_frac,
        vb_loss_weight=config.vb_loss_weight,
    )


def create_noise_process(config: NoiseConfig) -> SpacedDiffusion:
    """The noising process, for a network that sees noisy images but does not denoise."""
    return create_gaussian_diffusion(DiffusionConfig(**{f.name: getattr(config, f.name) for f in fields(NoiseConfig)}))
