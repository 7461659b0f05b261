"""Wrappers of the denoiser."""

import pytest
import torch

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig, create_gaussian_diffusion, guided_denoiser
from diff_dalle.diffusion.guidance import classifier_free, dynamic_threshold
from diff_dalle.errors import InputError

CONFIG = DiffusionConfig(diffusion_steps=100, noise_schedule="cosine", prediction="x_start", variance="learned_range")
COND, NULL = Conditioning(labels=torch.tensor([1, 2])), Conditioning(labels=torch.tensor([0, 0]))


class Network:
    """Half-precision mean and variance channels that depend on the label; remembers the batch sizes it saw."""

    def __init__(self):
        self.sizes = []

    def __call__(self, x, t, cond):
        self.sizes.append(len(x))
        label = cond.labels.view(-1, 1, 1, 1)
        return torch.cat([0.1 * x + 0.1 * label, 0.1 * label.expand_as(x)], dim=1).half()


def test_only_the_mean_is_guided():
    """The mean is null + scale × (cond − null), the variance the conditional one, from one call with both halves."""
    network, x, t = Network(), torch.randn(2, 3, 4, 4), torch.tensor([5, 5])
    output = classifier_free(network, COND, NULL, 3.0)(x, t)
    given, baseline = network(x, t, COND).float(), network(x, t, NULL).float()
    torch.testing.assert_close(output[:, :3], baseline[:, :3] + 3 * (given - baseline)[:, :3])
    assert torch.equal(output[:, 3:], given[:, 3:])
    assert network.sizes == [4, 2, 2]


def test_scale_one_is_off():
    """At scale 1 the network runs once on the N samples, needs no null condition, and equals plain sampling."""
    network, process, x = Network(), create_gaussian_diffusion(CONFIG), torch.randn(2, 3, 4, 4)
    found = guided_denoiser(process, network, COND, None, GuidanceConfig(guidance_scale=1.0))(x, 50)
    plain = process.denoiser(network, model_kwargs={"cond": COND})(x, 50)
    assert network.sizes == [2, 2]
    assert torch.equal(found.x_start, plain.x_start) and torch.equal(found.mean, plain.mean)


def test_guidance_needs_something_to_guide_by():
    """Guidance without a condition is refused in words."""
    with pytest.raises(InputError, match="guidance_scale is 2"):
        guided_denoiser(create_gaussian_diffusion(CONFIG), Network(), None, None, GuidanceConfig(guidance_scale=2.0))


def test_interval_in_steps_of_the_original_process():
    """Inside the interval both halves run, outside only the conditional one; respacing does not move the interval."""
    process = create_gaussian_diffusion(CONFIG, "5")  # steps 0, 25, 50, 74, 99 of 100
    network, x = Network(), torch.randn(2, 3, 4, 4)
    config = GuidanceConfig(guidance_scale=2.0, guidance_interval=(0.25, 0.7))
    denoise = guided_denoiser(process, network, COND, NULL, config)
    for t in range(5):
        denoise(x, t)
    assert network.sizes == [2, 4, 4, 2, 2]


@pytest.mark.parametrize("percentile", [0.3, 0.9, 0.995, 1.0])
def test_dynamic_threshold(percentile):
    """The percentile of |x_start|, as torch.quantile finds it, becomes 1, sample by sample; small images stay."""
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 2, 5]).view(
        3, 1, 1, 1
    )
    s = x.abs().flatten(1).quantile(percentile, dim=1).clamp(min=1).view(3, 1, 1, 1)
    torch.testing.assert_close(dynamic_threshold(x, percentile), x.clamp(-s, s) / s)
    torch.testing.assert_close(dynamic_threshold(x, percentile)[1:2], dynamic_threshold(x[1:2], percentile))


@pytest.mark.parametrize(("kind", "largest"), [("none", 7.0), ("static", 1.0), ("dynamic", 1.0)])
def test_thresholding(kind, largest):
    """Each kind limits x_start as it says, and eps follows x_start."""
    process, x = create_gaussian_diffusion(CONFIG), torch.randn(1, 3, 4, 4)

    def network(x, t, cond):
        return torch.cat([x / x.abs().amax() * 7, x], dim=1)

    found = guided_denoiser(process, network, COND, None, GuidanceConfig(guidance_scale=1.0, thresholding=kind))(x, 50)
    assert found.x_start.abs().max().item() == pytest.approx(largest, rel=1e-5)
    alpha_bar = process.alphas_cumprod[50]
    torch.testing.assert_close(alpha_bar**0.5 * found.x_start + (1 - alpha_bar) ** 0.5 * found.eps, x)


@pytest.mark.parametrize(
    "settings",
    [
        {"guidance_interval": (0.5,)},
        {"guidance_interval": (0.8, 0.2)},
        {"dynamic_percentile": 0.0},
        {"thresholding": "x"},
    ],
)
def test_bad_settings(settings):
    """Impossible settings are refused by name."""
    with pytest.raises(InputError, match=next(iter(settings))):
        GuidanceConfig(**settings)
