"""Image editing with cascades."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import (
    FAST,
    KINDS,
    make_stage,
    random_images,
    same,
    stages,
    watching,
)

from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.files import fit_image, fit_mask
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.request import ImageEdit

HOLE = np.zeros((16, 16), dtype=bool)
HOLE[4:12, 6:16] = True


@pytest.fixture(scope="module")
def cascade(stage_files):
    """8 → 16 pixels, without text. The base is nearly exact at low noise."""
    return load(stage_files["exact"], "cpu", upsampler_paths=[stage_files["middle"]], keep_loaded=True)


@pytest.fixture(scope="module")
def base(cascade):
    return Pipeline(cascade.stages[:1])


def test_known_pixels_stay_exactly_through_all_stages(cascade):
    image = random_images(1, 16, 16)[0]
    with watching(cascade.stages[1]) as seen:
        results = stages(cascade, ["", ""], edit=ImageEdit([image], [HOLE], EditConfig(inpaint_resamples=2)))
    assert len(seen) == 4  # an upsampler inpaints once: its low-resolution image fits already
    for images in results:
        known, hole = fit_image(image, images.shape[1:3]), fit_mask(HOLE, images.shape[1:3])
        assert (images[:, ~hole] == known[~hole]).all()
        assert np.abs(images - known)[:, hole].mean() > 20 and (images[0] != images[1]).any()


def test_an_upsampler_alone_keeps_known_pixels_too(cascade):
    image, low_res = random_images(1, 40, 24)[0], random_images(1, 10, 6, seed=1)
    mask = np.arange(40)[:, None].repeat(24, 1) < 18
    (images,) = stages(Pipeline(cascade.stages[1:]), [""], low_res=low_res, edit=ImageEdit([image], [mask]))
    known, hole = fit_image(image, (20, 12)), fit_mask(mask, (20, 12))
    assert (images[0][~hole] == known[~hole]).all() and np.abs(images[0] - known)[hole].mean() > 20


@torch.no_grad()
def test_an_inpainting_network_sees_the_known_pixels(tmp_path):
    """Its samples are those of GLIDE's procedure, in one pass; so does an upsampler of such, tile by tile."""
    changed = {"prediction": "eps", "enc_attn_dim": 8, "diffusion_steps": 40, "caption_dropout": 0.1, "inpaint": True}
    files = [
        make_stage(tmp_path / "base.pt", **changed),
        make_stage(tmp_path / "up.pt", **{**changed, **KINDS["middle"]}),
    ]
    pipeline = load(files[0], "cpu", upsampler_paths=files[1:], keep_loaded=True)
    image, options = random_images(1, 16, 16)[0], {"edit": ImageEdit([random_images(1, 16, 16)[0]], [HOLE])}
    options |= {"sampler": SamplerConfig("ddim", 4), "guidance": GuidanceConfig(guidance_scale=3.0)}
    first, second = pipeline.stages
    with watching(first) as seen, watching(second) as above:
        small, _ = stages(pipeline, ["a star"], upsampling=replace(FAST, tile_size=8, tile_overlap=4), **options)
    assert len(seen) == 4 and {x.shape[2] for x, _ in above} == {8}
    given, hole = first.signal.from_pixels(fit_image(image, (8, 8))[None]), torch.from_numpy(fit_mask(HOLE, (8, 8)))
    mask = (~hole)[None, None].float()
    x, cond = seen[0][0][:1], seen[0][1]
    assert torch.equal(cond.known, torch.cat([given * mask, mask], 1).expand(2, -1, -1, -1))
    whole = first.signal.from_pixels(fit_image(image, (16, 16))[None])[..., -8:, -8:]
    assert torch.equal(above[-1][1].known[:, :3], whole.where(above[-1][1].known[:, 3:] > 0, 0.0))
    process = SamplerConfig("ddim", 4).process(first.diffusion)
    levels = [*process.alphas_cumprod, 1.0]
    for i in reversed(range(4)):
        t = torch.full((2,), process.timestep_map[i])
        conditional, other = first.network()(torch.cat([x, x]), t, cond)[:, :3].chunk(2)
        eps = other + 3 * (conditional - other)
        x_start = ((x - (1 - levels[i]) ** 0.5 * eps) / levels[i] ** 0.5).clamp(-1, 1)
        x_start = x_start * (1 - mask) + given * mask
        eps = (x - levels[i] ** 0.5 * x_start) / (1 - levels[i]) ** 0.5
        x = levels[i - 1] ** 0.5 * x_start + (1 - levels[i - 1]) ** 0.5 * eps
    assert np.abs(first.pixels(x).astype(int) - small).max() <= 1
    with watching(first) as seen:
        blind = stages(pipeline, ["a star"], **{**options, "edit": None})[0]
    assert seen[0][1].known is None and (blind != small).any()


