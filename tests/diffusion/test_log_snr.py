"""The continuous process: its schedule, targets and losses, and sampling with a discretization of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_denoisers import ExactModel, check_ends_at_the_data, solve
from network_making import pixels, seeded
from refusing import refused
from torch import nn
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.config import present_form
from diff_dalle.diffusion import (
    SAMPLERS,
    GaussianDiffusion,
    GuidanceConfig,
    LogSnrConfig,
    LogSnrProcess,
    LossType,
    ModelVarType,
    get_named_beta_schedule,
)
from diff_dalle.diffusion.editing import Edit, EditConfig, shortened
from diff_dalle.diffusion.guidance import guidance_interval
from diff_dalle.diffusion.parametrization import PREDICTIONS, SCALERS, TARGETS
from diff_dalle.diffusion.samplers import Prediction
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.diffusion.tiling import Tiled
from diff_dalle.images.signal import LatentSignal
from diff_dalle.randomness import Draw

MEANS = ("eps", "x_start", "v")
PAIRS = [(scaler, target) for scaler in SCALERS for target in TARGETS if (scaler, target) != ("vp", "flow")]
T = torch.tensor([0.0, 0.2, 0.73, 1.0])
X = pixels(4, 3, 4, 4, seed=1)
NOISE = seeded(4, 3, 4, 4, seed=2)


def alpha_bar(process):
    """The time input of a network → ᾱ."""
    return lambda t: torch.sigmoid(process.log_snr(t.double()))


# -------------------------------------------------------------------------------------------------- training


def make(**settings):
    return LogSnrProcess(LogSnrConfig(**{"loss_weighting": ("none",), **settings}))


def test_shift_moves_the_schedule_within_its_limits():
    """Shift 2: more noise at every time, and the last level stays the noisiest. Shifts multiply."""
    expected = [7.8239, 0.3251, -1.4109, -3.1665, -9.2102]
    t = torch.tensor([0, 0.25, 0.5, 0.75, 1])
    assert make(shift=2.0).log_snr(t).tolist() == pytest.approx(expected, abs=1e-4)
    assert make(shift=0.5).log_snr(t).tolist() == pytest.approx([9.2102, 3.0977, 1.3617, -0.3940, -7.8239], abs=1e-4)
    for process, shift in ((make(), 2.0), (make(shift=2.0), 1.0), (make(shift=8.0), 0.25)):
        levels = process.steps(4, shift=shift).alphas_cumprod
        assert torch.logit(torch.tensor(levels)).tolist() == pytest.approx(expected[1:], abs=1e-4)


def test_training_times_cover_all_noise_levels():
    """At least .001, where a distribution of log-SNR is not itself the schedule."""
    u = torch.tensor([0.0, 0.0005, 0.3, 1 - 2**-53], dtype=torch.float64)
    assert make().training_times(u).tolist() == pytest.approx([1, 1, 0.701, 0.001])
    for name in ("edm_train", "adaptive"):
        assert make(log_snr_schedule=name).training_times(u).tolist() == pytest.approx([1, 0.9995, 0.7, 0])


@pytest.mark.parametrize(("scaler", "prediction"), PAIRS)
def test_diffused_and_back(scaler, prediction):
    """From the true target and x_t, x_start and the noise come back; x_t is a x_start + b noise with the right SNR."""
    process = make(scaler=scaler, prediction=prediction)
    x, noise = X.double(), NOISE.double()
    a, b = process.scales(process.log_snr(T), x)
    assert a.shape == (4, 1, 1, 1) and a.dtype == torch.float64
    assert_close(2 * (a / b).log().flatten(), process.log_snr(T))
    assert_close(a**2 + b**2 if scaler == "vp" else a + b, torch.ones_like(a))
    x_t = process.q_sample(x, T, noise)
    assert_close(x_t, a * x + b * noise)
    found = process.undiffuse(x_t, T, process.target(x, T, noise))
    assert_close(found, (x, noise))


def test_the_targets():
    x, noise = X.double(), NOISE.double()
    for scaler in SCALERS:
        a, b = make(scaler=scaler).scales(make().log_snr(T), x)
        targets = {"eps": noise, "x_start": x, "v": a * noise - b * x, "flow": noise - x}
        for name in targets if scaler == "lerp" else MEANS:
            assert torch.equal(make(scaler=scaler, prediction=name).target(x, T, noise), targets[name])


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_first_loss_of_a_network_that_returns_zero_is_one(scaler):
    """With eps, white or pyramid noise; the weighted loss is that times the weight."""
    x, t = torch.randn(64, 3, 8, 6), torch.rand(64)
    for pyramid in (0.0, 0.75):
        process = make(scaler=scaler, pyramid_noise=pyramid, loss_weighting=("p2",))
        losses = process.training_losses(lambda x, t: torch.zeros_like(x), x, t)
        assert losses["mse"].mean().item() == pytest.approx(1, abs=0.1)
        weights = torch.sigmoid(-process.log_snr(t)).float()
        assert_close(losses["loss"], losses["mse"] * weights)
    offset = make(scaler=scaler, offset_noise=2.0)
    losses = offset.training_losses(lambda x, t: torch.zeros_like(x), x, t)
    assert losses["mse"].mean().item() == pytest.approx(5, abs=1)  # 1 + 2²


def test_the_noise_given_is_the_noise_used():
    process, seen = make(offset_noise=0.5, pyramid_noise=0.75), []
    draw = Draw(3, torch.arange(4))
    noise = process.noise(draw.normal, (3, 4, 4))
    part = process.noise(Draw(3, torch.arange(2, 4)).normal, (3, 4, 4))
    assert torch.equal(noise[2:], part)  # a function of seed and position
    process.training_losses(lambda x, t: seen.append(x) or x, X, T, noise=noise)
    assert_close(seen[0], process.q_sample(X, T, noise))
    torch.manual_seed(0)
    assert process.q_sample(torch.zeros(4, 3, 4, 4), torch.ones(4)).mean((2, 3)).std() > 0.3  # its own has an offset


@pytest.mark.parametrize("mean", MEANS)
def test_the_loss_equals_that_of_the_discrete_process_at_the_same_level(mean):
    continuous = make(prediction=mean)
    betas = get_named_beta_schedule("cosine", 100)
    discrete = GaussianDiffusion(
        betas=betas, model_mean_type=PREDICTIONS[mean], model_var_type=ModelVarType.FIXED_SMALL, loss_type=LossType.MSE
    )
    steps, seen = torch.tensor([4, 30, 65, 95]), []

    def model(x, t, shift):
        seen.append((x, t))
        return torch.tanh(x + shift)

    found = continuous.training_losses(model, X, (steps + 1) / 100, {"shift": 0.3}, NOISE)
    expected = discrete.training_losses(model, X, steps, {"shift": 0.3}, NOISE)
    assert found.keys() == expected.keys() == {"loss", "mse"} and found["loss"].shape == (4,)
    assert_close(found["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    assert_close(seen[0][0], seen[1][0], rtol=1e-4, atol=1e-5)
    assert seen[0][1].dtype == torch.float32 and seen[0][1].tolist() == pytest.approx([0.05, 0.31, 0.66, 0.96])


def test_losses_are_float32_for_half_precision_networks():
    output = seeded(4, 3, 4, 4, seed=4).half()
    with torch.autocast("cpu", torch.bfloat16):
        half = make().training_losses(lambda x, t: output, X, T, noise=NOISE)["loss"]
    full = make().training_losses(lambda x, t: output.float(), X, T, noise=NOISE)["loss"]
    assert half.dtype == torch.float32 and torch.equal(half, full)


def test_impossible_settings_are_refused():
    with refused("steps is 0, but must be at least 1"):
        LogSnrProcess().steps(0)
    for ends in ({"t_start": 1.1}, {"t_end": -0.1}, {"t_start": 0.5, "t_end": 0.5}):
        with refused("t_start and t_end are .* 0 <= t_end < t_start <= 1"):
            LogSnrProcess().steps(5, **ends)
    with refused("shift is 0, but must be above 0"):
        LogSnrProcess().steps(5, shift=0)
    with refused(r"the model returned shape \[4, 6, 4, 4\]"):
        LogSnrProcess().training_losses(lambda x, t: torch.cat([x, x], 1), X, T)


# -------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(("name", "mean"), [(name, MEANS[i % 3]) for i, name in enumerate(SAMPLERS)])
def test_every_sampler_ends_at_the_data(name, mean):
    """As accurately as on the discrete process (test_samplers.py), with the same number of steps."""
    process = make(prediction=mean)
    steps = process.steps(25)
    check_ends_at_the_data(solve(name, steps, ExactModel(steps, alpha_bar=alpha_bar(process)), clip=True))


@pytest.mark.parametrize("count", [1, 2, 300, 1000])
def test_any_number_of_steps_is_finite(count):
    """Also where the schedule is limited: times with equal noise are not sampled twice."""
    process = LogSnrProcess()
    steps = process.steps(count)
    levels = steps.alphas_cumprod
    assert (np.diff(levels) < 0).all() and 0.98 * count <= steps.num_timesteps <= count
    assert levels[-1] == pytest.approx(1e-4) and len(steps.times) == len(levels)
    for name in SAMPLERS if count < 1000 else ("dpm++2m",):
        x = solve(name, steps, ExactModel(steps, scale=0.3, alpha_bar=alpha_bar(process)), count=8)
        assert x.isfinite().all(), name


def test_steps_of_single_samples():
    """``p_mean_variance``, with a step for each sample, is the denoiser's prediction."""
    for scaler, prediction in PAIRS:
        steps = make(scaler=scaler, prediction=prediction).steps(4)

        def model(x, t):
            return torch.tanh(x) + t.view(-1, 1, 1, 1)

        found = steps.p_mean_variance(model, X, torch.tensor([3, 1, 0, 2]), clip_denoised=False)
        for i, t in enumerate([3, 1, 0, 2]):
            expected = steps.denoiser(model, clip_denoised=False)(X[i : i + 1], t)
            assert_close(found["pred_xstart"][i : i + 1], expected.x_start, atol=1e-4, rtol=1e-4)
            assert_close(found["mean"][i : i + 1], expected.mean, atol=1e-4, rtol=1e-4)


