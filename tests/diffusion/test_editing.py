"""Image editing with every sampler, against exact denoisers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from network_making import seeded
from refusing import refused
from torch import nn
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import SAMPLERS, DiffusionConfig, GuidanceConfig, Prediction, create_gaussian_diffusion
from diff_dalle.diffusion.editing import (
    Edit,
    EditConfig,
    edit_start,
    edited_steps,
    keep_known,
    resampled_steps,
    shortened,
)
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch, sample_steps
from diff_dalle.images.signal import PixelSignal

CONFIG = DiffusionConfig(variance="fixed_small")
OFF = GuidanceConfig(guidance_scale=1.0, thresholding="none")
SIZE = (4, 6)
DETERMINISTIC = [name for name in SAMPLERS if name not in ("ancestral", "lcm")]
LEFT = torch.arange(6) < 3  # columns


DATA = seeded(3, 3, *SIZE).clamp(-1, 1)


class Exact(nn.Module):
    """Predicts eps for a mixture of Gaussians of standard deviation ``scale`` around the images DATA."""

    def __init__(self, scale=0.0):
        super().__init__()
        self.data, self.scale, self.steps = nn.Parameter(DATA.flatten(1)), scale, []
        self.alphas_cumprod = torch.tensor(create_gaussian_diffusion(CONFIG).alphas_cumprod)

    def encode_text(self, cond):
        return cond

    def forward(self, x, t, cond=None):
        self.steps.append(int(t[0]))
        alpha_bar = self.alphas_cumprod[t].float()[:, None, None]
        spread = alpha_bar * self.scale**2 + 1 - alpha_bar
        away = x.flatten(1)[:, None] - alpha_bar.sqrt() * self.data
        share = (-away.square().sum(2, keepdim=True) / (2 * spread)).softmax(1)
        return ((1 - alpha_bar).sqrt() * (share * away / spread).sum(1, keepdim=True)).view_as(x)


def run(edit, sampler="ddim", steps="20", seeds=None, model=None, process=None, **options):
    """Every step, by default with an exact network."""
    seeds = range(len(edit.images)) if seeds is None else seeds
    process = process or create_gaussian_diffusion(CONFIG, steps)
    batch = SampleBatch(PixelSignal(), SIZE, seeds, Conditioning(), edit=edit)
    with torch.no_grad():
        return list(sample_steps(model or Exact(), process, batch, SamplerConfig(sampler, **options), OFF))


def end(*arguments, **keywords):
    return run(*arguments, **keywords)[-1].x


def nearest(x):
    """The index of the nearest image of DATA, and the distance to it."""
    distance = (x[:, None] - DATA).abs().flatten(2).amax(2)
    return distance.argmin(1), distance.amin(1)


def inpaint_right(count=3, **settings):
    """The left half of DATA's first images, in turn; gray and to be inpainted on the right."""
    unknown = ~LEFT.expand(count, 1, *SIZE)
    return Edit(DATA[torch.arange(count) % 3] * ~unknown, unknown, EditConfig(**settings))


EDITS = {
    "image to image": lambda: Edit(DATA + 0.1, None, EditConfig(strength=0.5)),
    "inpainting": lambda: inpaint_right(inpaint_resamples=2),
    "inpainting with strength": lambda: inpaint_right(inpaint_resamples=3, inpaint_jump=4, strength=0.8),
    "variation": lambda: Edit(DATA + 0.1, None, EditConfig(variation=0.5)),
    "variation of details": lambda: Edit(DATA + 0.1, None, EditConfig(variation=0.5, strength=0.4)),
}
ALL = [(edit, name) for edit in EDITS for name in (DETERMINISTIC if "variation" in edit else SAMPLERS)]


@pytest.mark.parametrize(("edit", "name"), ALL)
def test_every_sampler_performs_every_edit_and_an_image_does_not_depend_on_its_batch(edit, name):
    """Without a mask they end at the data; alone or in a batch. Evaluations: passes × those of the sampler, plus T − 1
    for the inversion of a variation."""
    edit, model = EDITS[edit](), Exact()
    together, alone = end(edit, name, model=model), end(edit.select([1]), name, seeds=[1])
    assert together.shape == DATA.shape and (edit.unknown is not None or nearest(together)[1].max() < 0.02)
    assert_close(together[1:2], alone, atol=1e-5, rtol=0)
    steps = shortened(create_gaussian_diffusion(CONFIG, "20"), edit.strength).num_timesteps
    passes = 1 if edit.unknown is None else edit.config.inpaint_resamples
    once = 2 * steps - 1 if name == "heun" else steps
    assert len(model.steps) == passes * once + (steps - 1 if edit.config.variation is not None else 0)


