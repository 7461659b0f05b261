"""Pictures changed by a base and its up-samplers, and up-samplers that look at one tile after another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import (
    BLIND,
    FAST,
    SMALL,
    close,
    make_stage,
    make_stages,
    pictures,
    same,
    stages,
    watching,
)
from checkpoint_making import make_run

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.diffusion import GuidanceConfig, create_gaussian_diffusion
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.errors import InputError
from diff_dalle.images.files import fit_mask, fit_picture
from diff_dalle.randomness import Draw
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.request import PictureEdit
from diff_dalle.tasks.upsampling import UpsamplingTask

HOLE = np.zeros((16, 16), dtype=bool)
HOLE[4:12, 6:16] = True


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    """8 → 16 pixels, without text. The base is nearly exact where there is little noise."""
    files = make_stages(tmp_path_factory.mktemp("editing"))
    return load(files["exact"], "cpu", upsampler_paths=[files["middle"]], keep_loaded=True)


@pytest.fixture(scope="module")
def base(cascade):
    return Pipeline(cascade.stages[:1])


def test_known_pixels_stay_exactly_through_all_stages(cascade):
    picture = pictures(1, 16, 16)[0]
    with watching(cascade.stages[1]) as shown:
        made = stages(cascade, ["", ""], edit=PictureEdit([picture], [HOLE], EditConfig(inpaint_resamples=2)))
    assert len(shown) == 4  # an up-sampler paints once: what it enlarges fits already
    for images in made:
        known, hole = fit_picture(picture, images.shape[1:3]), fit_mask(HOLE, images.shape[1:3])
        assert (images[:, ~hole] == known[~hole]).all()
        assert np.abs(images - known)[:, hole].mean() > 20 and (images[0] != images[1]).any()


def test_an_up_sampler_alone_keeps_known_pixels_too(cascade):
    picture, low_res = pictures(1, 40, 24)[0], pictures(1, 10, 6, seed=1)
    mask = np.arange(40)[:, None].repeat(24, 1) < 18
    (images,) = stages(Pipeline(cascade.stages[1:]), [""], low_res=low_res, edit=PictureEdit([picture], [mask]))
    known, hole = fit_picture(picture, (20, 12)), fit_mask(mask, (20, 12))
    assert (images[0][~hole] == known[~hole]).all() and np.abs(images[0] - known)[hole].mean() > 20


def test_a_low_strength_keeps_the_picture_and_strength_1_does_not_look_at_it(cascade):
    picture, other = pictures(2, 8, 8)

    def changed(start, strength):
        edit = PictureEdit([start], config=EditConfig(strength=strength))
        with watching(cascade.stages[1]) as shown:
            made = stages(cascade, [""], edit=edit, sampler=SamplerConfig(timestep_respacing="50"))
        assert len(shown) == 4  # an up-sampler starts from nothing: it has the base's picture
        return made

    near = changed(picture, 0.01)[0]
    assert 0 < np.abs(near[0] - picture).max() <= 4  # measured: 2
    assert np.abs(changed(picture, 0.5)[0] - picture).mean() > 20
    assert same(changed(picture, 1.0), changed(other, 1.0), (0, 1))


def test_variation_0_gives_the_picture_back_and_more_of_it_goes_further(base):
    picture = pictures(1, 8, 8)[0]

    def away(variation):
        edit = PictureEdit([picture], config=EditConfig(strength=0.2, variation=variation))
        loose = GuidanceConfig(thresholding="none")
        return np.abs(stages(base, [""], edit=edit, sampler=SamplerConfig("ddim", "50"), guidance=loose)[0] - picture)

    none, some, all_of_it = (away(variation) for variation in (0.0, 0.3, 1.0))
    assert none.max() <= 3 and none.mean() + 5 < some.mean() < all_of_it.mean()  # measured: at most 1


def test_pictures_and_masks_are_taken_in_turn(cascade):
    taken, masks = pictures(2, 16, 16), [HOLE, HOLE.T]
    made = stages(cascade, [""] * 3, edit=PictureEdit(list(taken), masks))
    for i in range(3):
        assert (made[1][i][~masks[i % 2]] == taken[i % 2][~masks[i % 2]]).all()
    one_for_all = stages(cascade, [""] * 3, edit=PictureEdit(list(taken), [HOLE]))[1]
    assert all((one_for_all[i][~HOLE] == taken[i % 2][~HOLE]).all() for i in range(3))
    alone = stages(cascade, [""], seeds=[2], edit=PictureEdit([taken[0]], [HOLE]))
    assert close([images[2:] for images in made], alone)


def test_pictures_of_any_size_are_fitted(cascade, base):
    large, config = pictures(1, 40, 70)[0], EditConfig(strength=0.05)
    made = stages(base, [""], edit=PictureEdit([large], config=config))
    fitted = stages(base, [""], edit=PictureEdit([fit_picture(large, (8, 8))], config=config))
    assert same(made, fitted, [0])
    kept = PictureEdit([large], [np.zeros((40, 70), dtype=bool)])  # nothing is painted anew
    assert (stages(cascade, [""], size=(16, 32), edit=kept)[1] == fit_picture(large, (16, 32))).all()


def test_impossible_edits_are_refused_where_they_are_made():
    one = pictures(1, 16, 16)[0]
    cases = [
        (([],), "there is no picture to start from"),
        (([one / 255],), r"a picture to start from is float64 of shape \[16, 16, 3\], but must be uint8 \[H, W, 3\]"),
        (([one], [HOLE[:8]]), "--mask has 16 × 8 pixels, but must be of the size of its picture, 16 × 16 pixels"),
        (([one, one[:8]], [HOLE, HOLE]), r"--mask \(number 2\) has 16 × 16 pixels, .* its picture, 16 × 8 pixels"),
        (([one] * 3, [HOLE] * 2), "2 masks .* for 3 pictures: give one for all, or one for each"),
        (([one], []), "0 masks"),
        (([one], [HOLE], EditConfig(variation=0.3)), "--mask.* and --variation exclude each other"),
    ]
    for arguments, words in cases:
        with pytest.raises(InputError, match=words):
            PictureEdit(*arguments)


# ---------------------------------------------------------------------------------------------------------------- tiles


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An up-sampler, 8 to 16 pixels, after 40 steps on smooth pictures."""
    run = make_run(**{**SMALL, **BLIND, "image_size": 16, "small_size": 8, "low_res_skip": True,
                      "noise_schedule": "cosine", "diffusion_steps": 1000})  # fmt: skip
    model = run.build_model(None)
    task = UpsamplingTask(model, create_gaussian_diffusion(run.diffusion), run.denoising, 2, run.augmentation)
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for step in range(40):
        corners = torch.rand(4, 3, 3, 3, generator=generator) * 2 - 1
        smooth = torch.nn.functional.interpolate(corners, (16, 16), mode="bilinear", align_corners=True)
        batch = Batch(smooth, Conditioning(), torch.arange(4 * step, 4 * step + 4))
        optimizer.zero_grad()
        task.losses(batch, Draw(0, batch.index))["loss"].mean().backward()
        optimizer.step()
    path = str(tmp_path_factory.mktemp("trained") / "up.pt")
    save_file(path, "ema", run.identity(None), 40, 160, model.state_dict())
    return load("", "cpu", upsampler_paths=[path])


