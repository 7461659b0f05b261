"""Guidance and thresholding."""

from dataclasses import replace

import pytest
import torch
from refusing import refused
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import (
    SAMPLERS,
    ClassifierGuidance,
    DiffusionConfig,
    GuidanceConfig,
    LogSnrConfig,
    LogSnrProcess,
    ModelMeanType,
    create_gaussian_diffusion,
    guided_denoiser,
)
from diff_dalle.diffusion.guidance import _joined, dynamic_threshold, extrapolated, similarity_gradient, thresholding

CONFIG = DiffusionConfig(diffusion_steps=100, noise_schedule="cosine", prediction="x_start", variance="learned_range")
COND, NULL = Conditioning(labels=torch.tensor([1, 2])), Conditioning(labels=torch.tensor([0, 0]))


class Network:
    """Half-precision mean and variance channels that depend on the label; records its batch sizes."""

    def __init__(self):
        self.sizes = []

    def __call__(self, x, t, cond):
        self.sizes.append(len(x))
        label = cond.labels.view(-1, 1, 1, 1)
        return torch.cat([0.1 * x + 0.1 * label, 0.1 * label.expand_as(x)], dim=1).half()


def classifier_free(model, cond, null, scale, rescale=0.0):
    return extrapolated(model, _joined(cond, null, None), scale, 0.0, rescale)


def test_only_the_mean_is_guided():
    """The mean is null + scale × (cond − null), the variance the conditional one, in one call with both halves."""
    network, x, t = Network(), torch.randn(2, 3, 4, 4), torch.tensor([5, 5])
    output = classifier_free(network, COND, NULL, 3.0)(x, t)
    given, baseline = network(x, t, COND).float(), network(x, t, NULL).float()
    assert_close(output[:, :3], baseline[:, :3] + 3 * (given - baseline)[:, :3])
    assert torch.equal(output[:, 3:], given[:, 3:])
    assert network.sizes == [4, 2, 2]


def test_scale_one_is_off():
    """At scale 1 the network runs once on the N samples, without a null condition, and equals plain sampling."""
    network, process, x = Network(), create_gaussian_diffusion(CONFIG), torch.randn(2, 3, 4, 4)
    found = guided_denoiser(process, network, COND, None, GuidanceConfig(guidance_scale=1.0))(x, 50)
    plain = process.denoiser(network, model_kwargs={"cond": COND})(x, 50)
    assert network.sizes == [2, 2]
    assert torch.equal(found.x_start, plain.x_start) and torch.equal(found.mean, plain.mean)


@pytest.mark.parametrize(
    ("scales", "name", "missing"),
    [
        ((2.0, None), "guidance_scale", "guidance_scale is 2, but null is missing"),
        ((1.0, 2.0), "guidance_scale_end", "null is missing"),
    ],
)
def test_guidance_requires_a_condition(scales, name, missing):
    """Neither missing conditions nor those with nothing to drop are silently left unguided."""
    process, config = create_gaussian_diffusion(CONFIG), GuidanceConfig(*scales)
    low_res = Conditioning(low_res=torch.zeros(2, 3, 4, 4))
    for cond, null in ((None, None), (low_res, low_res)):
        with refused(f"{name} is 2, but there is no caption, class or image embedding"):
            guided_denoiser(process, Network(), cond, null, config)
    with refused(missing):
        guided_denoiser(process, Network(), COND, None, config)
    assert config.scales(True) == (scales[0], scales[1] or scales[0]) and config.at_scale(1.0).scales(True) == (1, 1)


def test_an_embedding_mask_may_be_left_out():
    """Where nothing is dropped; the halves are joined all the same."""
    masks, x = [], torch.randn(2, 3, 4, 4)

    def network(x, t, cond):
        masks.append(cond.embedding_mask)
        return x * cond.image_embedding.sum(1).view(-1, 1, 1, 1)

    cond = Conditioning(image_embedding=torch.ones(2, 5))
    null = cond.drop(torch.ones(2, dtype=torch.bool))
    output = classifier_free(network, cond, null, 3.0)(x, torch.tensor([5, 5]))
    assert_close(output, 15 * x)
    assert masks[0].tolist() == [True, True, False, False]


