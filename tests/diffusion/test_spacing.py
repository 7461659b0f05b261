"""Spacings: the steps and levels that each takes, and where they are chosen."""

import numpy as np
import pytest
import torch
from exact_denoisers import ExactModel, solve
from refusing import refused

from diff_dalle.config import to_dict
from diff_dalle.diffusion import DiffusionConfig, LogSnrConfig, LogSnrProcess, create_gaussian_diffusion
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.diffusion.schedules import SCHEDULES
from diff_dalle.diffusion.spacing import (
    LEVEL_SPACINGS,
    SPACINGS,
    STEP_SPACINGS,
    TIME_SPACINGS,
    default_spacing,
    spaced_steps,
)

#: Of 1000 linear steps, as diffusers 0.42 takes them (linspace, leading, trailing, Lu's lambdas, Karras's sigmas); of
#: flow, the steps whose σ / (α + σ) has the λ nearest to that of even ones.
TEN = {
    "even": [0, 111, 222, 333, 444, 555, 666, 777, 888, 999],
    "leading": [0, 100, 200, 300, 400, 500, 600, 700, 800, 900],
    "trailing": [99, 199, 299, 399, 499, 599, 699, 799, 899, 999],
    "flow": [0, 37, 86, 147, 219, 302, 395, 500, 634, 999],
    "log_snr": [0, 5, 22, 73, 202, 410, 603, 757, 886, 999],
    "karras": [0, 18, 102, 301, 511, 663, 775, 864, 937, 999],
}


def alphas_cumprod(schedule, steps=1000):
    return np.cumprod(1 - SCHEDULES[schedule](steps))


def half_log_snr(alphas_cumprod):
    return 0.5 * np.log(alphas_cumprod / (1 - alphas_cumprod))


def test_rounding_is_of_each_step():
    """30 and 7 do not divide 1000."""
    levels = alphas_cumprod("linear")
    assert spaced_steps(levels, 7, "trailing") == [142, 285, 428, 570, 713, 856, 999]
    assert spaced_steps(levels, 30, "leading") == list(range(0, 990, 33))


def test_levels_of_the_papers():
    """Even in λ; even in σ/(α + σ); even in the seventh root of σ/α. Both ends are included."""
    flow, log_snr, karras = (LEVEL_SPACINGS[name](-5.0, 4.0, 7) for name in ("flow", "log_snr", "karras"))
    assert (flow[0], flow[-1]) == pytest.approx((-5, 4))
    alpha, sigma = np.sqrt(1 / (1 + np.exp(-2 * flow))), np.sqrt(1 / (1 + np.exp(2 * flow)))
    assert np.ptp(np.diff(sigma / (alpha + sigma))) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(log_snr, [-5, -3.5, -2, -0.5, 1, 2.5, 4])
    first, last = np.exp(5.0) ** (1 / 7), np.exp(-4.0) ** (1 / 7)
    np.testing.assert_allclose(np.exp(-karras), [(first + i / 6 * (last - first)) ** 7 for i in range(7)])


@pytest.mark.parametrize("spacing", LEVEL_SPACINGS)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_each_level_is_that_of_the_nearest_trained_step(schedule, spacing):
    """Except where that is taken already: then a neighbor is, since every step is taken once."""
    levels = half_log_snr(alphas_cumprod(schedule))
    wanted = LEVEL_SPACINGS[spacing](levels[-1], levels[0], 20)[::-1]
    nearest = np.abs(levels[:, None] - wanted).argmin(0)
    found = np.array(spaced_steps(alphas_cumprod(schedule), 20, spacing))
    alone = np.array([np.sum(np.abs(nearest - step) <= 8) == 1 for step in nearest])
    assert alone.sum() >= 6 and (found[alone] == nearest[alone]).all()


def test_without_signal_at_the_end_the_levels_reach_to_the_last_one_that_has_any():
    """The infinite λ of the last step, which is taken too, is the end of no interval."""
    levels = half_log_snr(alphas_cumprod("jsd")[:-1])
    wanted = LEVEL_SPACINGS["log_snr"](levels[-1], levels[0], 6)[::-1]
    found = spaced_steps(alphas_cumprod("jsd"), 6, "log_snr")
    np.testing.assert_allclose(levels[found[1:-1]], wanted[1:-1], atol=0.3)
    assert found[-1] == 999


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 3, 10, 25, 50])
def test_as_many_steps_as_asked_for_each_once(schedule, spacing, count):
    """Of 50, on every schedule, one that ends without any signal included."""
    steps = spaced_steps(alphas_cumprod(schedule, 50), count, spacing)
    assert len(steps) == count and (np.diff(steps) > 0).all() and steps[0] >= 0 and steps[-1] < 50
    if count == 50:
        assert steps == list(range(50))
    if count > 1 and spacing in ("even", *LEVEL_SPACINGS):
        assert (steps[0], steps[-1]) == (0, 49)
    if spacing in ("trailing", *LEVEL_SPACINGS):
        assert steps[-1] == 49  # a single step too starts from noise


