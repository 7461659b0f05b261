"""Schedules of log-SNR: their values, ends and combinations."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from diff_dalle.diffusion import LOG_SNR_SCHEDULES, LogSnrConfig, LogSnrProcess, get_named_beta_schedule
from diff_dalle.diffusion.log_snr_schedules import (
    NOISE_CONDITIONS,
    cosine_log_snr,
    cosine_time,
    discretized,
    interpolate,
    sqrt_log_snr,
    stable_diffusion_log_snr,
    stable_diffusion_time,
)

T = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)


def logit(p):
    return math.log(p / (1 - p))


VALUES = {
    "cosine": [9.2102, 1.7114, -0.0246, -1.7803, -9.2102],
    "cosine2": [15, 1.7609, 0, -1.7609, -15],
    "linear": [10, 5, 0, -5, -10],
    "sqrt": [logit(0.99), logit(1 - 0.2501**0.5), logit(1 - 0.5001**0.5), logit(1 - 0.7501**0.5), -9.2102],
    "flow": [15, 2 * math.log(3), 0, -2 * math.log(3), -15],
    "edm": [-14 * math.log(t * 80 ** (1 / 7) + (1 - t) * 0.002 ** (1 / 7)) for t in T.tolist()],
    "edm_train": [13.8082, 2.4 + 2.4 * 0.67449, 2.4, 2.4 - 2.4 * 0.67449, -9.0082],
    "stable_diffusion": [logit(1 - 0.00085), 0.7273, -0.9594, -2.8152, logit(0.00466)],
}


@pytest.mark.parametrize("name", LOG_SNR_SCHEDULES)
def test_schedules_have_their_values_and_fall(name):
    found, t = LOG_SNR_SCHEDULES[name](T), torch.linspace(0, 1, 1001, dtype=torch.float64)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(VALUES[name], abs=1e-3)
    log_snr = LOG_SNR_SCHEDULES[name](t)
    assert log_snr.isfinite().all() and (log_snr.diff() <= 0).all() and log_snr[0] > 4.5 and log_snr[-1] < -5
    single = LOG_SNR_SCHEDULES[name](t.float())  # devices without double precision
    assert single.dtype == torch.float32 and single.isfinite().all()
    assert_close(single[10:-10].double(), log_snr[10:-10], atol=1e-3, rtol=1e-3)


def test_cosine_is_the_discrete_cosine_schedule():
    discrete = np.cumprod(1 - get_named_beta_schedule("cosine", 200))[9:190]
    times = torch.arange(10, 191, dtype=torch.float64) / 200
    np.testing.assert_allclose(torch.sigmoid(cosine_log_snr(times)), discrete, rtol=1e-9)


@pytest.mark.parametrize(("name", "place"), [("cosine2", torch.atan), ("edm", lambda sigma: sigma ** (1 / 7))])
def test_an_angle_or_a_root_moves_at_constant_speed(name, place):
    steps = place(torch.exp(-LOG_SNR_SCHEDULES[name](T) / 2)).diff()
    assert_close(steps, steps.mean().expand(4))


def test_stable_diffusion_has_the_values_of_its_steps():
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alphas_cumprod = torch.from_numpy(np.cumprod(1 - betas))
    t = torch.arange(1000, dtype=torch.float64) / 999
    assert_close(torch.sigmoid(stable_diffusion_log_snr(t)), alphas_cumprod)
    between = stable_diffusion_log_snr((t[3:4] + t[4:5]) / 2)
    assert_close(between, torch.logit(alphas_cumprod)[3:5].mean()[None])


def test_inverses():
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    assert_close(cosine_time(cosine_log_snr(t)), t)
    assert_close(stable_diffusion_time(stable_diffusion_log_snr(t)), t)
    beyond = torch.tensor([20.0, -20.0], dtype=torch.float64)
    assert cosine_time(beyond).tolist() == pytest.approx([0.0023, 0.9936], abs=5e-5)
    assert stable_diffusion_time(beyond).tolist() == [0, 1]


@pytest.mark.parametrize("schedule", [cosine_log_snr, sqrt_log_snr])
def test_squeezed_instead_of_clamped(schedule):
    """The ends do not stand still."""
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    squeezed, clamped = torch.sigmoid(schedule(t, squeeze=True)), torch.sigmoid(schedule(t))
    assert (squeezed.diff() < 0)[:-1].all() and squeezed[-1].item() == pytest.approx(1e-4)
    assert_close(squeezed, clamped, atol=2e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 7, 25, 1000])
def test_discretized(count):
    """Each time is rounded up to one of ``count``, which are all as probable and kept as they are."""
    times = torch.arange(1, count + 1, dtype=torch.float64) / count
    snapped = discretized(lambda t: t, count)
    assert torch.equal(snapped(times), times) and torch.equal(snapped(torch.zeros(1).double()), times[:1])
    u = (torch.arange(50 * count, dtype=torch.float64) + 0.5) / (50 * count)
    assert snapped(u).unique(return_counts=True)[1].tolist() == [50] * count


def test_interpolate():
    knots, values = torch.tensor([0.0, 1, 4]), torch.tensor([5.0, 3, 6])
    x = torch.tensor([-1.0, 0, 0.5, 1, 2, 4, 9])
    assert interpolate(x, knots, values).tolist() == [5, 5, 4, 3, 4, 6, 6]


def test_combinations_in_a_process():
    def log_snr(**settings):
        return LogSnrProcess(LogSnrConfig(**settings)).log_snr(T)

    both = log_snr(log_snr_schedule="linear", log_snr_interpolation="edm")
    assert_close(both, T * LOG_SNR_SCHEDULES["linear"](T) + (1 - T) * LOG_SNR_SCHEDULES["edm"](T))
    few = log_snr(log_snr_schedule="linear", log_snr_steps=3)
    assert few.tolist() == pytest.approx([10 - 20 * t / 3 for t in (1, 1, 2, 3, 3)])
    squeezed = log_snr(log_snr_schedule="linear", log_snr_interpolation="cosine", squeeze_log_snr=True)
    expected = T * LOG_SNR_SCHEDULES["linear"](T) + (1 - T) * cosine_log_snr(T, squeeze=True)
    assert_close(squeezed, expected)


def test_schedules_to_sample_with():
    """As in training, or the one that is given; a distribution of training needs another."""

    def levels(**settings):
        return torch.logit(torch.from_numpy(LogSnrProcess(LogSnrConfig(**settings)).steps(4).alphas_cumprod))

    for name in ("linear", "edm"):
        assert_close(levels(log_snr_schedule=name), LOG_SNR_SCHEDULES[name](T)[1:])
        assert_close(levels(sampling_schedule=name), LOG_SNR_SCHEDULES[name](T)[1:])
    assert_close(levels(log_snr_schedule="edm_train"), LOG_SNR_SCHEDULES["edm"](T)[1:])
    assert_close(levels(log_snr_schedule="adaptive"), cosine_log_snr(T)[1:])
    flow = levels(log_snr_schedule="edm_train", sampling_schedule="flow")
    assert_close(flow, LOG_SNR_SCHEDULES["flow"](T)[1:])


def test_no_interpolation_rises():
    """Near t = 0, where edm has less noise than cosine, the mixture would rise, but for its limits."""
    t = torch.linspace(0, 1, 501)
    for first, second in itertools.product(LOG_SNR_SCHEDULES, repeat=2):
        process = LogSnrProcess(LogSnrConfig(log_snr_schedule=first, log_snr_interpolation=second))
        assert (process.log_snr(t).diff() < 1e-12).all(), (first, second)
        assert (np.diff(process.steps(500).alphas_cumprod) < 0).all()


# ------------------------------------------------------------------------------- what a network is told of the noise

LEVELS = [9.2102, 1.7114, 0.0, -1.7803, -9.2102]
CONDITIONS = {
    "cosine": [0.0023, 0.25, 0.4960, 0.75, 0.9936],
    "stable_diffusion": [0, 0.1363, 0.3542, 0.6183, 1],
    "flow_steps": [1000 / (1 + math.exp(x / 2)) for x in LEVELS],
    "rectified_flow": [1 / (1 + math.exp(-x / 2)) for x in LEVELS],
    "sigmoid": [1e-4, 0.1530, 0.5, 0.8557, 0.9999],
    "edm": [-x / 8 for x in LEVELS],
    "log_snr": LEVELS,
    "sigma": [math.exp(-x / 2) for x in LEVELS],
}


def condition(**settings):
    return LogSnrProcess(LogSnrConfig(**settings)).condition(torch.tensor(LEVELS, dtype=torch.float64))


@pytest.mark.parametrize("name", NOISE_CONDITIONS)
def test_values_of_conditions(name):
    found = condition(noise_condition=name)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(CONDITIONS[name], abs=1e-4)


def test_units_of_the_data():
    assert condition(noise_condition="sigma", sigma_data=0.5).tolist() == pytest.approx(
        [0.5 * value for value in CONDITIONS["sigma"]], rel=1e-4
    )


def test_a_shifted_schedule_looks_like_a_later_time():
    """The network is told the noise there is, not the time."""
    for process in (LogSnrProcess(LogSnrConfig(shift=2.0)), LogSnrProcess()):
        steps = process.steps(4, shift=2.0 / process.config.shift)
        assert steps.time_inputs.tolist() == pytest.approx([0.4441, 0.7056, 0.8701, 0.9936], abs=1e-4)
        seen = []
        for t in range(4):
            seen.append(steps.model_steps(torch.zeros(2, 1, 1, 1), t))
        assert torch.equal(torch.stack(seen)[:, 0], torch.from_numpy(steps.time_inputs))


@pytest.mark.parametrize("name", NOISE_CONDITIONS)
def test_levels(name):
    """Integers from 0 at the clean end of the schedule to n − 1 at the noisy one."""
    process = LogSnrProcess(LogSnrConfig(noise_condition=name, noise_condition_steps=10))
    t = torch.linspace(0, 1, 2001)
    levels = process.condition(process.log_snr(t))
    assert levels[0] == 0 and levels[-1] == 9 and (levels.diff() >= 0).all() and (levels == levels.floor()).all()
    plain = LogSnrProcess(LogSnrConfig(noise_condition=name))
    share = plain.condition(plain.log_snr(t))
    share = (share - share[0]) / (share[-1] - share[0])
    torch.testing.assert_close(levels, (share * 10).floor().clamp(max=9), atol=1, rtol=0)
    assert (levels != (share * 10).floor().clamp(max=9)).sum() < 10  # but for rounding
