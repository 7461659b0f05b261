"""Samplers against exact denoisers."""

import functools
import itertools
import math

import pytest
import torch
from exact_denoisers import (
    CENTERS,
    ExactFlow,
    ExactModel,
    check_distribution,
    check_ends_at_the_data,
    even_betas,
    solve,
)
from torch.testing import assert_close

from diff_dalle.diffusion import (
    SAMPLERS,
    DiffusionConfig,
    GaussianDiffusion,
    LossType,
    ModelMeanType,
    ModelVarType,
    SpacedDiffusion,
    get_named_beta_schedule,
    samplers,
    space_timesteps,
)
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.parametrization import TARGETS
from diff_dalle.diffusion.samplers import ancestral, ddim, ddim_inversion, lcm
from diff_dalle.diffusion.sampling import SamplerConfig

EPS, X_START, V = ModelMeanType.EPSILON, ModelMeanType.START_X, ModelMeanType.VELOCITY
FIXED, LEARNED = ModelVarType.FIXED_SMALL, ModelVarType.LEARNED_RANGE
PROCESSES = [  # without jsd and eps: in the last step of jsd, eps does not determine x_start
    ("linear", EPS, FIXED),
    ("linear", EPS, LEARNED),
    ("cosine", X_START, FIXED),
    ("cosine", V, LEARNED),
    ("jsd", X_START, LEARNED),
    ("jsd", V, FIXED),
]
EVALUATIONS = {"ancestral": 10, "ddim": 10, "dpm++2m": 10, "unipc": 10, "heun": 19, "lcm": 10}  # of 10 steps
ORDERS = {"ddim": 1, "dpm++2m": 2, "unipc": 2, "heun": 2}


def settings(betas, mean=EPS, variance=FIXED):
    return {"betas": betas, "model_mean_type": mean, "model_var_type": variance, "loss_type": LossType.MSE}


@pytest.mark.parametrize(
    ("name", "schedule", "mean", "variance"),
    [
        (name, *process)
        for i, name in enumerate(SAMPLERS)
        for k, process in enumerate(PROCESSES)
        if k in (i % 5, 5)  # the last with each, because it has no signal at T
    ],
)
def test_every_sampler_ends_at_the_data(name, schedule, mean, variance):
    """With three points as data, 25 of 1000 steps end at them, each point in its share; also without signal at T."""
    kwargs = settings(get_named_beta_schedule(schedule, 1000), mean, variance)
    process = SpacedDiffusion(space_timesteps(1000, "25"), **kwargs)
    check_ends_at_the_data(solve(name, process, ExactModel(process, GaussianDiffusion(**kwargs)), clip=True))


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "lcm"])
def test_every_sampler_has_the_right_distribution(name):
    """For a mixture of Gaussians, mean and covariance of 2 000 samples in 100 steps are the data's.

    Not with lcm, for which x_start must be a sample: see ``test_lcm_noises_a_sample_afresh``."""
    process = GaussianDiffusion(**settings(even_betas(100)))
    check_distribution(solve(name, process, ExactModel(process, scale=0.3), count=2000), 0.3)


@functools.cache
def evenly(name, steps):
    process = GaussianDiffusion(**settings(even_betas(steps + 1), variance=LEARNED))
    return solve(name, process, ExactModel(process, scale=0.4), count=64, dtype=torch.float64)


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_accuracy(name):
    """Halving the steps divides the error by 2^order, with a learned variance too."""
    exact = evenly("unipc", 1280)
    errors = [(evenly(name, steps) - exact).square().mean().sqrt() for steps in (40, 80, 160)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) > ORDERS[name] - 0.2


@functools.cache
def respaced(name, steps, schedule, scale=0.3):
    kwargs = settings(get_named_beta_schedule(schedule, 1000))
    process = SpacedDiffusion(space_timesteps(1000, [steps]), **kwargs)
    return solve(name, process, ExactModel(process, GaussianDiffusion(**kwargs), scale=scale), dtype=torch.float64)


def distance(x, *exact):
    """From the result of 500 steps."""
    return (x - respaced("unipc", 500, *exact)).square().mean().sqrt()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_second_order_pays_with_few_uneven_steps(schedule):
    """With 20 evaluations, evenly spaced in t, the multistep solvers are at least twice as accurate as DDIM."""
    first, *second = (distance(respaced(name, 20, schedule), schedule) for name in ("ddim", "dpm++2m", "unipc"))
    assert max(second) < first / 2


def test_heun_ends_as_published_from_15_steps_on(monkeypatch):
    """There the step before the image is not limited, which at 25 steps divides the error by 1.3 at least. With fewer
    steps it is, as are all others, without which the first of a cosine schedule would leave the range of images."""

    def error(schedule, steps, limit, scale=0.3):
        monkeypatch.setattr(samplers, "_HEUN_STEPS", limit)
        return distance(respaced.__wrapped__("heun", steps, schedule, scale), schedule, scale)

    for schedule, gain in (("linear", 1.8), ("cosine", 1.3)):
        assert error(schedule, 25, 15) < error(schedule, 25, 1000) / gain
        assert error(schedule, 15, 15) < error(schedule, 15, 1000)
        assert error(schedule, 5, 15, 0.05) == error(schedule, 5, 1000, 0.05) < error(schedule, 5, 0, 0.05) < 0.6


