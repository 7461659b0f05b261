"""Training an upsampler: refused settings, built tasks, previews, exact resume."""

import numpy as np
import pytest
import torch
from marks import slow
from script_running import SETTINGS, hashes, losses, train
from shard_making import encoded, random_image, sample, tar_bytes
from tiny_settings import TRANSFORMER
from tiny_settings import flags as flags_of

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.commands.command_line import parse
from diff_dalle.config import InputError
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.images.signal import to_uint8
from diff_dalle.images.transforms import Window
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

WORLD = World(SINGLE, torch.device("cpu"))
FEW = {"preview_steps": 2, "sample_interval": 1, "preview_share": "none"}  # previews that do not take long


def make_run(**changed):
    return parse(GeneratorRun, flags_of({**SETTINGS["train_generator.py"], **changed}))


@pytest.mark.parametrize("flags", [{"gaussian_blur": True}, {"noise_augmentation": 0.1}, {"crop_size": 8}])
def test_settings_of_upsamplers_are_refused_for_a_base_generator(flags):
    with pytest.raises(InputError, match="are for upsamplers, but this is a base generator: set --small_size"):
        make_run(**flags)
    make_run(small_size=8, **flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"small_size": 8, "crop_size": 18}, r"crop_size is 18, but must be at most --image_size \(16\)"),
        (
            {"small_size": 4, "crop_size": 6},
            r"crop_size is 6, but must be .* a multiple of the upsampling factor \(4\)",
        ),
        (
            {"small_size": 8, "crop_size": 10, "channel_mult": "1,1,2"},
            "crop_size is 10, but must be a multiple of 4, the network's downsampling factor",
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(flags, words):
    with pytest.raises(InputError, match=words):
        make_run(**flags)


def test_a_part_of_the_images_is_trained_on_when_asked():
    def window(**flags):
        return make_run(**flags).recipe().open(WORLD).spec.image.window

    assert window(small_size=8) is None and window() is None
    assert window(small_size=4, crop_size=8) == Window(8, 4)
    assert window(small_size=8, crop_size=16) == Window(16, 2)


def test_tokens_are_routed_until_a_share_of_the_run():
    """In training the generator, not a LoRA of it."""

    def task(**changed):
        return build(2, **{**TRANSFORMER, **changed}, batch_size=4)[0]

    assert (task().routes, task().routed_until) == (True, None)
    assert task(route_until=0.75, iterations=8).routed_until == 6 * 4
    assert task(route_until=0.5, samples=40).routed_until == 5 * 4
    assert not task(route_share=0, route_blocks=None).routes
    with pytest.raises(InputError, match="route_until .*is a share of --iterations or --samples, of which neither"):
        task(route_until=0.5, iterations=0)


# ------------------------------------------------------------------------------------------------------------- previews


class Pictures:
    """Smooth random images for previews, each with the caption "a"."""

    def __init__(self, tokenizer, size=(16, 16)):
        self.tokenizer, self.size = tokenizer, size

    def batch_at(self, positions):
        index = torch.tensor(list(positions))
        rough = torch.rand(100, 3, 4, 4, generator=torch.Generator().manual_seed(0))[index] * 2 - 1
        images = torch.nn.functional.interpolate(rough, self.size, mode="bilinear")
        tokens, mask = self.tokenizer(["a"] * len(index), 24) if self.tokenizer else (None, None)
        return Batch(images, Conditioning(tokens=tokens, mask=mask), index)

    def first(self, count):
        return self.batch_at(range(count))


def build(count, size=(16, 16), **flags):
    """The task of a run and its preview images."""
    run = make_run(**{"small_size": 8, "preview_samples": count, **FEW, **flags})
    session = run.recipe().open(WORLD)
    data = Pictures(session.tokenizer, size)
    (trainee,) = session.trainees(data)
    return trainee.task, data.batch_at(range(count)).images


def cells(grid, size, columns):
    """The images in the first row of a captioned grid: cells of 96 pixels, separated by 4 white ones."""
    scale = 96 // size
    return [grid[4:100:scale, 4 + 100 * column : 100 + 100 * column : scale] for column in range(columns)]


def test_previews_show_input_result_and_original_side_by_side():
    task, images = build(2)
    grid = task.previews()["samples"]
    shown = cells(grid, 16, 6)
    originals = to_uint8(images).numpy()
    for i, original in enumerate(originals):
        small = images[i].unflatten(1, (8, 2)).unflatten(3, (8, 2)).mean((2, 4))
        upsampled = to_uint8(small[None].repeat_interleave(2, 2).repeat_interleave(2, 3))[0].numpy()
        assert np.array_equal(shown[3 * i + 2], original)
        assert np.array_equal(shown[3 * i], upsampled)
        result = shown[3 * i + 1]
        assert not np.array_equal(result, upsampled) and not np.array_equal(result, original)


def test_the_table_has_the_pictures_of_the_grid_one_by_one():
    shown = build(2)[0].previews()
    columns, grid = shown["samples_table"].columns, cells(shown["samples"], 16, 6)
    assert list(columns) == ["caption", "input", "sampled", "original"] and columns["caption"] == ["a", "a"]
    for number, name in enumerate(("input", "sampled", "original")):
        assert np.array_equal(columns[name], [grid[number], grid[3 + number]])


@pytest.mark.parametrize(("count", "across", "down"), [(1, 3, 1), (2, 6, 1), (3, 6, 2)])
def test_two_images_share_a_row_of_previews(count, across, down):
    task, _ = build(count)
    grid = task.previews()["samples"]
    assert grid.shape[1] == across * 100 + 4 and 100 * down < grid.shape[0] < 130 * down + 4


@pytest.mark.parametrize("flags", [{"crop_size": 8}, {"enc_attn_dim": 0}, {"gaussian_blur": True}])
def test_previews_of_parts_without_text_and_of_degraded_images(flags):
    """Previews upsample clean images of the data's size, also when training degrades and crops them."""
    size = flags.get("crop_size", 16)
    task, images = build(2, (size, size), **flags)
    grid = task.previews()["samples"]
    shown = cells(grid, size, 6)
    assert np.array_equal(shown[2], to_uint8(images)[0].numpy())
    assert not task.preview.cond.low_res_level.any() and not task.preview.cond.low_res_blur.any()


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("network", [{}, TRANSFORMER], ids=["unet", "transformer"])
def test_an_interrupted_upsampler_continues_exactly(tmp_path, network):
    """With blur, noise and crops, a step and another give the files of two steps, bit for bit."""
    world = tmp_path / "world"
    write_shapes(ShapesConfig(image_size=16, train_samples=32, val_samples=16, samples_per_shard=16), str(world))
    flags = {
        "small_size": 8,
        "image_size": 16,
        "gaussian_blur": True,
        "noise_augmentation": 0.3,
        "crop_size": 8,
        "batch_size": 8,
        "save_interval": 1,
        "num_workers": 0,
        "val_data_dir": world / "val",
        "eval_interval": 2,
        "prediction": "x_start",
        "eval_samples": 8,
        **network,
    }
    for name, iterations in (("whole", 2), ("parts", 1), ("parts", 2)):
        result = train(tmp_path / name, world / "train", iterations=iterations, **flags)
    assert "Resuming at step 1" in result.stdout
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    whole, parts = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
    latest = [name for name in whole if "000002" in name]
    assert whole.keys() == parts.keys() and len(latest) == 3 and all(whole[name] == parts[name] for name in latest)
    measures = ("psnr", "bicubic_psnr", "consistency_psnr", "caption_swap_gap")
    assert all(np.isfinite(losses(tmp_path / "whole", f"held_out/{name}")[2]) for name in measures)


def test_resolution_in_stages(tmp_path):
    """A run at twice the size starts from the first run's weights, at more noise, and continues exactly."""
    world = tmp_path / "world"
    write_shapes(ShapesConfig(image_size=16, train_samples=32, val_samples=16, samples_per_shard=16), str(world))
    network = {**TRANSFORMER, "position_patches": 2, "noise_schedule": "flow", "prediction": "x_start", "lr": 1e-4}
    off = {"route_share": 0, "route_blocks": None, "diffusion_steps": None}
    flags = {**network, **off, "batch_size": 8, "save_interval": 1, "num_workers": 0}
    train(tmp_path / "first", world / "train", image_size=8, iterations=1, **flags)
    start = tmp_path / "first" / "model000001.pt"
    larger = {**flags, "image_size": 16, "flow_shift": 2, "init_checkpoint": start}
    for name, iterations in (("whole", 2), ("parts", 1), ("parts", 2)):
        train(tmp_path / name, world / "train", iterations=iterations, **larger)
    whole, parts = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
    latest = [name for name in whole if "000002" in name]
    assert len(latest) == 3 and all(whole[name] == parts[name] for name in latest)
    before, after = (torch.load(file, weights_only=True) for file in (start, tmp_path / "parts" / "model000001.pt"))
    moved = [(after["state"][name] - value).abs().max() for name, value in before["state"].items()]
    assert 0 < max(moved) < 1.01e-4  # one step of AdamW


# -------------------------------------------------------------------------------------------------------- aspect ratios


def wide_and_tall(folder, count=24):
    """Shards of pictures with three aspect ratios."""
    folder.mkdir()
    shapes = ((16, 16), (10, 24), (24, 11))
    for shard in range(2):
        keys = [f"{i:04d}" for i in range(shard, count, 2)]
        files = [
            file
            for key in keys
            for file in sample(key, f"a {key}", encoded(random_image(*shapes[int(key) % 3], int(key))))
        ]
        (folder / f"{shard}.tar").write_bytes(tar_bytes(files))
    return folder


ASPECTS = {"multi_aspect_ratio": "1/1,1/2", "bucket_factor": 4}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"bucket_factor": 3},
            "bucket_factor is 3, but must be a multiple of 2, as the sizes of the network's images are",
        ),
        ({"bucket_factor": 4, "small_size": 2}, "bucket_factor is 4, but must be a multiple of 8"),
        ({"random_crop": True}, "--random_crop and --multi_aspect_ratio exclude each other"),
    ],
)
def test_buckets_that_the_network_does_not_take_are_refused(flags, words):
    with pytest.raises(InputError, match=words):
        make_run(**{**ASPECTS, **flags})
    make_run(**ASPECTS)