def test_steps_between_two_times():
    """The first T of T + 1 times: what the last step ends at is the clean sample, not the level of t_end."""
    steps = make().steps(4, t_start=0.8, t_end=0.2)
    assert steps.times.tolist() == pytest.approx([0.35, 0.5, 0.65, 0.8])
    assert steps.alphas_cumprod_prev[0] == 1


GAUSSIAN_STD = {  # steps → of data N(.7, .5²), by sampler
    "ancestral": {10: 0.389, 20: 0.434, 100: 0.481},
    "ddim": {10: 0.427, 20: 0.462, 100: 0.494},
    "lcm": {10: 0.308, 20: 0.325, 100: 0.342},
}


def exact(process):
    """The network of data N(.7, .5²). It knows the noise level by its time input, and sees x_t as in training."""

    def model(x_t, t):
        a, b = process.scales(process.log_snr(t.double()), x_t)
        x_start = 0.7 + a * 0.25 / (a**2 * 0.25 + b**2) * (x_t - a * 0.7)
        return process._target.make(x_start, (x_t - a * x_start) / b, a, b)

    return model


def gaussian(process, count, name, n=20_000):
    """Samples [n] of ``count`` steps with the exact denoiser of data N(.7, .5²), and their exact values under the
    deterministic process."""
    steps, generator = process.steps(count), torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 1, 1, generator=generator)
    denoise = steps.denoiser(exact(process), clip_denoised=False)
    *_, last = SAMPLERS[name](steps, denoise, x, lambda t: torch.randn(x.shape, generator=generator))
    level = steps.alphas_cumprod[-1]
    ends = 0.7 + 0.5 * (x - 0.7 * level**0.5) / (0.25 * level + 1 - level) ** 0.5
    return last.x.flatten(), ends.flatten()


