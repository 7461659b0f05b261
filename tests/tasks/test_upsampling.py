"""Training an upsampler: low-resolution images, their degradation as a function of position, reported values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from shard_making import encoded, tar_bytes
from torch import nn
from torch.testing import assert_close

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.augmentation import AugmentationConfig, area_downsample, blur
from diff_dalle.diffusion.diffusion_config import training_process
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.evaluation.fidelity import PSNR_CAP
from diff_dalle.images.transforms import Window
from diff_dalle.randomness import Draw
from diff_dalle.tasks.denoising import DenoisingTask, UpsamplingTask, signal_psnr

PROCESS = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40, prediction="x_start"))
FLOW = training_process(DiffusionConfig(noise_schedule="flow", prediction="x_start", loss_space="flow"))
PLAIN, BOTH = AugmentationConfig(), AugmentationConfig(gaussian_blur=True, noise_augmentation=0.3)
KEEP = DenoisingConfig(caption_dropout=0.0)
FIELDS = ("low_res", "low_res_level", "low_res_blur")


def draw_of(batch):
    return Draw(0, batch.index)


class Watcher(nn.Module):
    """Returns a given output and records its inputs."""

    def __init__(self, answer=None):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.answer, self.shown = answer, []

    def forward(self, x, t, cond):
        self.shown.append((x, t, cond))
        return self.gain * (torch.zeros_like(x) if self.answer is None else self.answer)


def make_batch(n=6, size=(4, 8), start=0, seed=0):
    """Images within half of the range, each with its own caption."""
    images = torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(seed)) - 0.5
    index = torch.arange(start, start + n)
    tokens = torch.stack([torch.full((n,), 40), index % 7, torch.full((n,), 41)], 1)
    return Batch(images, Conditioning(tokens=tokens, mask=torch.ones(n, 3, dtype=torch.bool)), index)


def make_task(augmentation=PLAIN, answer=None, config=KEEP, factor=2, process=PROCESS):
    return UpsamplingTask(Watcher(answer), process, config, factor, augmentation.degradation)


def condition(task, batch, seed=0):
    return task.condition(batch, Draw(seed, batch.index))


# ---------------------------------------------------------------------------------------------------- the small images


@pytest.mark.parametrize("factor", [2, 4])
def test_small_images_are_the_batchs_own_made_small(factor):
    batch = make_batch()
    cond = condition(make_task(factor=factor), batch)
    assert torch.equal(cond.low_res, area_downsample(batch.images, factor))
    assert cond.low_res.shape == (6, 3, 4 // factor, 8 // factor)
    assert torch.equal(cond.low_res_level, torch.zeros(6)) and torch.equal(cond.low_res_blur, torch.zeros(6))
    assert torch.equal(cond.tokens, batch.cond.tokens) and torch.equal(cond.mask, batch.cond.mask)


def test_half_are_blurred_and_all_noised_within_bounds_and_independently():
    cond = condition(make_task(BOTH), make_batch(2000, (2, 2)))
    sigma, level = cond.low_res_blur, cond.low_res_level
    assert sigma.dtype == level.dtype == torch.float32
    blurred = sigma > 0
    assert 0.45 < blurred.float().mean() < 0.55
    assert sigma[blurred].min() == pytest.approx(0.4, abs=0.005) and sigma[blurred].min() >= 0.4
    assert sigma[blurred].max() == pytest.approx(0.6, abs=0.005) and sigma[blurred].max() <= 0.6
    assert 0 <= level.min() < 0.005 and 0.295 < level.max() <= 0.3
    assert level.mean() == pytest.approx(0.15, abs=0.01)
    t = Draw(0, torch.arange(2000)).uniform("timestep").float()
    for values in ([blurred.float(), level, t], [sigma[blurred], level[blurred], t[blurred]]):
        assert torch.corrcoef(torch.stack(values)).fill_diagonal_(0).abs().max() < 0.12


@pytest.mark.parametrize(
    ("augmentation", "blurred", "noised"),
    [
        (AugmentationConfig(gaussian_blur=True), True, False),
        (AugmentationConfig(noise_augmentation=1.0), False, True),
        (PLAIN, False, False),
    ],
)
def test_each_kind_of_degradation_has_its_own_switch(augmentation, blurred, noised):
    cond = condition(make_task(augmentation), make_batch(50))
    assert (cond.low_res_blur.count_nonzero() > 0) == blurred
    assert (cond.low_res_level.count_nonzero() > 0) == noised


def test_the_network_is_told_what_was_done():
    """The noise is standard normal, independent between samples, and not the noise of x_t."""
    batch = make_batch(64, (16, 16))
    task = make_task(BOTH)
    cond = condition(task, batch)
    angle = (cond.low_res_level * torch.pi / 2)[:, None, None, None]
    clean = blur(area_downsample(batch.images, 2), cond.low_res_blur)
    noise = ((cond.low_res - angle.cos() * clean) / angle.sin())[cond.low_res_level > 0.02].flatten(1)
    assert len(noise) > 50
    assert noise.mean().abs() < 0.03 and noise.std() == pytest.approx(1, abs=0.03)
    assert (torch.corrcoef(noise) - torch.eye(len(noise))).abs().max() < 0.5
    task.losses(batch, draw_of(batch))
    *_, seen = task.model.shown[-1]
    assert all(torch.equal(getattr(seen, name), getattr(cond, name)) for name in FIELDS)
    other = draw_of(batch).normal("noise", (3, 8, 8)).flatten(1)[cond.low_res_level > 0.02]
    assert max(abs(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(noise, other, strict=True)) < 0.5


def test_a_samples_fate_follows_from_its_position_alone():
    """The same sigma, level and noise in another batch and another order; different ones with another seed."""
    batch, task = make_batch(40, start=100), make_task(BOTH)
    whole = condition(task, batch)
    for choice in ([7], [31, 2, 5], list(range(10, 20))):
        part = condition(task, batch.select(torch.tensor(choice)))
        for name in FIELDS:
            assert torch.equal(getattr(part, name), getattr(whole, name)[choice]), name
    for other in (condition(task, batch, seed=1), condition(task, replace(batch, index=batch.index + 40))):
        assert all(not torch.equal(getattr(other, name), getattr(whole, name)) for name in FIELDS)
        assert (other.low_res != whole.low_res).flatten(1).any(1).all()


def test_half_precision_leaves_the_small_images_as_they_are():
    batch, task = make_batch(), make_task(BOTH)
    expected = condition(task, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cond = condition(task, batch)
    for name in FIELDS:
        assert torch.equal(getattr(cond, name), getattr(expected, name)), name


def test_a_dropped_caption_keeps_its_small_image():
    batch = make_batch()
    full, dropped = make_task(BOTH), make_task(BOTH, config=DenoisingConfig(caption_dropout=1.0))
    for task in (full, dropped):
        task.losses(batch, draw_of(batch))
    (*_, kept), (*_, lost) = full.model.shown[-1], dropped.model.shown[-1]
    assert torch.equal(lost.mask, torch.tensor([[True, False, False]]).expand(6, 3)) and kept.mask.all()
    assert all(torch.equal(getattr(lost, name), getattr(kept, name)) for name in FIELDS)


# ------------------------------------------------------------------------------------------------------ what it reports


def checkerboard(batch, size):
    """Alternating ± 0.1, which average to 0 over 2 × 2 pixels."""
    height, width = batch.images.shape[2:]
    return size * (1 - 2 * ((torch.arange(height)[:, None] + torch.arange(width)) % 2)).float()


@pytest.mark.parametrize(
    ("change", "near", "kept"),
    [
        (lambda batch: torch.zeros(()), PSNR_CAP, PSNR_CAP),
        (lambda batch: torch.tensor(0.1), 26.0206, 26.0206),  # 10 log₁₀(2² / 0.1²)
        (lambda batch: checkerboard(batch, 0.1), 26.0206, PSNR_CAP),
        (lambda batch: 2.0 - batch.images.roll(1, 0), None, None),  # out of range: clipped to white
    ],
    ids=["exact", "brighter", "checkered", "out of range"],
)
@pytest.mark.parametrize("process", [PROCESS, FLOW], ids=["steps", "flow"])
def test_held_out_psnr_is_that_of_the_expected_image(process, change, near, kept):
    batch = make_batch()
    task = make_task(BOTH, batch.images + change(batch), process=process)
    values = task.held_out(batch, draw_of(batch))
    if near is None:
        error = 1 - batch.images
        small = error.unflatten(2, (2, 2)).unflatten(4, (4, 2)).mean((3, 5))
        near, kept = (10 * (4 / e.square().flatten(1).mean(1)).log10() for e in (error, small))
    else:
        near, kept = torch.full((6,), near), torch.full((6,), kept)
    assert_close(values["psnr"], near, rtol=0, atol=1e-3)
    assert_close(values["consistency_psnr"], kept, rtol=0, atol=1e-3)
    assert {"loss", "loss_q0", "caption_swap_gap"} <= values.keys()
    assert all(value.shape == (6,) for value in values.values())


@pytest.mark.parametrize(("process", "last"), [(PROCESS, 39.0), (FLOW, 1000.0)], ids=["steps", "flow"])
def test_the_expected_image_is_asked_for_from_noise_alone_and_the_clean_small_image(process, last):
    batch, task = make_batch(), make_task(BOTH, process=process)
    task.held_out(batch, draw_of(batch))
    (_, _, first), (_, _, swapped), (x, t, cond) = task.model.shown
    assert_close(t.float(), torch.full((6,), last), rtol=1e-3, atol=0)
    assert_close(x, draw_of(batch).normal("noise", (3, 4, 8)), rtol=1e-3, atol=0)
    assert torch.equal(cond.low_res, area_downsample(batch.images, 2)) and torch.equal(cond.tokens, batch.cond.tokens)
    assert not cond.low_res_level.any() and not cond.low_res_blur.any()
    assert first.low_res_level.all() and torch.equal(swapped.tokens, batch.cond.tokens.roll(1, 0))
    assert all(torch.equal(getattr(swapped, name), getattr(first, name)) for name in FIELDS)


def bicubic_plainly(length, factor, a=-0.75):
    """[length · factor, length]: the weights of one axis (Keys 1981, with torch's a); border pixels repeat."""
    weights = torch.zeros(length * factor, length)
    for i in range(length * factor):
        place = (i + 0.5) / factor - 0.5
        for k in range(int(np.floor(place)) - 1, int(np.floor(place)) + 3):
            d = abs(place - k)
            near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
            weights[i, min(max(k, 0), length - 1)] += near if d <= 1 else far
    return weights


def test_the_bicubic_psnr_is_that_of_a_clipped_bicubic_upsampling():
    batch, factor = make_batch(6, (8, 12)), 4
    blocks = area_downsample(batch.images, factor).sign()  # strong enough for overshoot beyond the range
    batch = replace(batch, images=blocks.repeat_interleave(factor, 2).repeat_interleave(factor, 3))
    values = make_task(factor=factor).held_out(batch, draw_of(batch))
    upsampled = bicubic_plainly(2, factor) @ blocks @ bicubic_plainly(3, factor).T
    assert upsampled.max() > 1.05
    error = (upsampled.clamp(-1, 1) - batch.images).square().flatten(1).mean(1)
    assert_close(values["bicubic_psnr"], 10 * (4 / error).log10(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("error", "value"), [(2.0, 0.0), (0.2, 20.0), (4e-3, 53.98), (1e-7, PSNR_CAP), (0.0, PSNR_CAP)]
)
def test_psnr_counts_from_the_whole_range_and_ends_at_its_cap(error, value):
    images = torch.full((2, 3, 4, 4), -1.0)
    assert_close(signal_psnr(images + error, images), torch.full((2,), value), rtol=0, atol=1e-2)


def test_half_precision_changes_no_measure():
    batch, task = make_batch(), make_task()
    task.model.answer = batch.images + 0.1
    expected = task.held_out(batch, draw_of(batch))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        values = task.held_out(batch, draw_of(batch))
    for name in ("psnr", "bicubic_psnr", "consistency_psnr"):
        assert_close(values[name], expected[name], rtol=0, atol=1e-3)


# ------------------------------------------------------------------------------------------------ parts of the pictures


def make_shard(folder, count=24, size=(16, 24)):
    """A tar of noise images."""
    noise = np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8)
    files = [(f"{number:03d}.png", encoded(Image.fromarray(each), "PNG")) for number, each in enumerate(noise)]
    (folder / "0.tar").write_bytes(tar_bytes(files))
    return DataConfig(data_dir=(str(folder),), num_workers=0, random_flip=True)


@pytest.mark.parametrize(("side", "factor"), [(8, 4), (12, 4), (8, 2)])
def test_the_small_image_of_a_part_is_that_part_of_the_small_image(tmp_path, side, factor):
    config = make_shard(tmp_path)
    whole = Loader(config, SampleSpec(ImageSpec((16, 24))), seed=3).batch_at(range(24))
    windows = SampleSpec(ImageSpec((16, 24), window=Window(side, factor)))
    parts = Loader(config, windows, seed=3).batch_at(range(24))
    assert parts.images.shape == (24, 3, side, side)
    small, low_res = area_downsample(whole.images, factor), condition(make_task(factor=factor), parts).low_res
    places = set()
    for i in range(24):
        corners = whole.images[i].unfold(1, side, 1).unfold(2, side, 1)
        ((top, left),) = (corners == parts.images[i][:, None, None]).all(-1).all(-1).all(0).nonzero().tolist()
        assert top % factor == left % factor == 0
        y, x, length = top // factor, left // factor, side // factor
        assert_close(low_res[i], small[i, :, y : y + length, x : x + length], rtol=0, atol=1e-6)
        places.add((top, left))
    assert len(places) > 3


def test_an_inpainting_network_learns_from_parts_of_images():
    """Boxes and strokes are unknown, which depend on the position alone; in a tenth of the samples all is."""
    model, batch = Watcher(), make_batch(400, (16, 16))
    for task in (
        DenoisingTask(model, PROCESS, KEEP),
        UpsamplingTask(model, PROCESS, KEEP, 2, PLAIN.degradation),
    ):
        task.losses(batch, draw_of(batch))
        assert model.shown.pop()[2].known is None
        task.inpaints = True
        task.losses(batch, draw_of(batch))
        known = model.shown.pop()[2].known
        pixels, mask = known[:, :3], known[:, 3:]
        assert torch.equal(pixels, batch.images * mask) and set(mask.unique().tolist()) == {0.0, 1.0}
        share = mask.mean((1, 2, 3))
        assert 0.05 < (share == 0).float().mean() < 0.16 and 0.5 < share.median() < 0.95
        later = make_batch(400, (16, 16)).select(slice(7, 9))
        task.losses(later, draw_of(later))
        assert torch.equal(model.shown.pop()[2].known, known[7:9])