@pytest.mark.parametrize(
    ("small_size", "network"),
    [slow(0, {}), slow(8, {}), (0, TRANSFORMER)],
)
def test_a_run_over_several_aspect_ratios_continues_exactly_on_other_numbers_of_processes(
    tmp_path, small_size, network
):
    """Base and upsampler: a step, one more on two processes, and one on one; held-out data and previews too."""
    data = wide_and_tall(tmp_path / "data")
    flags = {**ASPECTS, "save_interval": 1, "num_workers": 0, "val_data_dir": data, "eval_interval": 3}
    flags |= {"eval_samples": 8, "sample_interval": 3, "preview_samples": 5, "preview_steps": 2}
    flags |= {"small_size": small_size, **network} if small_size else network
    runs = {"whole": [(0, 3, 1)], "parts": [(0, 1, 1), (1, 2, 2), (2, 3, 1)], "again": [(0, 1, 1), (1, 3, 1)]}
    for name, parts in runs.items():
        for first, last, ranks in parts:
            done = train(tmp_path / name, data, iterations=last, batch_size=4 // ranks, ranks=ranks, **flags)
            assert not first or f"Resuming at step {first}" in done.stdout
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert whole.keys() == parts.keys() == {1, 2, 3}
    assert all(abs(whole[step] - parts[step]) < 1e-5 for step in whole)
    assert np.isfinite(losses(tmp_path / "whole", "held_out/loss")[3])
    whole, again = hashes(tmp_path / "whole"), hashes(tmp_path / "again")
    latest = [name for name in whole if "000003" in name]
    assert len(latest) == 3 and all(whole[name] == again[name] for name in latest)