def test_a_low_strength_preserves_the_image_and_strength_1_ignores_it(cascade):
    image, other = random_images(2, 8, 8)

    def edit(start, strength):
        chosen = ImageEdit([start], config=EditConfig(strength=strength))
        with watching(cascade.stages[1]) as seen:
            results = stages(cascade, [""], edit=chosen, sampler=SamplerConfig(steps=50))
        assert len(seen) == 4  # an upsampler starts from noise: its low-resolution image is edited already
        return results

    near = edit(image, 0.01)[0]
    assert 0 < np.abs(near[0] - image).max() <= 4  # measured: 2
    assert np.abs(edit(image, 0.5)[0] - image).mean() > 20
    assert same(edit(image, 1.0), edit(other, 1.0), (0, 1))


def test_variation_0_reconstructs_the_image_and_larger_ones_differ_more(base):
    image = random_images(1, 8, 8)[0]

    def error(variation):
        edit = ImageEdit([image], config=EditConfig(strength=0.2, variation=variation))
        loose = GuidanceConfig(thresholding="none")
        return np.abs(stages(base, [""], edit=edit, sampler=SamplerConfig("ddim", 50), guidance=loose)[0] - image)

    none, some, full = (error(variation) for variation in (0.0, 0.3, 1.0))
    assert none.max() <= 3 and none.mean() + 5 < some.mean() < full.mean()  # measured: at most 1


def test_images_and_masks_are_used_in_turn(cascade):
    originals, masks = random_images(2, 16, 16), [HOLE, HOLE.T]
    results = stages(cascade, [""] * 3, edit=ImageEdit(list(originals), masks))
    for i in range(3):
        assert (results[1][i][~masks[i % 2]] == originals[i % 2][~masks[i % 2]]).all()
    one_for_all = stages(cascade, [""] * 3, edit=ImageEdit(list(originals), [HOLE]))[1]
    assert all((one_for_all[i][~HOLE] == originals[i % 2][~HOLE]).all() for i in range(3))


def test_images_of_any_size_are_fitted(cascade, base):
    large, config = random_images(1, 40, 70)[0], EditConfig(strength=0.05)
    images = stages(base, [""], edit=ImageEdit([large], config=config))
    fitted = stages(base, [""], edit=ImageEdit([fit_image(large, (8, 8))], config=config))
    assert same(images, fitted, [0])
    unchanged = ImageEdit([large], [np.zeros((40, 70), dtype=bool)])  # nothing is inpainted
    assert (stages(cascade, [""], size=(16, 32), edit=unchanged)[1] == fit_image(large, (16, 32))).all()


def test_impossible_edits_are_refused():
    one = random_images(1, 16, 16)[0]
    cases = [
        (([],), "there is no image to edit"),
        (([one / 255],), r"an image to edit is float64 of shape \[16, 16, 3\], but must be uint8 \[H, W, 3\]"),
        (([one], [HOLE[:8]]), "mask has 16 × 8 pixels, but must have the size of its image, 16 × 16 pixels"),
        (([one, one[:8]], [HOLE, HOLE]), r"mask \(number 2\) has 16 × 16 pixels, .* its image, 16 × 8 pixels"),
        (([one] * 3, [HOLE] * 2), "2 masks .* for 3 images: give one for all, or one for each"),
        (([one], []), "0 masks"),
        (([one], [HOLE], EditConfig(variation=0.3)), "mask.* and (--)?variation exclude each other"),
    ]
    for arguments, words in cases:
        with pytest.raises(InputError, match=words):
            ImageEdit(*arguments)
