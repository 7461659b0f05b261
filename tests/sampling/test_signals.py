"""Stages with a signal other than RGB images, and stages with conditions from other networks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cascade_making import FAST, NO_TEXT, edited, idle, make_stage, random_images, same, stages, watching

from diff_dalle.checkpoints.pixels import GeneratorSettings
from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.images.files import fit_image, fit_mask
from diff_dalle.images.signal import PixelSignal, Signal
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.pixel_stages import GeneratorStage

LOOSE = GuidanceConfig(guidance_scale=1.0, thresholding="none")
GRAY = {"image_channels": 1, **NO_TEXT}

# ------------------------------------------------------------------------------------------------------------ grayscale


@pytest.fixture(scope="module")
def gray_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gray")
    return make_stage(folder / "base.pt", **GRAY), make_stage(folder / "up.pt", image_size=16, small_size=8, **GRAY)


@pytest.fixture(scope="module")
def gray(gray_files):
    """8 → 16 pixels, grayscale."""
    base, upsampler = gray_files
    return load(base, "cpu", upsampler_paths=[upsampler], keep_loaded=True)


def is_gray(images):
    return all(np.array_equal(images[..., 0], images[..., channel]) for channel in (1, 2)) and images.std() > 10


def test_a_grayscale_cascade_returns_rgb_images_with_equal_channels(gray):
    with watching(gray.stages[0]) as base, watching(gray.stages[1]) as upsampler:
        images = stages(gray, ["", ""], upsampling=replace(FAST, tile_size=8, tile_overlap=4))
    assert [each.shape for each in images] == [(2, 8, 8, 3), (2, 16, 16, 3)] and all(map(is_gray, images))
    assert {x.shape[1] for x, _ in base + upsampler} == {1}
    assert {cond.low_res.shape[1] for _, cond in upsampler} == {1}


def test_a_grayscale_upsampler_alone_repeats_its_images_and_accepts_rgb(gray):
    base, images = stages(gray, [""])
    alone = Pipeline(gray.stages[1:])
    assert same(stages(alone, [""], low_res=base.astype(np.uint8)), [images], [0])
    color = random_images(1, 8, 8)
    luma = alone.stages[0].signal.to_pixels(alone.stages[0].signal.from_pixels(color))
    assert same(stages(alone, [""], low_res=color), stages(alone, [""], low_res=luma), [0])


def test_grayscale_editing(gray):
    mask = np.eye(16, dtype=bool)
    (original,) = random_images(1, 16, 16)
    for images in stages(gray, [""], **edited(mask=mask)):
        size = images.shape[1:3]
        luma = gray.stages[0].signal.to_pixels(gray.stages[0].signal.from_pixels(fit_image(original, size)[None]))[0]
        known = ~fit_mask(mask, size)
        assert is_gray(images) and (images[0][known] == luma[known]).all() and (images[0] != luma).any()


def test_channels_must_agree(gray_files, stage_files):
    with pytest.raises(InputError, match="base.pt has 1 channels, but .*middle.pt has 3: give stages with the same"):
        load(gray_files[0], "cpu", upsampler_paths=[stage_files["middle"]])
    base = load(gray_files[0], "cpu")
    with pytest.raises(InputError, match="on images with 3 channels, but the generator's have 1"):
        stages(idle(base), [""], size=(16, 16), classifier=stage_files["classifier 16"])


# -------------------------------------------------------------------------------------------------------------- latents


@dataclass(frozen=True)
class Latent(Signal):
    """A latent with 3 unbounded channels, decoded to twice the resolution."""

    channels: int = 3
    value_range = None
    scale = 2

    def to_pixels(self, x):
        return PixelSignal().to_pixels(0.1 * x.repeat_interleave(2, 2).repeat_interleave(2, 3))

    def from_pixels(self, images):
        return 10 * PixelSignal().from_pixels(images[:, ::2, ::2])


class OfLatents(GeneratorSettings):
    name = "of latents"

    @property
    def signal(self):
        return Latent()


def with_latents(stage: GeneratorStage) -> GeneratorStage:
    settings = OfLatents(**vars(stage.saved.settings))
    return GeneratorStage(replace(stage.saved, settings=settings), stage.device, stage.precision)


@pytest.fixture(scope="module")
def latents(cascade):
    return Pipeline([with_latents(stage) for stage in cascade.stages[:2]])


def test_sizes_are_in_pixels(latents):
    """Of requests and of low-resolution images; a latent covers two pixels."""
    upsampler = Pipeline(latents.stages[1:])
    assert (latents.image_size, upsampler.factor) == (32, 2)
    loose = {"guidance": LOOSE, "upsampling": replace(FAST, guidance=LOOSE)}
    images = stages(latents, ["a star"], size=(32, 64), **loose)
    assert [each.shape[1:3] for each in images] == [(16, 32), (32, 64)]
    low_res, settings = np.zeros((1, 16, 16, 3), np.uint8), loose["upsampling"]
    assert stages(upsampler, [""], low_res=low_res, upsampling=settings)[0].shape == (1, 32, 32, 3)
    with pytest.raises(InputError, match="size is 32×36, but width and height must be multiples of 8"):
        stages(latents, ["a star"], size=(36, 32), **loose)
    with pytest.raises(InputError, match="low_res is 16×17, but width and height must be multiples of 2"):
        stages(upsampler, [""], low_res=np.zeros((1, 17, 16, 3), np.uint8), upsampling=settings)


def test_stages_hand_latents_to_each_other_unchanged(latents):
    """Neither clipped nor rounded; each stage's images are decoded from its own latents, and images to edit encoded."""
    mask = np.arange(32) < 16
    edit = edited(size=(32, 32), mask=np.broadcast_to(mask, (32, 32)))
    with watching(latents.stages[1]) as seen:
        images = stages(latents, ["a star"], guidance=LOOSE, upsampling=replace(FAST, guidance=LOOSE), **edit)
    low_res, (original,) = seen[0][1].low_res, random_images(1, 32, 32)
    assert low_res.shape == (1, 3, 8, 8) and (low_res != PixelSignal().finish(low_res)).all()
    known = Latent().from_pixels(fit_image(original, (16, 16))[None])[..., 4:]
    assert torch.equal(low_res[..., 4:], known) and known.abs().max() > 5
    assert [each.shape for each in images] == [(1, 16, 16, 3), (1, 32, 32, 3)]
    assert np.array_equal(images[0], Latent().to_pixels(low_res))