def gradient(height, width):
    """A picture whose red grows to the right, and green downwards."""
    rows, columns = np.mgrid[:height, :width]
    levels = (255 * columns / (width - 1), 255 * rows / (height - 1), 128 + 0 * rows)
    return np.stack(levels, -1).round().astype(np.uint8)


def enlarged(pipeline, prompts=("",), size=(16, 24), steps="5", **tiles):
    settings = replace(FAST, sampler=SamplerConfig(timestep_respacing=steps), **tiles)
    return stages(pipeline, prompts, low_res=gradient(*size)[None], upsampling=settings)[0]


def test_tiles_of_a_smooth_picture_are_near_the_whole(trained):
    """Not equal: norms and attention see a tile's pixels where they saw all."""
    whole, tiled = enlarged(trained), enlarged(trained, tile_size=16, tile_overlap=8)
    assert np.abs(whole - gradient(32, 48)).max() <= 24  # measured: 11, after so little training
    away = np.abs(tiled - whole)
    assert 0 < away.max() <= 12 and away.mean() <= 3  # measured: 6 and 1.5; of random weights 158 and 23
    assert np.array_equal(enlarged(trained, tile_size=48, tile_overlap=8), whole)


def test_the_network_sees_tiles_only(trained):
    with watching(trained.stages[0]) as shown:
        enlarged(trained, steps="2", tile_size=16, tile_overlap=8)
    assert {x.shape[2:] for x, _ in shown} == {(16, 16)} and len(shown) == (3 * 5) * 2


def test_tiles_with_a_caption_and_guidance(tmp_path):
    reads = load("", "cpu", upsampler_paths=[make_stage(tmp_path / "up.pt", image_size=16, small_size=8)])
    options = {"size": (8, 12), "steps": "2", "guidance": GuidanceConfig(guidance_scale=2.0)}
    star, ring = (enlarged(reads, [prompt], tile_size=8, tile_overlap=4, **options) for prompt in ("a star", "a ring"))
    assert star.shape == (1, 16, 24, 3) and (star != ring).any()