def test_the_scale_may_change_with_time():
    """From guidance_scale at the noise end to guidance_scale_end at the image end, on any process."""
    x = torch.randn(2, 3, 4, 4)
    discrete = create_gaussian_diffusion(DiffusionConfig(100, prediction="x_start"), "5")  # steps 0, 25, 50, 74, 99
    continuous = LogSnrProcess(LogSnrConfig(prediction="x_start")).steps(4)
    for process, times in ((discrete, (0, 0.25, 0.5, 0.74, 0.99)), (continuous, (0.25, 0.5, 0.75, 1))):
        for start, end in ((5.0, 2.0), (1.0, 4.0), (None, 1.0)):
            config = GuidanceConfig(start, end, thresholding="none")
            denoise = guided_denoiser(process, mean_of_labels, COND, NULL, config)
            for t, time in enumerate(times):
                scale = (3.0 if start is None else start) * time + end * (1 - time)
                expected = torch.lerp(mean_of_labels(x, None, NULL), mean_of_labels(x, None, COND), scale)
                assert_close(denoise(x, t).x_start, expected, atol=1e-5, rtol=1e-5)


def mean_of_labels(x, t, cond):
    return 0.1 * x * (1 + cond.labels.view(-1, 1, 1, 1))


@pytest.mark.parametrize("rescale", [0.3, 1.0])
def test_rescaled_guidance_has_the_conditional_standard_deviation(rescale):
    """Each sample's own, so that it does not depend on its batch; the variance channels stay."""
    t = torch.tensor([5, 5])
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 4]).view(2, 1, 1, 1)

    def spread(x, t, cond):
        """Another standard deviation with another label."""
        return torch.cat([x * (1 + 0.2 * cond.labels.view(-1, 1, 1, 1)), x], dim=1)

    guided, given = classifier_free(spread, COND, NULL, 5.0)(x, t)[:, :3], spread(x, t, COND)[:, :3]
    found = classifier_free(spread, COND, NULL, 5.0, rescale)(x, t)
    ratio = given.flatten(1).std(1) / guided.flatten(1).std(1)
    expected = guided * (rescale * ratio + 1 - rescale).view(2, 1, 1, 1)
    assert_close(found[:, :3], expected)
    assert torch.equal(found[:, 3:], x) and (ratio < 0.8).all()
    alone = classifier_free(spread, COND.select([1]), NULL.select([1]), 5.0, rescale)(x[1:], t[1:])
    assert_close(found[1:], alone)
    process = create_gaussian_diffusion(CONFIG)
    config = GuidanceConfig(guidance_scale=5.0, guidance_rescale=rescale, thresholding="none")
    assert_close(guided_denoiser(process, spread, COND, NULL, config)(x, 50).x_start, found[:, :3])
    flat = classifier_free(lambda x, t, cond: torch.zeros_like(x), COND, NULL, 5.0, rescale)(x, t)
    assert flat.eq(0).all()  # without any spread there is none to divide by


class Attending(Network):
    """The same, whose output halves where the attention is perturbed."""

    def __call__(self, x, t, cond):
        output = super().__call__(x, t, cond)
        return output if cond.perturbed is None else torch.where(cond.perturbed.view(-1, 1, 1, 1), output / 2, output)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("rescale", [0.0, 0.5])
