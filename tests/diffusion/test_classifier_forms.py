"""The two forms of a classifier's guidance: the mean of a step is shifted, or the score."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from diff_dalle import diffusion
from diff_dalle.diffusion import create_gaussian_diffusion
from diff_dalle.diffusion.diffusion_config import DiffusionConfig, training_process
from diff_dalle.diffusion.guidance import FORMS, ClassifierGuidance, GuidanceConfig, guided_denoiser
from diff_dalle.diffusion.samplers import ancestral
from diff_dalle.diffusion.sampling import SamplerConfig

CENTER, WIDTH = 0.2, 0.4  # of the data
ERROR, SEEN = 0.3, -0.5  # standard deviation of the classifier's measurement of x_start, and what it measured
OFF = GuidanceConfig(guidance_scale=1.0, thresholding="none")


class Network(torch.nn.Module):
    """A tiny network with a learned variance, whose images leave the valid range."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(8, 6, 3, padding=1)
        ).double()

    def forward(self, x, t, cond=None):
        return self.layers(x) + t.view(-1, 1, 1, 1) / 1000


def similarity(x, t):
    return (x.square().flatten(1).sum(1) * (0.02 + t / 1000)).sin()


def gradient_of(x, t):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(similarity(x, t).sum(), x)[0]


@pytest.mark.parametrize("variance", ["learned_range", "fixed_small", "fixed_large"])
def test_the_mean_form_is_the_published_algorithm(variance):
    """Dhariwal & Nichol 2021, algorithm 1, written out: the mean of the limited image, plus its variance times the
    gradient at x_t, once a step."""
    config = DiffusionConfig(diffusion_steps=40, noise_schedule="cosine", variance=variance)
    process, network, calls = create_gaussian_diffusion(config, "8"), Network(), []
    model = network if variance == "learned_range" else lambda x, t, cond=None: network(x, t)[:, :3]
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noises = torch.randn(8, *x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def counted(x, t):
        calls.append(t.tolist())
        return similarity(x, t)

    guide = ClassifierGuidance(counted, 1.5, form="mean")
    denoise = guided_denoiser(process, model, None, None, GuidanceConfig(guidance_scale=1.0), guide)
    with torch.no_grad():
        *_, last = ancestral(process, denoise, x, lambda t: noises[t])
    assert calls == [[step] * 2 for step in reversed(process.timestep_map)]

    bars = np.append(1.0, np.cumprod(1 - config.betas)[process.timestep_map])
    posterior = [(1 - now / before) * (1 - before) / (1 - now) for before, now in itertools.pairwise(bars)]
    for i in reversed(range(8)):
        t, bar, before = torch.full((2,), process.timestep_map[i]), bars[i + 1], bars[i]
        beta = 1 - bar / before
        with torch.no_grad():
            out = model(x, t)
        eps, values = out[:, :3], out[:, 3:]
        image = ((x - math.sqrt(1 - bar) * eps) / math.sqrt(bar)).clamp(-1, 1)
        mean = (math.sqrt(before) * beta * image + math.sqrt(1 - beta) * (1 - before) * x) / (1 - bar)
        least, most = math.log(posterior[max(i, 1)]), math.log(beta)
        if variance == "learned_range":
            log_sigma = (values + 1) / 2 * most + (1 - values) / 2 * least
            sigma = log_sigma.exp()
        elif variance == "fixed_small":
            sigma = torch.tensor(posterior[i])
        else:
            sigma = torch.tensor(beta if i else posterior[1])
        x = mean + sigma * 1.5 * gradient_of(x, t)
        if i:
            x = x + sigma.sqrt() * noises[i]
    assert_close(last.x, x, rtol=1e-6, atol=1e-9)


def test_the_score_form_is_that_of_the_published_ddim():
    """``condition_score``: eps of the limited image, minus sigma times the gradient; its image is not limited again."""
    process, network = create_gaussian_diffusion(DiffusionConfig(40, "cosine"), "8"), Network()
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    guide = ClassifierGuidance(similarity, -1.5, limit_first=True)

    def model(x, t, cond=None):
        return network(x, t)[:, :3]

    config = GuidanceConfig(guidance_scale=1.0)
    with torch.no_grad():
        found = guided_denoiser(process, model, None, None, config, guide)(x, 5)
        t = torch.full((2,), 5)
        out = process.p_mean_variance(model, x, t)
    expected = process.condition_score(lambda x, t: -1.5 * gradient_of(x, t), out, x, t)
    assert_close(found.x_start, expected["pred_xstart"], rtol=1e-5, atol=1e-6)
    assert_close(found.mean, expected["mean"], rtol=1e-5, atol=1e-6)
    assert found.x_start.abs().max() > 1.01


def end(config, steps, form):
    """Mean and standard deviation of the samples of ``ancestral``, exactly: data and classifier are Gaussian, so every
    step is affine in x_t, and two evaluations of the denoiser tell it."""
    process = create_gaussian_diffusion(config, str(steps))
    bars = torch.tensor(np.cumprod(1 - config.betas))

    def moments(x, t):
        bar = bars[t].view(-1, 1, 1, 1)
        spread = bar * WIDTH**2 + 1 - bar
        mean = CENTER + bar.sqrt() * WIDTH**2 / spread * (x - bar.sqrt() * CENTER)
        return mean, WIDTH**2 * (1 - bar) / spread, bar

    def network(x, t, cond=None):
        mean, _, bar = moments(x, t)
        return (x - bar.sqrt() * mean) / (1 - bar).sqrt()

    def measured(x, t):
        mean, variance, _ = moments(x, t)
        return (-(SEEN - mean).square() / (2 * (variance + ERROR**2))).flatten(1).sum(1)

    denoise = guided_denoiser(process, network, None, None, OFF, ClassifierGuidance(measured, 1.0, form=form))
    mean, variance, ends = 0.0, 1.0, torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    for t in reversed(range(steps)):
        p = denoise(ends, t)
        zero, one = p.mean.flatten().tolist()
        mean, variance = zero + (one - zero) * mean, (one - zero) ** 2 * variance
        variance += math.exp(p.log_variance) if t else 0.0
    return mean, math.sqrt(variance)


def table():
    """The rows of the README's tables: the error of the mean in standard deviations, and the ratio of the spreads, of
    the samples in each form; and the ratio of one step's shift of the mean, score over mean."""
    share = WIDTH**2 / (WIDTH**2 + ERROR**2)
    center, spread = CENTER + share * (SEEN - CENTER), math.sqrt(share) * ERROR
    for schedule, variance in itertools.product(("linear", "cosine"), ("fixed_small", "fixed_large")):
        config = DiffusionConfig(noise_schedule=schedule, variance=variance)
        for steps in (10, 50, 250):
            ends = [end(config, steps, form) for form in FORMS]
            cells = [f"{(mean - center) / spread:+.3f} | {deviation / spread:.3f}" for mean, deviation in ends]
            yield f"| {schedule} | {variance} | {steps} | {' | '.join(cells)} |"
        shifts = [f"{_strength(config, t):.3g}" for t in (1, 10, 204, 900, 979, 999)]
        yield f"| {schedule} | {variance} | {' | '.join(shifts)} |"


def _strength(config, t):
    process = create_gaussian_diffusion(config)

    def mean(form, scale):
        guide = ClassifierGuidance(lambda x, t: x.flatten(1).sum(1), scale, form=form)
        denoise = guided_denoiser(process, lambda x, t, cond=None: 0 * x, None, None, OFF, guide)
        return denoise(torch.zeros(1, 1, 1, 1, dtype=torch.float64), t).mean.item()

    return mean("score", 1.0) / mean("mean", 1.0)


def test_the_table_of_both_forms_is_the_readme_s():
    text = (Path(diffusion.__file__).parent / "README.md").read_text(encoding="utf-8")
    missing = [row for row in table() if row not in text]
    assert not missing, "\n".join(["rows of diffusion/README.md should be:", *table()])


def test_a_classifier_of_other_noise_is_shown_the_nearest_level():
    """Another schedule, number of steps and time input; the nearest in log-SNR, of noise alone the noisiest."""
    process = create_gaussian_diffusion(DiffusionConfig(noise_schedule="cosine"), "20")
    own = create_gaussian_diffusion(DiffusionConfig(400, "linear", rescale_timesteps=True))
    log_snr = np.log(own.snr)
    seen = []

    def watched(x, t):
        seen.append(t)
        return x.flatten(1).sum(1)

    guide = ClassifierGuidance(watched, 1.0, process=own)
    denoise = guided_denoiser(process, lambda x, t, cond=None: 0.1 * x, None, None, OFF, guide)
    for t in range(20):
        denoise(torch.zeros(3, 3, 2, 2), t)
    nearest = [int(np.abs(log_snr - np.log(snr)).argmin()) for snr in process.snr]
    assert [each.tolist() for each in seen] == [[step * 2.5] * 3 for step in nearest]
    assert nearest != process.timestep_map and own.nearest_step(0.0) == 399 and own.nearest_step(0.9999999) == 0


def test_a_classifier_guides_a_flow_at_its_level():
    """It sees an image whose noise has the level of its step, and whose variance is preserved, unlike what the network
    sees."""
    config = DiffusionConfig(noise_schedule="flow", prediction="x_start")
    flow, own = training_process(config), create_gaussian_diffusion(DiffusionConfig(noise_schedule="cosine"))
    process, seen, image = SamplerConfig(steps=9).process(config), [], torch.full((2, 3, 4, 4), 0.3)

    def watched(x, t):
        seen.append((x.detach(), t))
        return x.flatten(1).sum(1)

    def network(x, t, cond=None):
        seen.append((x, t))
        return image

    denoise = guided_denoiser(process, network, None, None, OFF, ClassifierGuidance(watched, 1.0, process=own))
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    for step in range(9):
        denoise(process.q_sample(image, step, noise), step)
        (given, time), (shown, level) = seen[-2:]
        t = torch.full((2,), (step + 1) / 9, dtype=torch.float64)
        assert_close(given, flow.q_sample(image, t, noise), rtol=1e-4, atol=1e-4)
        assert_close(time.double(), 1000 * t.clamp(max=0.99945), rtol=1e-5, atol=0)
        nearest = own.q_sample(image, level, noise)
        assert (shown - nearest).abs().max() < 0.02 and torch.equal(level, level[:1].expand(2))
        assert step in (0, 8) or (shown - given).abs().max() > 0.1