# ------------------------------------------------------------------------------------------------------ strength


def test_a_shortened_process_is_the_low_end_of_the_original():
    """Same tables at the same steps, same position in the original process; t = strength × T is excluded."""
    process = create_gaussian_diffusion(replace(CONFIG, diffusion_steps=100), "25")
    kept = [t for t in process.timestep_map if t < 50]
    short = shortened(process, 0.5)
    assert short.timestep_map == kept and shortened(process, 1.0).timestep_map == process.timestep_map
    assert short.fraction(7) == process.fraction(7) == kept[7] / 100
    tables = [name for name, value in vars(process).items() if isinstance(value, np.ndarray) and len(value) == 25]
    assert len(tables) > 15
    for table in set(tables) - {"alphas_cumprod_next"}:  # which looks beyond the end
        assert (getattr(short, table) == getattr(process, table)[: len(kept)]).all()
    assert shortened(create_gaussian_diffusion(replace(CONFIG, diffusion_steps=100)), 0.07).num_timesteps == 7
    with refused("strength 0.1 leaves no step"):
        shortened(create_gaussian_diffusion(CONFIG, "0,10"), 0.1)


@pytest.mark.parametrize("strength", [0.3, None])
def test_strength_is_the_fraction_of_the_process_that_is_sampled(strength):
    """0.75 by default; the images start with the noise of the first step taken."""
    model, edit = Exact(), Edit(DATA, None, EditConfig(strength=strength))
    process, expected = create_gaussian_diffusion(CONFIG, "20"), strength or 0.75
    run(edit, model=model)
    assert model.steps == [t for t in process.timestep_map[::-1] if t < expected * 1000]
    short, noise = shortened(process, expected), seeded(*DATA.shape)
    alpha_bar = process.alphas_cumprod[short.num_timesteps - 1]
    start = alpha_bar**0.5 * DATA + (1 - alpha_bar) ** 0.5 * noise
    assert_close(edit_start(short, None, edit, noise), start)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_low_strength_preserves_the_image_and_strength_1_ignores_it(name):
    near = DATA + 0.2 * seeded(*DATA.shape, seed=1)
    found, distance = nearest(end(Edit(near, None, EditConfig(strength=0.2)), name))
    assert found.tolist() == [0, 1, 2] and distance.max() < 0.02
    ignored = [end(Edit(given, None, EditConfig(strength=1.0)), name) for given in (near, -near)]
    assert torch.equal(*ignored)


# ------------------------------------------------------------------------------------------------------- inpainting


class Rough(Exact):
    """Inconsistent predictions, nonlinear and far out of range."""

    def __init__(self, out_channels):
        super().__init__()
        self.out_channels = out_channels

    def forward(self, x, t, cond=None):
        mean = 2 * torch.tanh(3 * x.roll(1, 3)) + x.square()
        return torch.cat([mean, x], 1)[:, : self.out_channels]


OUTPUTS = [("eps", "fixed_large"), ("x_start", "learned_range"), ("previous_x", "fixed_small"), ("v", "learned")]
MIXED = [
    (name, *OUTPUTS[(i + k) % 4], schedule)
    for i, name in enumerate(SAMPLERS)
    for k, schedule in enumerate(("linear", "cosine", "jsd"))
]


@pytest.mark.parametrize(("name", "prediction", "variance", "schedule"), MIXED)
def test_known_pixels_end_at_their_given_values(name, prediction, variance, schedule):
    """Bit for bit, whatever the network predicts; the others do not."""
    edit = inpaint_right(inpaint_resamples=2, inpaint_jump=3)
    config = DiffusionConfig(100, schedule, prediction=prediction, variance=variance)
    network = Rough(6 if config.variance_is_learned else 3)
    last = end(edit, name, model=network, process=create_gaussian_diffusion(config, "8"))
    assert torch.equal(last[..., LEFT], edit.images[..., LEFT])
    assert (last[..., ~LEFT] != edit.images[..., ~LEFT]).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_inpainted_pixels_match_known_ones(name):
    """The known half determines the image of the data, more reliably with more passes."""
    which, hits = torch.arange(120) % 3, []
    for passes in (1, 10):
        found, _ = nearest(end(inpaint_right(120, inpaint_resamples=passes), name))
        hits.append((found == which).float().mean().item())
    assert hits[1] > 0.95 and hits[1] >= hits[0]