def test_perturbed_attention_guidance(scale, rescale):
    """Another difference is added, that to the perturbed prediction of the given condition, in the same call."""
    process, network, x = create_gaussian_diffusion(CONFIG), Attending(), torch.randn(2, 3, 4, 4)
    config = GuidanceConfig(scale, guidance_rescale=rescale, perturbed_attention_scale=4.0, thresholding="none")
    found = guided_denoiser(process, network, COND, NULL, config)(x, 50)
    output, baseline = network(x, None, COND).float(), network(x, None, NULL).float()[:, :3]
    given = output[:, :3]
    expected = baseline + scale * (given - baseline) + 4 * (given - given / 2)
    ratio = given.flatten(1).std(1) / expected.flatten(1).std(1)
    expected = expected * (rescale * ratio + 1 - rescale).view(2, 1, 1, 1)
    assert_close(found.x_start, expected, atol=1e-3, rtol=1e-3)
    unchanged = process.predict(output, x, 50, clip_denoised=False)
    assert torch.equal(found.log_variance, unchanged.log_variance)
    assert network.sizes == [4 if scale == 1 else 6, 2, 2]


def test_perturbed_attention_guidance_has_its_own_interval():
    process, network, x = create_gaussian_diffusion(CONFIG, "5"), Attending(), torch.randn(2, 3, 4, 4)
    intervals = {"guidance_interval": (0.25, 0.7), "perturbed_attention_interval": (0.5, 0.8)}
    config = GuidanceConfig(2.0, perturbed_attention_scale=4.0, thresholding="none", **intervals)
    denoise = guided_denoiser(process, network, COND, NULL, config)
    guided = guided_denoiser(process, network, COND, NULL, replace(config, perturbed_attention_scale=0.0))
    changed = []
    for t in range(5):  # steps 0, 25, 50, 74, 99 of 100
        found = denoise(x, t).x_start
        changed.append(network.sizes[-1])
        assert torch.equal(found, guided(x, t).x_start) == (t not in (2, 3))
    assert changed == [2, 4, 6, 4, 2]


def test_perturbed_attention_guidance_needs_no_condition():
    process, x = create_gaussian_diffusion(CONFIG), torch.randn(2, 3, 4, 4)

    def network(x, t, cond):
        return torch.cat([torch.where(cond.perturbed.view(-1, 1, 1, 1), x / 10, x / 5), x], 1)

    config = GuidanceConfig(perturbed_attention_scale=2.0, thresholding="none")
    for cond in (None, Conditioning(low_res=x)):
        found = guided_denoiser(process, network, cond, None, config)(x, 50)
        assert_close(found.x_start, x / 5 + 2 * x / 10)
    assert config.off().perturbed_attention_scale == 0 and config.at_scale(2.0).perturbed_attention_scale == 2