def test_lcm_noises_a_sample_afresh():
    """Each step is q_sample of x_start; with a network whose x_start are samples, its results are these samples."""
    process = GaussianDiffusion(**settings(even_betas(6), mean=X_START))
    x, steps = torch.randn(64, 2, 1, 1), []

    def model(x, t):
        return CENTERS[(x[:, 0, 0, 0] > 0).long()][..., None, None].to(x.dtype)

    noise = torch.randn(6, 64, 2, 1, 1)
    for step in lcm(process, process.denoiser(model), x, lambda t: noise[t]):
        steps.append(step)
        if step.t:
            assert_close(step.x, process.q_sample(step.x_start, step.t - 1, noise[step.t]))
    assert [step.t for step in steps] == [5, 4, 3, 2, 1, 0] and torch.equal(steps[-1].x, steps[-1].x_start)


def test_evaluations():
    """Each sampler evaluates the network as often as documented."""
    assert EVALUATIONS.keys() == SAMPLERS.keys()
    for name, expected in EVALUATIONS.items():
        process = GaussianDiffusion(**settings(even_betas(10)))
        model = ExactModel(process)
        solve(name, process, model, count=1)
        assert model.calls == expected


def test_inversion_and_back():
    """DDIM from the inverted noise reconstructs the image, more exactly with more steps."""
    images = CENTERS[..., None, None] + 0.2

    def gap(steps):
        process = GaussianDiffusion(**settings(even_betas(steps), variance=LEARNED))
        denoise = process.denoiser(ExactModel(process, scale=0.3), clip_denoised=False)
        *_, noise = ddim_inversion(process, denoise, images)
        *_, back = ddim(process, denoise, noise.x)
        return (back.x - images).abs().max()

    assert gap(200) < 0.02
    assert gap(200) < 0.6 * gap(100)


@pytest.mark.parametrize("variance", ModelVarType)
@pytest.mark.parametrize("mean", ModelMeanType)
def test_samplers_agree_with_guided_diffusions_loops(mean, variance):
    """``ancestral`` and ``ddim`` with float64 coefficients equal p_sample_loop and ddim_sample_loop."""
    process = GaussianDiffusion(**settings(get_named_beta_schedule("linear", 30), mean, variance))

    def model(x, t):
        output = torch.tanh(x) + 0.01 * t.view(-1, 1, 1, 1)
        return torch.cat([output, torch.sin(x)], dim=1) if variance.is_learned else output

    def noise(t):
        return torch.randn(shape)

    shape, denoise = (2, 3, 4, 4), process.denoiser(model)
    for sampler, loop, options in (
        (ancestral, process.p_sample_loop, {}),
        (ddim, process.ddim_sample_loop, {"eta": 0.5}),
    ):
        torch.manual_seed(1)
        expected = loop(model, shape, device="cpu", **options)
        torch.manual_seed(1)
        *_, last = sampler(process, denoise, torch.randn(shape), noise, **options)
        assert_close(last.x, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------- straight lines


def flow(name, steps, prediction="x_start", scale=0.3, **settings):
    """The samples of a flow's exact network."""
    config = DiffusionConfig(noise_schedule="flow", prediction=prediction, variance="fixed_small", **settings)
    process = SamplerConfig(name, steps).process(config)
    model = ExactFlow(training_process(config), scale)
    count, dtype = (256, torch.float32) if scale == 0 else (2000, torch.float64)
    return solve(name, process, model, count, clip=scale == 0, dtype=dtype)


FLOWS = [(name, [*TARGETS][i % len(TARGETS)]) for i, name in enumerate(SAMPLERS)]


@pytest.mark.parametrize(("name", "prediction"), FLOWS)
def test_every_sampler_ends_at_the_data_along_straight_lines(name, prediction):
    check_ends_at_the_data(flow(name, 25, prediction, scale=0.0))


@pytest.mark.parametrize(("name", "prediction"), [each for each in FLOWS if each[0] != "lcm"])
def test_every_sampler_has_the_right_distribution_along_straight_lines(name, prediction):
    check_distribution(flow(name, 100, prediction, flow_shift=2.0), 0.3)


def test_second_order_pays_along_straight_lines():
    """With 20 evaluations; Heun takes two a step."""
    exact = flow("unipc", 300)
    found = {name: flow(name, 10 if name == "heun" else 20) for name in ORDERS}
    errors = {name: (x - exact).square().mean().sqrt() for name, x in found.items()}
    assert max(error for name, error in errors.items() if name != "ddim") < errors["ddim"] / 2