def test_passes():
    """Segments from the top, each repeated; one pass is the plain sampler, with its history."""

    def steps_taken(**settings):
        return [step.t for step in run(inpaint_right(**settings), steps="7")]

    assert steps_taken(inpaint_resamples=2, inpaint_jump=3) == [6, 5, 4, 6, 5, 4, 3, 2, 1, 3, 2, 1, 0, 0]
    assert steps_taken(inpaint_resamples=1, inpaint_jump=3) == [6, 5, 4, 3, 2, 1, 0]
    assert steps_taken(inpaint_resamples=2, inpaint_jump=9) == [6, 5, 4, 3, 2, 1, 0] * 2
    once = [end(inpaint_right(inpaint_resamples=1, inpaint_jump=jump), "dpm++2m") for jump in (3, 100)]
    assert torch.equal(*once)


def test_noising_again_is_the_forward_process():
    """From step 3, after it, to step 5, before it: the signal and the noise are those of an image noised to step 5."""
    process, seen = create_gaussian_diffusion(CONFIG, "9"), {}
    bottom, top = process.alphas_cumprod[[2, 5]]  # after step 3, before step 5

    def one_image(x, t):  # the noise in x is 0, so ddim follows the image itself
        seen.setdefault(t, []).append(x)
        return Prediction(DATA, torch.zeros_like(DATA), x, 0.0)

    short = process.truncated(6)
    for noise in (0.0, 1.0):
        seen.clear()
        fresh = torch.full_like(DATA, noise)
        steps = resampled_steps(
            short, SAMPLERS["ddim"], one_image, top**0.5 * DATA, lambda name, fresh=fresh: fresh, passes=2, jump=3
        )
        assert [step.t for step in itertools.islice(steps, 4)] == [5, 4, 3, 5]
        added = (1 - top / bottom) ** 0.5  # with the scaled noise of step 3, the variances add up to 1 − ᾱ
        assert top / bottom * (1 - bottom) + added**2 == pytest.approx(1 - top)
        assert_close(seen[5][1], top**0.5 * DATA + noise * added)


@pytest.mark.parametrize("variance", ["fixed_large", "learned_range"])
def test_keep_known_changes_known_pixels_to_their_posterior_and_no_others(variance):
    process = create_gaussian_diffusion(replace(CONFIG, variance=variance), "9")
    x, unknown = seeded(3, 3, *SIZE, seed=5), seeded(3, 1, *SIZE, seed=6) > 0
    learned = variance.startswith("learned")
    denoise = process.denoiser(lambda x, t: torch.cat([x.sin(), x.cos()], 1) if learned else x.sin())
    before, found = denoise(x, 4), keep_known(process, denoise, DATA, unknown)(x, 4)
    alpha_bar, log_variance = process.alphas_cumprod[4], torch.full_like(x, process.posterior_log_variance_clipped[4])
    eps = (x - alpha_bar**0.5 * DATA) / (1 - alpha_bar) ** 0.5
    expected = Prediction(DATA, eps, process.posterior_mean(DATA, x, 4), log_variance)
    for name in ("x_start", "eps", "mean", "log_variance"):
        value, given = getattr(found, name).expand_as(x), torch.as_tensor(getattr(before, name)).expand_as(x)
        assert_close(value, torch.where(unknown, given, getattr(expected, name)))


def test_unknown_pixels_start_from_noise_and_known_ones_from_the_noised_image():
    edit, fresh = inpaint_right(), seeded(3, 3, *SIZE, seed=7)
    process = create_gaussian_diffusion(CONFIG, "9").truncated(5)
    start = edit_start(process, None, edit, fresh)
    noised = process.q_sample(edit.images, torch.full((3,), 4), fresh)
    assert_close(start, torch.where(edit.unknown, fresh, noised))


def test_a_full_mask_is_plain_sampling_and_an_empty_mask_the_image():
    """All unknown: the same as strength 1, whatever the image. None unknown: the image."""
    given, plain = 5 * seeded(*DATA.shape, seed=2), end(Edit(DATA, None, EditConfig(strength=1.0)))
    for share in (True, False):
        edit = Edit(given, torch.full((3, 1, *SIZE), share), EditConfig(inpaint_resamples=1))
        assert_close(end(edit), plain if share else given, atol=1e-5, rtol=0)


def test_with_a_strength_the_unknown_pixels_start_from_the_image():
    """At a low strength, the image under the mask determines the result, not the other half."""
    unknown = ~LEFT.expand(3, 1, *SIZE)
    mixed = torch.where(unknown, DATA.roll(1, 0), DATA)
    found = end(Edit(mixed, unknown, EditConfig(strength=0.05)))
    assert_close(found, mixed, atol=0.1, rtol=0)


# -------------------------------------------------------------------------------------------------------- variations