@pytest.mark.parametrize("gradient", ["x_t", "x_start"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_network_sees_the_scale_of_its_training(gradient, scale):
    """A process that is not variance preserving: with the same expected image, everything else is the same."""
    x, found = seeded(2, 3, 2, 2), []
    for scaler in ("vp", "lerp"):
        process = LogSnrProcess(LogSnrConfig(scaler=scaler, prediction="x_start"))
        steps = process.steps(10)

        def network(x, t, cond, process=process):
            a, b = process.scales(process.log_snr(t.double()), x)
            return torch.sin(x / (a**2 + b**2).sqrt()) * (1 + cond.labels.view(-1, 1, 1, 1))

        config = GuidanceConfig(guidance_scale=scale, thresholding="none")
        guide = ClassifierGuidance(curved_similarity, 0.3, gradient)
        p = guided_denoiser(steps, network, COND, NULL, config, guide)(x, 6)
        assert (p.x_start - guided_denoiser(steps, network, COND, NULL, config)(x, 6).x_start).abs().max() > 1e-3
        found.append((p.x_start, p.eps, p.mean))
    assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("percentile", [0.3, 0.9, 0.995, 1.0])
def test_dynamic_threshold(percentile):
    """Each sample is divided by its percentile of |x_start|, as by torch.quantile; small values stay."""
    scale = torch.tensor([0.01, 2, 5]).view(3, 1, 1, 1)
    x = scale * torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    s = x.abs().flatten(1).quantile(percentile, dim=1).clamp(min=1).view(3, 1, 1, 1)
    assert_close(dynamic_threshold(x, percentile), x.clamp(-s, s) / s)
    assert_close(dynamic_threshold(x, percentile)[1:2], dynamic_threshold(x[1:2], percentile))


@pytest.mark.parametrize(("kind", "largest"), [("none", 7.0), ("static", 1.0), ("dynamic", 1.0)])
def test_thresholding(kind, largest):
    """Each kind limits x_start as documented, and eps follows x_start."""
    process, x = create_gaussian_diffusion(CONFIG), torch.randn(1, 3, 4, 4)

    def network(x, t, cond):
        return torch.cat([x / x.abs().amax() * 7, x], dim=1)

    found = guided_denoiser(process, network, COND, None, GuidanceConfig(guidance_scale=1.0, thresholding=kind))(x, 50)
    assert found.x_start.abs().max().item() == pytest.approx(largest, rel=1e-5)
    alpha_bar = process.alphas_cumprod[50]
    assert_close(alpha_bar**0.5 * found.x_start + (1 - alpha_bar) ** 0.5 * found.eps, x)


def test_thresholding_uses_the_value_range():
    x = 3 * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    static, dynamic, none = (GuidanceConfig(thresholding=kind) for kind in ("static", "dynamic", "none"))
    assert torch.equal(thresholding(static, (0.0, 4.0))(x), x.clamp(0, 4))
    assert_close(thresholding(dynamic, (0.0, 4.0))(x), 2 * dynamic_threshold((x - 2) / 2, 0.995) + 2)
    assert torch.equal(thresholding(dynamic, (-1.0, 1.0))(x), dynamic_threshold(x, 0.995))
    assert thresholding(none, None) is None
    for config in (static, dynamic):
        with refused(f"thresholding is {config.thresholding}, .* set it to none"):
            thresholding(config, None)
    process, network = create_gaussian_diffusion(CONFIG), Network()
    denoise = guided_denoiser(process, network, COND, None, GuidanceConfig(guidance_scale=1.0), None, (0.15, 0.25))
    found = denoise(torch.zeros(2, 3, 4, 4), 50).x_start  # 0.1 and 0.2 before the limits
    assert_close(found.amax((1, 2, 3)), torch.tensor([0.15, 0.2]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"guidance_rescale": 1.1},
        {"guidance_rescale": -0.1},
        {"guidance_interval": (0.5,)},
        {"guidance_interval": (0.8, 0.2)},
        {"perturbed_attention_interval": (0.5,)},
        {"perturbed_attention_interval": (0.8, 0.2)},
        {"dynamic_percentile": 0.0},
        {"thresholding": "x"},
    ],
)
def test_bad_settings(settings):
    """Impossible settings are refused, naming them."""
    with refused(next(iter(settings))):
        GuidanceConfig(**settings)


# ------------------------------------------------------------------------------------------------- classifiers

WIDTH, ERROR, CENTER = 0.8, 0.5, 0.3
ORIGINAL = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=100, noise_schedule="cosine"))
OFF = GuidanceConfig(guidance_scale=1.0, thresholding="none")
SHAPE = (4, 3, 2, 2)


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Gaussian:
    """Data x_start ~ N(CENTER, WIDTH²) and an observation of it, y ~ N(x_start, ERROR²), in closed form.

    Called as a network, it has the prediction type of ``process``. t counts steps of ORIGINAL.
    """

    def __init__(self, process, y=None):
        self.process, self.y, self.steps = process, y, []

    def expected(self, x, t):
        """Mean of x_start given x_t, its slope in x_t, and its variance."""
        alpha_bar = torch.tensor(ORIGINAL.alphas_cumprod)[t].view(-1, 1, 1, 1)
        spread = alpha_bar * WIDTH**2 + 1 - alpha_bar
        slope = alpha_bar.sqrt() * WIDTH**2 / spread
        return CENTER + slope * (x - alpha_bar.sqrt() * CENTER), slope, WIDTH**2 * (1 - alpha_bar) / spread

    def __call__(self, x, t, cond=None):
        x_start, alpha_bar = self.expected(x, t)[0], torch.tensor(ORIGINAL.alphas_cumprod)[t].view(-1, 1, 1, 1)
        eps = (x - alpha_bar.sqrt() * x_start) / (1 - alpha_bar).sqrt()
        here = self.process.timestep_map.index(int(t[0]))
        output = {
            ModelMeanType.EPSILON: eps,
            ModelMeanType.START_X: x_start,
            ModelMeanType.VELOCITY: alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x_start,
            ModelMeanType.PREVIOUS_X: self.process.posterior_mean(x_start, x, here),
        }[self.process.model_mean_type]
        return torch.cat([output, 0.2 * x], 1) if self.process.model_var_type.is_learned else output

    def similarity(self, x, t):
        """log p(y | x_t) up to a constant."""
        self.steps.append(t)
        mean, _, variance = self.expected(x, t)
        return (-(self.y - mean).square() / (2 * (variance + ERROR**2))).flatten(1).sum(1)

    def posterior(self, x, t):
        """Mean of x_start given x_t and y."""
        mean, _, variance = self.expected(x, t)
        return mean + variance / (variance + ERROR**2) * (self.y - mean)


