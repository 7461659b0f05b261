"""The continuous process: its schedule, targets and losses, and sampling with a discretization of it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_denoisers import ExactModel, check_distribution, check_ends_at_the_data, solve
from network_making import make_generator
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import (
    LOG_SNR_SCHEDULES,
    SAMPLERS,
    GaussianDiffusion,
    GuidanceConfig,
    LogSnrProcess,
    LossType,
    ModelMeanType,
    ModelVarType,
    get_named_beta_schedule,
)
from diff_dalle.diffusion.editing import Edit, EditConfig, shortened
from diff_dalle.diffusion.guidance import guidance_interval
from diff_dalle.diffusion.samplers import Prediction
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.errors import InputError
from diff_dalle.images.signal import PixelSignal
from diff_dalle.models.text_encoder import TextEncoderConfig

EPS, X_START, V = MEANS = (ModelMeanType.EPSILON, ModelMeanType.START_X, ModelMeanType.VELOCITY)
T = torch.tensor([0.0, 0.2, 0.73, 1.0])
X = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
NOISE = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))


def alpha_bar(process):
    """The time input of a network → ᾱ."""
    return lambda t: torch.sigmoid(process.log_snr(t.double()))


# -------------------------------------------------------------------------------------------------- training


def test_the_cosine_schedule():
    """Its values, and those of the discrete cosine schedule at the ends of its steps."""
    process = LogSnrProcess("cosine")
    log_snr = process.log_snr(torch.tensor([0, 0.25, 0.5, 0.75, 1]))
    assert log_snr.dtype == torch.float64 and log_snr.tolist() == pytest.approx(
        [9.2102, 1.7114, -0.0246, -1.7803, -9.2102], abs=1e-4
    )
    discrete = np.cumprod(1 - get_named_beta_schedule("cosine", 200))[9:190]
    times = torch.arange(10, 191, dtype=torch.float64) / 200
    np.testing.assert_allclose(alpha_bar(process)(times), discrete, rtol=1e-9)


@pytest.mark.parametrize("schedule", LOG_SNR_SCHEDULES)
def test_schedules_fall_and_are_variance_preserving(schedule):
    process, t = LogSnrProcess(schedule), torch.linspace(0, 1, 101)
    log_snr = process.log_snr(t)
    assert log_snr.isfinite().all() and (log_snr.diff() <= 0).all() and log_snr[0] > 5 and log_snr[-1] < -5
    alpha, sigma = process.alpha_sigma(t, torch.zeros(101, 3, 2, 2))
    assert alpha.shape == (101, 1, 1, 1) and alpha.dtype == torch.float32
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(alpha))
    torch.testing.assert_close(2 * (alpha.double() / sigma).log().flatten(), log_snr, atol=1e-5, rtol=1e-5)


def test_identities_between_the_targets():
    """x_t and v are x_start and eps rotated by an angle: each target follows from the others and x_t."""
    processes = {mean: LogSnrProcess(model_mean_type=mean) for mean in MEANS}
    eps, x_start, v = (processes[mean].target(X, T, NOISE) for mean in MEANS)
    x_t, (alpha, sigma) = processes[V].q_sample(X, T, NOISE), processes[V].alpha_sigma(T, X)
    assert torch.equal(eps, NOISE) and torch.equal(x_start, X)
    torch.testing.assert_close(alpha * x_start + sigma * eps, x_t)
    torch.testing.assert_close(alpha * x_t - sigma * v, x_start)
    torch.testing.assert_close(sigma * x_t + alpha * v, eps)


@pytest.mark.parametrize("mean", MEANS)
def test_the_loss_equals_that_of_the_discrete_process_at_the_same_level(mean):
    continuous = LogSnrProcess(model_mean_type=mean)
    betas = get_named_beta_schedule("cosine", 100)
    discrete = GaussianDiffusion(
        betas=betas, model_mean_type=mean, model_var_type=ModelVarType.FIXED_SMALL, loss_type=LossType.MSE
    )
    steps, seen = torch.tensor([4, 30, 65, 95]), []

    def model(x, t, shift):
        seen.append((x, t))
        return torch.tanh(x + shift)

    found = continuous.training_losses(model, X, (steps + 1) / 100, {"shift": 0.3}, NOISE)
    expected = discrete.training_losses(model, X, steps, {"shift": 0.3}, NOISE)
    assert found.keys() == expected.keys() == {"loss", "mse"} and found["loss"].shape == (4,)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-4, atol=1e-5)
    assert seen[0][1].dtype == torch.float32 and seen[0][1].tolist() == pytest.approx([0.05, 0.31, 0.66, 0.96])


def test_losses_are_float32_for_half_precision_networks():
    output = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(4)).half()
    with torch.autocast("cpu", torch.bfloat16):
        half = LogSnrProcess().training_losses(lambda x, t: output, X, T, noise=NOISE)["loss"]
    full = LogSnrProcess().training_losses(lambda x, t: output.float(), X, T, noise=NOISE)["loss"]
    assert half.dtype == torch.float32 and torch.equal(half, full)


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="log_snr_schedule 'cosin' is unknown; did you mean cosine"):
        LogSnrProcess("cosin")
    with pytest.raises(InputError, match="prediction is previous_x, but must be eps, x_start or v"):
        LogSnrProcess(model_mean_type=ModelMeanType.PREVIOUS_X)
    with pytest.raises(InputError, match="timestep_respacing is 0, but must be at least 1"):
        LogSnrProcess().steps(0)
    with pytest.raises(InputError, match=r"the model returned shape \[4, 6, 4, 4\]"):
        LogSnrProcess().training_losses(lambda x, t: torch.cat([x, x], 1), X, T)


# -------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_ends_at_the_data(name, mean):
    """As accurately as on the discrete process (test_samplers.py), with the same number of steps."""
    process = LogSnrProcess(model_mean_type=mean)
    steps = process.steps(25)
    check_ends_at_the_data(solve(name, steps, ExactModel(steps, alpha_bar=alpha_bar(process)), clip=True))


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_has_the_right_distribution(name):
    process = LogSnrProcess()
    steps = process.steps(100)
    x = solve(name, steps, ExactModel(steps, scale=0.3, alpha_bar=alpha_bar(process)), count=2000)
    check_distribution(x, 0.3)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("count", [1, 2, 300, 1000])
def test_any_number_of_steps_is_finite(name, count):
    """Also where the schedule is limited: times with equal noise are not sampled twice."""
    process = LogSnrProcess()
    steps = process.steps(count)
    levels = steps.alphas_cumprod
    assert (np.diff(levels) < 0).all() and 0.98 * count <= steps.num_timesteps <= count
    assert levels[-1] == pytest.approx(1e-4) and len(steps.times) == len(levels)
    x = solve(name, steps, ExactModel(steps, scale=0.3, alpha_bar=alpha_bar(process)), count=8)
    assert x.isfinite().all()


def test_the_network_sees_continuous_time_and_each_step_its_level():
    process = LogSnrProcess()
    steps, seen = process.steps(4), []

    def model(x, t):
        seen.append(t)
        return x

    for t in range(4):
        steps.denoiser(model)(X, t)
    assert all(t.dtype == torch.float32 and t.shape == (4,) for t in seen)
    assert torch.stack(seen)[:, 0].tolist() == [0.25, 0.5, 0.75, 1.0] == steps.times.tolist()
    np.testing.assert_allclose(steps.alphas_cumprod, alpha_bar(process)(torch.tensor(steps.times)), rtol=1e-12)


def test_strength_and_guidance_interval_are_fractions_of_time():
    steps = LogSnrProcess().steps(10)
    assert [shortened(steps, strength).num_timesteps for strength in (0.1, 0.3, 0.35, 1.0)] == [1, 3, 3, 10]
    short = shortened(steps, 0.3)
    for table in ("times", "alphas_cumprod", "posterior_mean_coef1", "posterior_log_variance_clipped"):
        assert np.array_equal(getattr(short, table), getattr(steps, table)[:3])
    taken = []
    denoise = guidance_interval(steps, lambda x, t: taken.append(t), lambda x, t: None, 0.35, 0.7)
    for t in range(10):
        denoise(X, t)
    assert taken == [3, 4, 5, 6]  # times 0.4 to 0.7


def test_samplers_need_nothing_but_the_levels():
    """A process of a few numbers, with any increasing noise."""
    process = SimpleNamespace(num_timesteps=4, alphas_cumprod=np.array([0.999, 0.7, 0.69, 0.001]))
    data = torch.full((1, 1, 2, 2), 0.3)

    def denoise(x, t):
        level = process.alphas_cumprod[t]
        eps = (x - level**0.5 * data) / (1 - level) ** 0.5
        before = ([1.0, *process.alphas_cumprod])[t]
        return Prediction(data, eps, before**0.5 * data, -10.0)

    for name, sampler in SAMPLERS.items():
        *_, last = sampler(process, denoise, torch.randn(1, 1, 2, 2), lambda t: torch.randn(1, 1, 2, 2))
        torch.testing.assert_close(last.x, data, msg=name)


# ---------------------------------------------------------------------------------------------- end to end


class Network(nn.Module):
    """A tiny generator whose time input is continuous."""

    def __init__(self):
        super().__init__()
        self.generator = make_generator(TextEncoderConfig(enc_attn_dim=0), num_classes=2)

    def encode_text(self, cond):
        return self.generator.encode_text(cond)

    def forward(self, x, t, cond):
        return self.generator(x, 1000 * t, cond)


def test_a_network_trains_and_samples():
    """Two uniform images by class: after a few steps the loss has dropped, and guided samples and edits are finite."""
    process, network = LogSnrProcess(model_mean_type=V), Network()
    labels = torch.arange(8) % 2
    x_start = (labels * 1.0 - 0.5)[:, None, None, None].expand(8, 3, 16, 16)
    optimizer, generator = torch.optim.Adam(network.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(30):
        t, noise = torch.rand(8, generator=generator), torch.randn(x_start.shape, generator=generator)
        loss = process.training_losses(network, x_start, t, {"cond": Conditioning(labels=labels)}, noise)["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])

    cond, null = Conditioning(labels=labels[:2]), Conditioning(labels=torch.full((2,), 2))
    batch = SampleBatch(PixelSignal(), (16, 16), [0, 1], cond, null)
    unknown = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    unknown[..., :8] = False
    edits = (None, Edit(x_start[:2], None, EditConfig(strength=0.5)), Edit(x_start[:2], unknown))
    for edit in (*edits, Edit(x_start[:2], None, EditConfig(variation=0.3))):
        guidance = GuidanceConfig(guidance_scale=2.0)
        x = sample_batch(network, process.steps(5), replace(batch, edit=edit), SamplerConfig("ddim"), guidance)
        assert x.shape == (2, 3, 16, 16) and x.isfinite().all() and x.abs().max() > 0.05
        if edit is not None and edit.unknown is not None:
            assert torch.equal(x[..., :8], x_start[:2, ..., :8])