# --------------------------------------------------------------------------------------- conditions from other networks


class EmbeddingStage(GeneratorStage):
    """A generator with an image embedding from another network and, if it reads no text itself, text states."""

    def conditioning(self, request, index):
        cond, number = super().conditioning(request, index), torch.tensor([i + 1.0 for i in index])
        if cond.mask is None:
            states = number[:, None, None].expand(-1, 5, 4)
            cond = replace(cond, mask=torch.ones(len(index), 5, dtype=torch.bool), text_states=states)
        return replace(cond, image_embedding=number[:, None].expand(-1, 6))


def conditions(path, **options):
    """Each batch's conditions and its number of images; batches are of 2 images."""
    stage = EmbeddingStage(load(path, "cpu").stages[0].saved, torch.device("cpu"))
    with watching(stage) as seen:
        stages(Pipeline([stage]), [""] * 3, batch_size=2, **options)
    return [(cond, count) for (_, cond), count in ((seen[0], 2), (seen[-1], 1))]


def test_conditions_from_outside_reach_the_network_and_are_guided_by(stage_files):
    """By default, since there is something to drop, though the generator has neither text encoder nor classes."""
    for (cond, count), first in zip(conditions(stage_files["exact"]), (1.0, 3.0), strict=True):
        number = torch.arange(first, first + count)
        for name, shape in (("image_embedding", (6,)), ("text_states", (5, 4))):
            value = getattr(cond, name)
            assert torch.equal(value[:count], number.view(-1, *[1] * len(shape)).expand(-1, *shape))
            assert len(value) == 2 * count and not value[count:].any()
        assert cond.embedding_mask.tolist() == [True] * count + [False] * count
        assert cond.mask.sum(1).tolist() == [5] * count + [1] * count


def test_a_negative_prompt_replaces_the_text_and_the_embedding_is_dropped(stage_files):
    plain, negative = (conditions(stage_files["base"], negative_prompt=text) for text in ("", "blur"))
    for (cond, count), (other, _) in zip(plain, negative, strict=True):
        assert torch.equal(cond.tokens[:count], other.tokens[:count])
        assert (other.mask[count:].sum(1) > cond.mask[count:].sum(1)).all()
        assert not other.image_embedding[count:].any() and not other.embedding_mask[count:].any()


def test_without_guidance_nothing_is_dropped(stage_files):
    for cond, count in conditions(stage_files["exact"], guidance=GuidanceConfig(guidance_scale=1.0)):
        assert len(cond.image_embedding) == count and cond.embedding_mask is None