def denoiser(process, model, scale=1.0, gradient="x_t", config=OFF, similarity=None):
    guide = ClassifierGuidance(similarity or model.similarity, scale, gradient)
    return guided_denoiser(process, model, None, None, config, guide)


@pytest.mark.parametrize("variance", ["fixed_small", "learned_range"])
@pytest.mark.parametrize("prediction", ["eps", "x_start", "v", "previous_x"])
def test_the_guided_denoiser_is_that_of_the_posterior(prediction, variance):
    """Bayes' rule: at scale 1 its x_start is the posterior mean given x_t and y, at every step after respacing. A
    learned variance is unchanged."""
    config = DiffusionConfig(100, "cosine", prediction=prediction, variance=variance)
    process, x = create_gaussian_diffusion(config, "5"), seeded(*SHAPE)
    model = Gaussian(process, seeded(*SHAPE, seed=1))
    guided, plain = denoiser(process, model), guided_denoiser(process, model, None, None, OFF)
    for t, step in enumerate(process.timestep_map):
        found, before = guided(x, t), plain(x, t)
        steps, alpha_bar = torch.full((4,), step), ORIGINAL.alphas_cumprod[step]
        assert_close(found.x_start, model.posterior(x, steps), rtol=1e-6, atol=1e-6)
        assert (found.x_start - before.x_start).abs().max() > 1e-4 or t == 0
        assert_close(alpha_bar**0.5 * found.x_start + (1 - alpha_bar) ** 0.5 * found.eps, x)
        assert_close(found.mean, process.posterior_mean(found.x_start, x, t))
        assert_close(torch.as_tensor(found.log_variance), torch.as_tensor(before.log_variance))
    assert [seen.unique().tolist() for seen in model.steps] == [[0], [25], [50], [74], [99]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_follows_the_sign_and_draws_from_the_posterior(name):
    """Guidance raises the score, and lowers it with the sign flipped; at scale 1 samples follow the posterior."""
    process = create_gaussian_diffusion(DiffusionConfig(100, "cosine", variance="fixed_small"))
    x, model = seeded(500, 3, 2, 2), Gaussian(process, torch.full((1, 3, 2, 2), -0.9, dtype=torch.float64))

    def ends(scale):
        noise = torch.Generator().manual_seed(1)
        denoise = denoiser(process, model, scale) if scale else guided_denoiser(process, model, None, None, OFF)
        steps = SAMPLERS[name](process, denoise, x, lambda t: torch.randn(x.shape, generator=noise, dtype=x.dtype))
        *_, last = steps
        return last.x

    found = {scale: ends(scale) for scale in (-0.3, 0, 1.0)}
    score = {scale: -(x - model.y).square().mean() for scale, x in found.items()}
    assert score[-0.3] < score[0] < score[1.0]
    share = WIDTH**2 / (WIDTH**2 + ERROR**2)
    assert found[1.0].mean().item() == pytest.approx(CENTER + share * (-0.9 - CENTER), abs=0.03)
    if name != "lcm":  # for which x_start must be a sample
        assert found[1.0].std().item() == pytest.approx(share**0.5 * ERROR, rel=0.06)
    assert found[0].mean().item() == pytest.approx(CENTER, abs=0.05)


@pytest.mark.parametrize(("gradient", "seen"), [("x_t", [[250.0], [500.0]]), ("x_start", [[0.0], [0.0]])])
def test_the_classifier_has_the_networks_time_input_and_is_used_inside_the_interval_only(gradient, seen):
    process = create_gaussian_diffusion(DiffusionConfig(100, "cosine", rescale_timesteps=True), "5")
    steps, x = [], seeded(*SHAPE).float()

    def similarity(x, t):
        steps.append(t.unique().tolist())
        return x.flatten(1).sum(1)

    config = GuidanceConfig(guidance_scale=1.0, guidance_interval=(0.25, 0.7), thresholding="none")
    guide = ClassifierGuidance(similarity, 1.0, gradient)
    guided = guided_denoiser(process, lambda x, t, cond: 0.1 * x, None, None, config, guide)
    plain = guided_denoiser(process, lambda x, t, cond: 0.1 * x, None, None, config)
    changed = [not torch.equal(guided(x, t).x_start, plain(x, t).x_start) for t in range(5)]
    assert changed == [False, True, True, False, False] and steps == seen


def curved(x, t, cond=None):
    """A nonlinear network whose output pixels depend on their neighbors."""
    return torch.tanh(x + 0.5 * x.roll(1, 3)) * (1 + x.mean(1, keepdim=True))


def curved_similarity(x, t):
    return (x.square() * torch.linspace(-1, 1, 4, dtype=x.dtype).view(1, 1, 2, 2)).flatten(1).sum(1).sin()


def test_the_gradient_of_x_start_passes_through_the_model():
    """It equals finite differences of the similarity of the expected image; the model is evaluated once."""
    process, x, calls = create_gaussian_diffusion(DiffusionConfig(100, "cosine", prediction="v")), seeded(*SHAPE), []

    def model(x, t, cond):
        calls.append(t)
        return curved(x, t)

    with torch.no_grad():
        found = denoiser(process, model, 1.7, "x_start", similarity=curved_similarity)(x, 50)
    assert len(calls) == 1 and not found.x_start.requires_grad
    expected = process.denoiser(curved, clip_denoised=False)
    numeric = torch.zeros_like(x)
    for position in range(x[0].numel()):
        step = 1e-5 * torch.eye(x[0].numel(), dtype=x.dtype)[position].view(1, *x.shape[1:])
        up, down = (curved_similarity(expected(x + sign * step, 50).x_start, None) for sign in (1, -1))
        numeric.flatten(1)[:, position] = (up - down) / 2e-5
    alpha_bar = ORIGINAL.alphas_cumprod[50]
    shift = 1.7 * (1 - alpha_bar) / alpha_bar**0.5 * numeric
    assert_close(found.x_start - expected(x, 50).x_start, shift, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gradient", ["x_t", "x_start"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_thresholding_comes_after_the_shift(gradient, kind):
    """With any gradient, the image stays in range; the classifier's input x_start is in range too."""
    process = create_gaussian_diffusion(DiffusionConfig(100, "cosine", prediction="x_start"))
    x, seen = seeded(*SHAPE), []
    limited = GuidanceConfig(guidance_scale=1.0, thresholding=kind)

    def similarity(x, t):
        seen.append(x.detach())
        return 5 * x.flatten(1).sum(1)

    def network(x, t, cond):
        return 3 * x

    found = denoiser(process, network, 2.0, gradient, limited, similarity)(x, 50)
    free = denoiser(process, network, 2.0, gradient, OFF, similarity)(x, 50)
    assert free.x_start.abs().max() > 10
    limit = {"static": lambda x: x.clamp(-1, 1), "dynamic": lambda x: dynamic_threshold(x, 0.995)}[kind]
    assert_close(found.x_start, limit(free.x_start))
    assert_close(seen[0], limit(3 * x) if gradient == "x_start" else x)


def test_both_guidances_add_up():
    """The classifier's shift is the same with classifier-free guidance; outside the interval neither applies."""
    process, x = create_gaussian_diffusion(CONFIG), seeded(2, 3, 2, 2).float()
    network = Network()
    guide = ClassifierGuidance(curved_similarity, 2.0)
    results = {}
    for scale in (1.0, 3.0):
        for classifier in (None, guide):
            config = GuidanceConfig(guidance_scale=scale, guidance_interval=(0.0, 0.6), thresholding="none")
            denoise = guided_denoiser(process, network, COND, NULL, config, classifier)
            results[scale, classifier is not None] = denoise(x, 50).x_start
            assert_close(denoise(x, 80).x_start, network(x, None, COND).float()[:, :3])
    shift = results[1.0, True] - results[1.0, False]
    assert shift.abs().max() > 0.1 and (results[3.0, False] - results[1.0, False]).abs().max() > 0.1
    assert_close(results[3.0, True] - results[3.0, False], shift)


def test_the_gradient_of_x_start_passes_through_classifier_free_guidance():
    process, x = create_gaussian_diffusion(CONFIG), seeded(2, 3, 2, 2).float()

    def network(x, t, cond):
        return torch.cat([cond.labels.view(-1, 1, 1, 1) * x, x], 1)

    config = GuidanceConfig(guidance_scale=3.0, thresholding="none")
    guide = ClassifierGuidance(lambda x, t: x.flatten(1).sum(1), 1.0, "x_start")
    found = guided_denoiser(process, network, COND, NULL, config, guide)(x, 50)
    slope = 3.0 * COND.labels.view(-1, 1, 1, 1)  # of 0 + 3 × (label − 0) × x
    gain = process.one_minus_alphas_cumprod[50] / process.sqrt_alphas_cumprod[50]
    assert_close(found.x_start, slope * x + gain * slope)


def test_scale_zero_is_off():
    """Exactly the unguided result, and the classifier is never evaluated."""

    def refuse(x, t):
        raise AssertionError("evaluated")

    process, x = create_gaussian_diffusion(CONFIG), torch.randn(2, 3, 4, 4)
    config = GuidanceConfig(guidance_scale=1.0)
    found = guided_denoiser(process, Network(), COND, None, config, ClassifierGuidance(refuse, 0.0))(x, 50)
    plain = guided_denoiser(process, Network(), COND, None, config)(x, 50)
    assert torch.equal(found.x_start, plain.x_start) and torch.equal(found.mean, plain.mean)


def test_the_scale_of_the_gradient_only_prevents_underflow(monkeypatch):
    """In full precision it changes no bit; in half precision 2^-26 would underflow in the backward pass."""

    def half(x):
        return (x.half() * 2.0**-13 * 2.0**-13).float().flatten(1).sum(1)

    x = seeded(*SHAPE).float()
    scaled = [similarity_gradient(lambda x: curved_similarity(x, None), x), similarity_gradient(half, x)]
    monkeypatch.setattr("diff_dalle.diffusion.guidance._GRADIENT_SCALE", 1.0)
    assert torch.equal(similarity_gradient(lambda x: curved_similarity(x, None), x), scaled[0])
    assert scaled[1].eq(2.0**-26).all() and similarity_gradient(half, x).eq(0).all()


def test_unknown_gradients_and_forms_are_refused():
    for name, value in (("gradient", "x_0"), ("form", "variance")):
        with refused(f"classifier_{name}"):
            ClassifierGuidance(curved_similarity, 1.0, **{name: value})