@pytest.mark.parametrize("name", GAUSSIAN_STD)
def test_the_spread_of_each_sampler(name):
    """DDPM, DDIM and LCM, whatever the scaler and the prediction."""
    for count, expected in GAUSSIAN_STD[name].items():
        x, _ = gaussian(make(), count, name)
        assert x.std().item() == pytest.approx(expected, abs=0.01) and x.mean().item() == pytest.approx(0.7, abs=0.01)
    for scaler, prediction in PAIRS:
        x, _ = gaussian(make(scaler=scaler, prediction=prediction), 10, name)
        assert x.std().item() == pytest.approx(GAUSSIAN_STD[name][10], abs=0.01), (scaler, prediction)


@pytest.mark.parametrize(("scaler", "prediction"), PAIRS)
def test_second_order_pays(scaler, prediction):
    """dpm++2m and unipc beside ddim, on the exact denoiser: root mean square errors."""
    process = make(scaler=scaler, prediction=prediction)
    for count in (10, 20):
        error = {}
        for name in ("ddim", "dpm++2m", "unipc"):
            x, ends = gaussian(process, count, name, 1000)
            error[name] = (x - ends).square().mean().sqrt().item()
        assert error["dpm++2m"] < 0.55 * error["ddim"] and error["unipc"] < 0.55 * error["ddim"], error