def test_the_sampler_s_setting_reaches_the_process():
    config = DiffusionConfig(noise_schedule="linear")
    for spacing, steps in TEN.items():
        process = SamplerConfig(steps=10, spacing=spacing).process(config)
        assert process.timestep_map == steps
        np.testing.assert_allclose(process.alphas_cumprod, alphas_cumprod("linear")[steps], rtol=1e-9)
    assert create_gaussian_diffusion(config, "10", "karras").timestep_map == TEN["karras"]
    assert create_gaussian_diffusion(config, "10").timestep_map == TEN["even"]


def test_the_default_follows_the_schedule():
    """Even in log-SNR on a linear schedule only; steps that are listed are taken as they are."""
    assert {schedule for schedule in SCHEDULES if default_spacing(schedule) != "flow"} == {"linear"}
    linear, cosine = DiffusionConfig(noise_schedule="linear"), DiffusionConfig(noise_schedule="cosine")
    assert SamplerConfig(steps=10).process(linear).timestep_map == TEN["log_snr"]
    flow = spaced_steps(alphas_cumprod("cosine"), 10, "flow")
    assert SamplerConfig(steps=10).process(cosine).timestep_map == flow
    straight = SamplerConfig(steps=4).process(DiffusionConfig(noise_schedule="flow"))
    assert straight.times.tolist() == [0.25, 0.5, 0.75, 1.0]
    for respacing, steps in (("ddim10", TEN["leading"]), ("", list(range(1000))), ("1,1", [0, 500])):
        assert SamplerConfig(timestep_respacing=respacing).process(linear).timestep_map == steps


def test_the_defaults_pay():
    """At 20 evaluations they divide UniPC's error by 3 on a linear schedule and by 1.3 on a cosine one. log_snr
    would more than double it on a cosine one."""

    def error(schedule, spacing):
        config = DiffusionConfig(noise_schedule=schedule, variance="fixed_small")
        whole = create_gaussian_diffusion(config)

        def result(count, spacing):
            process = create_gaussian_diffusion(config, str(count), spacing)
            return solve("unipc", process, ExactModel(process, whole, scale=0.3), dtype=torch.float64)

        return (result(20, spacing) - result(500, "even")).square().mean().sqrt()

    assert error("linear", "log_snr") < error("linear", "even") / 3
    assert error("cosine", "log_snr") > error("cosine", "even") * 2
    assert error("cosine", "flow") < error("cosine", "even") / 1.3


def test_impossible_spacings_are_refused():
    with refused("spacing is 'evn', but .*; did you mean even"):
        SamplerConfig(spacing="evn")
    for respacing in ("10,15,20", "ddim25", ""):
        with refused("spacing and timestep_respacing exclude each other"):
            SamplerConfig(timestep_respacing=respacing, spacing="karras")
    with refused("leading has no stride that takes 30 of 50 steps: .* at most 25"):
        create_gaussian_diffusion(DiffusionConfig(diffusion_steps=50), "30", "leading")
    with refused("takes 60 steps from a section of only 50"):
        create_gaussian_diffusion(DiffusionConfig(diffusion_steps=50), "60", "karras")
    with refused("keeps no step"):
        create_gaussian_diffusion(DiffusionConfig(diffusion_steps=50), "0", "log_snr")


def test_listed_steps_replace_a_checkpoint_s_spacing():
    says = SamplerConfig("ddim", 10, spacing="karras")
    assert says.changed(steps=20) == SamplerConfig("ddim", 20, spacing="karras")
    assert says.changed(timestep_respacing="10,20") == SamplerConfig(timestep_respacing="10,20")
    assert says.changed(spacing="even") == SamplerConfig("ddim", 10, spacing="even")
    with refused("spacing and timestep_respacing exclude"):
        says.changed(timestep_respacing="10,20", spacing="even")
    assert "spacing" in to_dict(says)


# --------------------------------------------------------------------------------------------------- continuous time


@pytest.mark.parametrize("schedule", ["cosine", "edm", "flow"])
@pytest.mark.parametrize("spacing", LEVEL_SPACINGS)
def test_levels_in_continuous_time(schedule, spacing):
    """Exactly those of the spacing between the ends of the range, each at its own time on the schedule."""
    process = LogSnrProcess(LogSnrConfig(log_snr_schedule=schedule))
    steps = process.steps(8, shift=1.5, t_start=0.9, t_end=0.1, spacing=spacing)
    shift = 2 * np.log(1.5)
    noisy, clean = (process.log_snr(torch.tensor([0.9, 0.1], dtype=torch.float64)).numpy() - shift) / 2
    found = half_log_snr(steps.alphas_cumprod)
    np.testing.assert_allclose(found, LEVEL_SPACINGS[spacing](noisy, clean, 8)[::-1], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        process.log_snr(torch.from_numpy(steps.times)).numpy() - shift, 2 * found, rtol=1e-6, atol=1e-9
    )
    assert 0.1 <= steps.times[0] < 0.11 and steps.times[-1] == pytest.approx(0.9)


def test_spacings_that_count_steps_of_training_are_refused_in_continuous_time():
    for spacing in set(STEP_SPACINGS) - {"even"}:
        with refused(f"spacing is {spacing}, but .* one of {', '.join(TIME_SPACINGS)}"):
            LogSnrProcess().steps(10, spacing=spacing)
