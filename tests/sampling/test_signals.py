"""Stages of grayscale images, and stages with conditions from other networks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import FAST, NO_TEXT, edited, idle, make_stage, random_images, same, stages, watching

from diff_dalle.config import InputError
from diff_dalle.images.files import fit_image, fit_mask
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.pixel_stages import GeneratorStage

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


# --------------------------------------------------------------------------------------- conditions from other networks


class EmbeddingStage(GeneratorStage):
    """A generator with an image embedding from another network."""

    def conditioning(self, request, index):
        embeddings = torch.tensor([i + 1.0 for i in index])[:, None].expand(-1, 6)
        return replace(super().conditioning(request, index), image_embedding=embeddings)


def test_a_negative_prompt_replaces_the_text_and_the_embedding_is_dropped(stage_files):
    """By default, as there is something to drop; in batches of 2 images and 1."""
    stage = EmbeddingStage(load(stage_files["base"], "cpu").stages[0].saved, torch.device("cpu"))
    with watching(stage) as seen:
        for text in ("", "blur"):
            stages(Pipeline([stage]), [""] * 3, batch_size=2, negative_prompt=text)
    plain, negative = ([seen[start][1], seen[start + 7][1]] for start in (0, 8))
    for first, cond, other in zip((1.0, 3.0), plain, negative, strict=True):
        count = len(cond.tokens) // 2
        assert torch.equal(cond.tokens[:count], other.tokens[:count])
        assert (other.mask[count:].sum(1) > cond.mask[count:].sum(1)).all()
        assert other.image_embedding[:count, 0].tolist() == [first + i for i in range(count)]
        assert not other.image_embedding[count:].any() and not other.embedding_mask[count:].any()