def test_strength_and_guidance_interval_are_fractions_of_time():
    steps = LogSnrProcess().steps(10)
    assert [shortened(steps, strength).num_timesteps for strength in (0.1, 0.3, 0.35, 1.0)] == [1, 3, 3, 10]
    short = shortened(steps, 0.3)
    for table in ("times", "time_inputs", "alphas_cumprod", "posterior_mean_coef1", "posterior_log_variance_clipped"):
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
        assert_close(last.x, data, msg=name)


# ---------------------------------------------------------------------------------------------- end to end


class Local(nn.Conv2d):
    """A network with a receptive field of 3×3, that sees what it was trained on."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(2, 2, 3, padding=1)
        self.seen = []

    def encode_text(self, cond):
        return cond

    def forward(self, x, t, cond):
        self.seen.append((x, t))
        return 0.3 * super().forward(x) + 0.01 * t.view(-1, 1, 1, 1)


UNLIMITED = GuidanceConfig(guidance_scale=1.0, thresholding="none")


@pytest.mark.parametrize(("scaler", "prediction"), [("vp", "eps"), ("lerp", "flow")])
def test_editing_in_latent_space(scaler, prediction):
    """The exact denoiser of a Gaussian: image to image stays near with little strength, and a variation of 0 is the
    image, at a shift too."""
    process = make(scaler=scaler, prediction=prediction)
    latents = seeded(2, 2, 4, 6, seed=3) * 0.5 + 0.7

    class Exact(Local):
        def forward(self, x, t, cond):
            return exact(process)(x, t)

    def edited(**config):
        edit = Edit(latents, None, EditConfig(**config))
        batch = SampleBatch(LatentSignal(2), (4, 6), [0, 1], Conditioning(), edit=edit)
        steps = process.steps(100, shift=1.5)
        return sample_batch(Exact(), steps, batch, SamplerConfig("ddim"), UNLIMITED) - latents

    assert edited(variation=0.0).abs().max() < 0.06
    little, much = (edited(strength=strength).square().mean().sqrt() for strength in (0.05, 0.9))
    assert 0.01 < little < 0.25 < 0.5 < much


@pytest.mark.parametrize("scaler", SCALERS)
def test_tiling_in_latent_space(scaler):
    """A network that sees 3×3 positions returns the same in tiles as as a whole, at the scale of its training."""
    process, network = make(scaler=scaler, prediction="v"), Local()
    batch = SampleBatch(LatentSignal(2), (16, 24), [0, 1], Conditioning())
    steps = process.steps(3)
    with torch.no_grad():
        whole = sample_batch(network, steps, batch, SamplerConfig("ddim"), UNLIMITED)
        tiled = sample_batch(Tiled(network, 12, 8, 4), steps, batch, SamplerConfig("ddim"), UNLIMITED)
    assert_close(tiled, whole, atol=1e-5, rtol=1e-4)
    first = network.seen[0][0].std().item()  # of pure noise, times b
    assert first == pytest.approx(steps.noise_scale[-1] if scaler == "lerp" else 1, rel=0.1)


def test_a_flow_had_another_name():
    now = {"log_snr_schedule": "flow", "sampling_schedule": "flow", "prediction": "flow", "scaler": "lerp"}
    then = {name: value.replace("flow", "rectified_flow") for name, value in now.items()}
    assert present_form(LogSnrConfig, then) == present_form(LogSnrConfig, now) == now
