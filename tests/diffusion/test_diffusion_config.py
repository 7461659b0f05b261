"""Settings and the process built from them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from refusing import refused

from diff_dalle.diffusion import SCHEDULES, DiffusionConfig, LossType, ModelMeanType, create_gaussian_diffusion
from diff_dalle.diffusion.parametrization import LOSSES, PREDICTIONS, VARIANCES

EPSILON = ModelMeanType.EPSILON


def test_defaults_are_guided_diffusions():
    """A thousand linear steps, eps, the large variance, squared error; no respacing."""
    process = create_gaussian_diffusion(DiffusionConfig())
    assert (process.num_timesteps, process.model_mean_type, process.loss_type) == (1000, EPSILON, LossType.MSE)
    assert process.timestep_map == list(range(1000)) and process.loss_weights is None
    assert create_gaussian_diffusion(DiffusionConfig(), "ddim25").timestep_map == list(range(0, 1000, 40))


def test_every_combination_trains_or_is_refused():
    """All predictions, variances, losses and weightings give a finite loss; only weighted bounds are refused."""
    x, t = torch.rand(2, 3, 2, 2), torch.tensor([0, 29])
    for prediction, variance, loss, weighting in itertools.product(
        PREDICTIONS, VARIANCES, LOSSES, ("none", "min_snr", "p2")
    ):
        settings = {"prediction": prediction, "variance": variance, "loss_type": loss, "loss_weighting": weighting}
        if weighting != "none" and loss in ("kl", "rescaled_kl"):
            with refused("loss_weighting"):
                DiffusionConfig(**settings)
            continue
        config = DiffusionConfig(diffusion_steps=30, **settings)
        output = torch.zeros(2, 6 if config.variance_is_learned else 3, 2, 2)
        assert create_gaussian_diffusion(config).training_losses(lambda x, t: output, x, t)["loss"].isfinite().all()  # noqa: B023


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_reach_the_process(schedule):
    """The named table is the process's."""
    process = create_gaussian_diffusion(DiffusionConfig(noise_schedule=schedule, diffusion_steps=50))
    np.testing.assert_allclose(process.betas, SCHEDULES[schedule](50), rtol=1e-9)


def test_weighting_settings_reach_the_loss():
    """gamma and k change the weights according to their formulas."""
    snr = create_gaussian_diffusion(DiffusionConfig()).snr
    min_snr = DiffusionConfig(loss_weighting="min_snr", min_snr_gamma=2.0, prediction="x_start")
    np.testing.assert_allclose(create_gaussian_diffusion(min_snr).loss_weights, np.minimum(snr, 2.0))
    p2 = DiffusionConfig(loss_weighting="p2", p2_k=3.0, p2_gamma=0.5)
    np.testing.assert_allclose(create_gaussian_diffusion(p2).loss_weights, (3 + snr) ** -0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"diffusion_steps": 0},
        {"diffusion_steps": 10},
        {"noise_schedule": "cosin"},
        {"prediction": "epsilon"},
        {"variance": "big"},
        {"loss_type": "l2"},
        {"loss_weighting": "snr"},
        {"min_snr_gamma": 0.0},
        {"p2_k": 0.0},
        {"p2_gamma": -1.0},
    ],
)
def test_bad_settings(settings):
    """Impossible settings are refused, naming them."""
    with refused(next(iter(settings))):
        dataclasses.replace(DiffusionConfig(), **settings)