def varied(variation, sampler="ddim", steps="200", strength=None, model=None, seeds=None):
    edit = Edit(DATA + 0.3, None, EditConfig(variation=variation, strength=strength))
    return end(edit, sampler, steps, seeds, model or Exact(scale=0.3))


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_variation_0_reconstructs_the_image(strength):
    """More exactly with more steps; independent of the seed."""
    gap = {steps: (varied(0.0, steps=steps, strength=strength) - DATA - 0.3).abs().max() for steps in ("100", "400")}
    assert gap["400"] < 0.05 and gap["400"] < 0.5 * gap["100"]
    assert torch.equal(varied(0.0, seeds=[0, 1, 2]), varied(0.0, seeds=[3, 4, 5]))


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_variation_1_is_fresh_noise(name, strength):
    """The same as image to image with that strength."""
    again = end(Edit(DATA + 0.3, None, EditConfig(strength=strength)), name, "10", None, Exact(scale=0.3))
    assert_close(varied(1.0, name, "10", strength), again, atol=1e-5, rtol=0)


def test_in_between_the_noise_keeps_its_variance_and_the_image_changes_monotonically():
    model = Exact(scale=0.8)
    process = create_gaussian_diffusion(CONFIG, "100")
    images = DATA[:1] + 0.8 * seeded(300, 3, *SIZE, seed=3)
    given, noise = Edit(images, None, EditConfig(variation=0.5)), seeded(300, 3, *SIZE, seed=4)
    with torch.no_grad():
        start = edit_start(process, process.denoiser(model, clip_denoised=False), given, noise)
    assert start.std().item() == pytest.approx(1, abs=0.02)
    change = [(varied(v, steps="50") - varied(0.0, steps="50")).square().mean() for v in (0.1, 0.3, 0.6)]
    assert 0 < change[0] < change[1] < change[2]


# ------------------------------------------------------------------------------------------------------ noise, errors


def test_no_noise_is_used_twice_nor_is_that_of_sampling():
    """Otherwise an image edited with its own seed would be noised with the same noise again."""
    names, process = [], create_gaussian_diffusion(CONFIG, "9")

    def noise(name):
        names.append(name)
        return seeded(*DATA.shape)

    denoise = process.denoiser(Exact())
    edit = inpaint_right(inpaint_resamples=3, inpaint_jump=4)
    with torch.no_grad():
        list(edited_steps(process, SAMPLERS["ancestral"], denoise, denoise, edit, noise))
    assert len(set(names)) == len(names) == 1 + 3 * 9 - 3 + 2 * 3  # the start; not at t = 0; two ways back in each of 3
    assert all(name.startswith("editing") for name in names)


def test_inversion_is_not_guided():
    """Guidance applies to the steps from the inverted noise only."""
    sizes = []

    class Guided(Exact):
        def forward(self, x, t, cond=None):
            sizes.append(len(x))
            return super().forward(x, t) * (1 + 0.01 * cond.labels.view(-1, 1, 1, 1))

    cond, null = Conditioning(labels=torch.ones(3)), Conditioning(labels=torch.zeros(3))
    edit = Edit(DATA, None, EditConfig(variation=0.0))
    batch = SampleBatch(PixelSignal(), SIZE, range(3), cond, null, edit)
    process = create_gaussian_diffusion(CONFIG, "5")
    guidance = GuidanceConfig(guidance_scale=2.0, perturbed_attention_scale=1.0)
    sample_batch(Guided(), process, batch, SamplerConfig("ddim"), guidance)
    assert sizes == [3] * 4 + [9] * 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("strength", 0.0), ("strength", 1.5), ("variation", -0.1), ("variation", 2.0), ("inpaint_resamples", 0),
     ("inpaint_jump", 0)],
)  # fmt: skip
def test_bad_settings(name, value):
    with refused(f"{name} is"):
        EditConfig(**{name: value})


def test_impossible_edits_are_refused():
    unknown, vary = torch.ones(3, 1, *SIZE, dtype=torch.bool), EditConfig(variation=0.5)
    with refused("a mask and variation"):
        Edit(DATA, unknown, vary)
    for mask in (unknown.float(), unknown[:2], unknown[:, 0]):
        with refused("the mask is"):
            Edit(DATA, mask)
    with refused("deterministic sampler .*not ancestral"):
        run(Edit(DATA, None, vary), "ancestral")
    with refused(r"deterministic sampler \(ddim, dpm\+\+2m, unipc, heun\) .*not lcm"):
        run(Edit(DATA, None, vary), "lcm")
    with refused("deterministic sampler .*eta 0.5"):
        run(Edit(DATA, None, vary), "ddim", eta=0.5)
    with refused("images to edit have shape"):
        run(Edit(DATA, None), seeds=[0, 1])
