"""Settings and the process built from them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from network_making import seeded
from refusing import refused
from torch.testing import assert_close

from diff_dalle.config import InputError
from diff_dalle.diffusion import SCHEDULES, DiffusionConfig, LossType, ModelMeanType, create_gaussian_diffusion
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.losses import LOSSES, mean_error
from diff_dalle.diffusion.parametrization import PREDICTIONS, VARIANCES
from diff_dalle.diffusion.sampling import SamplerConfig

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


# ------------------------------------------------------------------------------------------------- straight lines

T = torch.tensor([0.05, 0.3, 0.6, 0.9], dtype=torch.float64)
X, NOISE = (seeded(4, 2, 3, 3, seed=seed).double() for seed in (1, 2))
STRAIGHT = {"eps": NOISE, "x_start": X, "flow": NOISE - X}


def make_flow(**settings):
    return training_process(DiffusionConfig(noise_schedule="flow", **settings))


@pytest.mark.parametrize("prediction", [*STRAIGHT, "v"])
def test_a_flow_is_a_straight_line(prediction):
    """The network sees (1 − t) x_start + t noise and t × 1,000, and its error is the squared one."""
    process, seen, t = make_flow(prediction=prediction), [], T.view(-1, 1, 1, 1)
    losses = process.training_losses(lambda *given: seen.extend(given) or torch.zeros_like(X), X, T, noise=NOISE)
    assert_close(seen[0], (1 - t) * X + t * NOISE)
    assert_close(seen[1].double(), 1000 * T, rtol=1e-6, atol=0)
    target = STRAIGHT.get(prediction, (1 - t) * NOISE - t * X)
    assert_close(losses["loss"], target.square().mean((1, 2, 3)))


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_the_shift_of_a_flow(shift):
    """Esser et al. 2024, equation 23; alike in training and in sampling."""
    process, shifted = make_flow(flow_shift=shift), shift * T / (1 + (shift - 1) * T)
    assert_close(process.condition(process.log_snr(T)).double(), 1000 * shifted, rtol=1e-6, atol=0)
    config = DiffusionConfig(noise_schedule="flow", flow_shift=shift)
    steps = SamplerConfig(steps=10).process(config)
    assert_close(torch.tensor(steps.times), (torch.arange(10) + 1.0).double() / 10)
    again = process.condition(process.log_snr(torch.tensor(steps.times)))
    assert_close(torch.tensor(steps.time_inputs), again)


@pytest.mark.parametrize("prediction", ["eps", "x_start"])
@pytest.mark.parametrize(
    "weighting",
    [{"loss_weighting": "min_snr", "min_snr_gamma": 2.0}, {"loss_weighting": "p2", "p2_k": 0.5, "p2_gamma": 0.7}],
)
def test_weights_of_a_flow_are_those_of_other_schedules(weighting, prediction):
    """At the same signal-to-noise ratio, over nearly all of it."""
    settings = {"prediction": prediction, **weighting}
    steps, process = create_gaussian_diffusion(DiffusionConfig(**settings)), make_flow(**settings)
    found = process.loss_weight(torch.from_numpy(np.log(steps.snr)))
    np.testing.assert_allclose(found, steps.loss_weights, rtol=1e-5)


def test_the_variance_of_a_flow_is_that_of_its_setting():
    large, small = (
        SamplerConfig(steps=5).process(DiffusionConfig(noise_schedule="flow", variance=name)).truncated(4)
        for name in ("fixed_large", "fixed_small")
    )
    x = torch.zeros(1, 1, 1, 1)
    assert large.predict(x, x, 3).variance == pytest.approx(large.betas[3])
    assert small.predict(x, x, 3).variance == pytest.approx(small.posterior_variance[3])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"diffusion_steps": 500}, "diffusion_steps is 500, but noise_schedule flow has no steps of training"),
        ({"rescale_timesteps": True}, "rescale_timesteps is True, but noise_schedule flow has no steps"),
        ({"prediction": "previous_x"}, "prediction is 'previous_x', but .* eps, x_start, v, flow"),
        ({"variance": "learned_range"}, "variance is 'learned_range', but .* fixed_small or fixed_large"),
        ({"loss_type": "rescaled_mse"}, "loss_type is 'rescaled_mse', but .* set it to mse, l1 or huber"),
        ({"loss_weighting": "p2", "loss_space": "v"}, "loss_weighting is 'p2', but loss_space weighs the error too"),
        ({"flow_shift": 0.0}, "flow_shift is 0, but must be above 0"),
        ({"loss_space": "previous_x"}, "loss_space is 'previous_x', but must be one of"),
        ({"noise_schedule": "cosine", "prediction": "flow"}, "prediction is 'flow', but noise_schedule is cosine"),
    ],
)
def test_what_a_flow_does_not_have_is_refused(settings, words):
    with refused(words):
        DiffusionConfig(**{"noise_schedule": "flow", **settings})
    DiffusionConfig(noise_schedule="flow", variance="fixed_small", prediction="flow", loss_space="x_start")


def test_steps_that_a_flow_does_not_have_are_refused():
    config = DiffusionConfig(noise_schedule="flow")
    for sampler, words in (
        (SamplerConfig(timestep_respacing="ddim25"), "timestep_respacing is 'ddim25', but .* set steps"),
        (SamplerConfig(spacing="trailing"), "spacing is trailing, but .* no steps of training"),
        (SamplerConfig(steps=0), "steps is 0, but must be at least 1"),
    ):
        with refused(words):
            sampler.process(config)
    with refused("noise_schedule"):
        create_gaussian_diffusion(config)


def test_a_loss_of_ones_own_gives_an_error_for_each_element_or_sample():
    output, target = torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
    for loss in (lambda a, b: (a - b).abs() * 3, lambda a, b: 3 * (a - b).abs().flatten(1).mean(1)):
        name, error = mean_error(loss, output, target)
        assert name == "error" and torch.equal(error, torch.full((2,), 3.0))
    with pytest.raises(InputError, match=r"returned shape \[\], but must return the error of each element \[2, 3"):
        mean_error(lambda a, b: (a - b).abs().mean(), output, target)
