"""Settings of sample.py: upsamplers, images to upsample, images to edit, config files."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cascade_making import upsampling
from PIL import Image

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sample_inputs import read_request
from diff_dalle.config import InputError, given
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.signal import PixelSignal
from diff_dalle.sampling.pixel_stages import UPSAMPLER_DEFAULTS
from diff_dalle.sampling.stage_settings import BASE, SETTINGS, STAGE_B, UPSAMPLERS, StageSettings, UpsamplersConfig

USUAL = [UPSAMPLER_DEFAULTS] * 2
CASCADE = """
--model_path base.pt --prompts 'a red circle|a star' --labels 1,2 --num_samples 5 --seed 7
--sample_size 64,128 --sampler ddim --eta 0.5 --timestep_respacing 10,15,20 --guidance_scale 4
--upsampler_paths up.pt,more.pt --upsampler_sampler heun,ddim --upsampler_timestep_respacing 9,ddim25
--upsampler_eta 0,0.3 --upsampler_guidance_scale 1,2.5 --upsampler_classifier_paths none,clip.pt
--upsampler_classifier_scale 2 --upsampler_seed 3 --upsampler_batch_size 4,1 --noise_level 0.1,0
--blur_level 0.5 --tile_size 0,256 --tile_overlap 64 --init_image a.png,b.png --mask m.png --strength 0.8
--inpaint_resamples 2 --inpaint_jump 3 --classifier_path clip.pt --classifier_scale 0,1,2
--num_channels 32 --small_size none
"""


def parsed(*flags):
    return parse(SampleRun, shlex.split(" ".join(flags)))


def request(*flags):
    run = parsed(*flags)
    return read_request(run.what, run.edit)


def upsampled(folder, *flags):
    return request(f"--upsampler_paths up.pt --low_res_dir {folder}", *flags)


def save(path, height=4, width=6, level=100, mode="RGB"):
    """A uniform image; its path."""
    Image.new(mode, (width, height), (level,) * 3 if mode == "RGB" else level).save(path)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """Three images of one size and different gray levels."""
    (tmp_path / "images").mkdir()
    for level, name in enumerate("cab"):
        save(tmp_path / "images" / f"{name}.png", level=level)
    return str(tmp_path / "images")


def test_the_output_of_a_dry_run_is_read_back(tmp_path, capsys):
    """A whole cascade, with every kind of setting."""
    with pytest.raises(SystemExit) as left:
        parsed(CASCADE, "--dry_run")
    assert not left.value.code
    (tmp_path / "cascade.yaml").write_text(capsys.readouterr().out)
    again = parsed(f"--config {tmp_path}/cascade.yaml")
    assert again == parsed(CASCADE)
    assert again.sampler.timestep_respacing == "10,15,20" and again.what.sample_size == (64, 128)
    two = upsampling(again.upsamplers)
    assert [settings.sampler.timestep_respacing for settings in two] == ["9", "ddim25"]
    assert [settings.classifier for settings in two] == [None, "clip.pt"]
    changed = parsed(f"--config {tmp_path}/cascade.yaml --noise_level 0.3 --prompts 'a ring'")
    assert changed.upsamplers.noise_level == (0.3,) and changed.what.prompts == "a ring"


def test_a_file_from_before_guidance_had_a_default_of_its_own_still_loads(tmp_path):
    """Its guidance_scale is 3.0, which is now spelled none; both are accepted, in files and flags."""
    (tmp_path / "old.yaml").write_text("what: {model_path: base.pt}\nguidance: {guidance_scale: 3.0}\n")
    assert given(parsed(f"--config {tmp_path}/old.yaml").guidance) == {"guidance_scale": 3.0}
    assert given(parsed(f"--config {tmp_path}/old.yaml --guidance_scale none").guidance) == {}


def test_a_file_may_set_an_upsamplers_steps_by_thirds(tmp_path):
    """On the command line, commas separate the upsamplers."""
    (tmp_path / "settings.yaml").write_text(
        "what: {model_path: base.pt}\nupsamplers: {upsampler_paths: up.pt, upsampler_timestep_respacing: ['3,4,5']}\n"
    )
    settings = upsampling(parsed(f"--config {tmp_path}/settings.yaml").upsamplers, USUAL[:1])
    assert [stage.sampler.timestep_respacing for stage in settings] == ["3,4,5"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model_path base.pt --variation 0", "variation, .* give it with --init_image"),
        ("--model_path base.pt --inpaint_jump 3", "inpaint_jump .* give it with --init_image"),
        ("--model_path base.pt --whole_mask True", "--whole_mask is set, but there is no mask"),
        ("--model_path base.pt --sample_size 0,64", "sample_size is 0,64, but must be HEIGHT,WIDTH"),
    ],
)
def test_incompatible_settings_are_refused(flags, words):
    with pytest.raises(InputError, match=words):
        parsed(flags)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_level": (0.1, 0.2, 0.3)}, "noise_level has 3 values for 2 upsamplers: give one for all, or one for"),
        ({"upsampler_seed": (1, 2, 3)}, "upsampler_seed has 3 values for 2 upsamplers"),
        ({"upsampler_classifier_paths": ("a", "b", "c")}, "upsampler_classifier_paths has 3 values for 2 upsamplers"),
        (
            {"upsampler_sampler": ("ddim", "ddmi")},
            "upsampler_sampler is 'ddmi', but must be one of .* did you mean ddim",
        ),
        (
            {"upsampler_sampler": ("ddim", "heun"), "upsampler_eta": (0.5,)},
            r"upsampler_.*eta is 0.5, but only .* \(b\)",
        ),
        ({"upsampler_classifier_scale": (2.0,)}, "upsampler_classifier_scale .* with upsampler_classifier_paths"),
        ({"upsampler_guidance_interval": (0.0, 0.5) * 3}, "upsampler_guidance_interval has 3 values for 2 upsamplers"),
        (
            {"upsampler_guidance_interval": (0.0, 0.5, 0.5, 0.1)},
            r"upsampler_guidance_interval is 0.5,0.1, but must be LOW,HIGH .* \(b\)",
        ),
    ],
)
def test_incompatible_lists_of_upsampler_settings_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        UpsamplersConfig(**{"upsampler_paths": ("a", "b"), **settings})


def test_every_setting_of_a_base_is_one_of_upsamplers_and_of_stage_b_too():
    """But for those that stages of their kind do not have, which they name."""
    run = parsed(
        "--model_path a.pt --upsampler_paths a,b --upsampler_guidance_rescale 0.7",
        "--upsampler_guidance_interval 0,0.5,0.2,1 --upsampler_thresholding none,dynamic",
        "--upsampler_dynamic_percentile 0.9 --upsampler_perturbed_attention_scale 2",
    )
    one, two = (each.guidance for each in upsampling(run.upsamplers))
    assert one.guidance_rescale == two.guidance_rescale == 0.7 and one.perturbed_attention_scale == 2
    assert (one.guidance_interval, two.guidance_interval) == ((0, 0.5), (0.2, 1))
    assert (one.thresholding, two.thresholding) == ("none", "dynamic")
    declared = set(SETTINGS)
    for flags, config in ((UPSAMPLERS, run.upsamplers), (STAGE_B, run.cascade)):
        assert all(hasattr(config, flags.flag(name)) for name in declared - set(flags.has_no))
    assert declared - set(UPSAMPLERS.has_no) >= set(BASE.flags) - {"classifier_path", "shift", "t_start", "t_end"}
    base = [run.sampler, run.guidance, run.classifier, run.what, run.cascade]
    assert all(any(hasattr(section, flag) for section in base) for flag in BASE.flags)


def test_a_list_of_one_is_for_all_and_a_longer_one_for_each():
    config = UpsamplersConfig(
        ("a", "b"),
        upsampler_guidance_scale=(2.0,),
        upsampler_classifier_paths=("none", "c"),
        upsampler_seed=(7,),
        noise_level=(0.1, 0.2),
    )
    one, two = upsampling(config)
    assert (one.noise_level, two.noise_level) == (0.1, 0.2) and one.seed == two.seed == 7
    assert (one.classifier, two.classifier) == (None, "c")
    assert one.guidance == two.guidance == GuidanceConfig(guidance_scale=2.0)
    assert one.sampler == UPSAMPLER_DEFAULTS.sampler and one.batch_size == 4
    assert upsampling(UpsamplersConfig(("a",)), USUAL[:1]) == USUAL[:1] and upsampling(UpsamplersConfig(), []) == []
    with pytest.raises(InputError, match="has 2 values for 3 upsamplers"):
        upsampling(config, [*USUAL, UPSAMPLER_DEFAULTS])
    base = SimpleNamespace(stages=[SimpleNamespace(defaults=StageSettings(), flags=BASE)])
    with pytest.raises(InputError, match="but no upsampler: .* upsampler_paths"):
        parsed("--model_path a.pt --noise_level 0.1").settings(base, 1.0)


def test_the_spacing_of_every_stage():
    """One for the base, and for the upsamplers one for all or one for each."""
    run = parsed("--model_path a.pt --spacing karras --upsampler_paths u.pt,v.pt --upsampler_spacing trailing,even")
    assert run.sampler.spacing == "karras"
    assert [each.sampler.spacing for each in upsampling(run.upsamplers)] == ["trailing", "even"]
    both = upsampling(UpsamplersConfig(("u", "v"), upsampler_spacing=("log_snr",)))
    assert [each.sampler.spacing for each in both] == ["log_snr"] * 2
    assert [each.sampler.spacing for each in upsampling(UpsamplersConfig(("u", "v")))] == [None] * 2
    with pytest.raises(InputError, match="--upsampler_spacing is 'krras', but must be one of .* did you mean karras"):
        parsed("--model_path a.pt --upsampler_paths u.pt,v.pt --upsampler_spacing even,krras")
    with pytest.raises(
        InputError, match=r"upsampler_spacing and upsampler_timestep_respacing exclude each other.* \(u\)"
    ):
        UpsamplersConfig(("u", "v"), upsampler_spacing=("even",), upsampler_timestep_respacing=("5", "ddim5"))


def test_what_is_given_replaces_what_a_checkpoint_says():
    """Another sampler than the checkpoint's has none of its eta."""
    says = StageSettings(SamplerConfig("ddim", 7, 0.5), GuidanceConfig(thresholding="dynamic"), noise_level=0.2)
    stage = SimpleNamespace(defaults=says, flags=BASE, path="a.pt")

    def settings(*flags):
        return parsed("--model_path a.pt", *flags).settings(SimpleNamespace(stages=[stage]), 2.0)[0]

    assert settings() == replace(says, classifier_scale=2.0)
    assert settings("--steps 9").sampler == SamplerConfig("ddim", 9, 0.5)
    assert settings("--sampler heun").sampler == SamplerConfig("heun", 7)
    assert settings("--sampler ddim --eta 0").sampler == SamplerConfig("ddim", 7)
    assert settings("--thresholding none").guidance.thresholding == "none"
    assert settings("--guidance_scale 2").guidance == GuidanceConfig(2.0, thresholding="dynamic")
    with pytest.raises(InputError, match="--eta is 0.1, but only the --sampler ddim has it"):
        settings("--sampler heun --eta 0.1")
    stage.flags = UPSAMPLERS
    with pytest.raises(InputError, match="are given, but there is none: set the upsamplers' own"):
        settings("--sampler heun")


def test_prompts_come_from_text_files_and_folders_of_them_or_from_shards(tmp_path):
    for name in ("texts/c.txt", "texts/a.txt", "b.txt", "shards/x.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"prompt of {name}\n\n")
    texts, file, shards = (str(tmp_path / name) for name in ("texts", "b.txt", "shards"))
    found = request(f"--model_path base.pt --data_dir {texts},{file}")
    assert found.prompts == ["prompt of texts/a.txt", "prompt of texts/c.txt", "prompt of b.txt"]
    for mixed in (f"{texts},{shards}", f"{shards},{file}"):
        with pytest.raises(InputError, match=r"names text files \(.*(texts|b\.txt)\) and shards \(.*shards\)"):
            request(f"--model_path base.pt --data_dir {mixed}")


# -------------------------------------------------------------------------------------------------- images to upsample


def test_there_is_one_image_per_low_resolution_image(folder):
    found = upsampled(folder, "--prompts 'a star|a ring' --labels 1,2 --seed 5")
    assert found.prompts == ["a star", "a ring", "a star"] and found.labels == [1, 2, 1]
    assert found.seeds == [5, 6, 7] and found.edit is None
    assert found.low_res.shape == (3, 4, 6, 3) and found.low_res[:, 0, 0, 0].tolist() == [1, 2, 0]  # a, b, c
    assert upsampled(folder).prompts == ["", "", ""]


def test_unsuitable_low_resolution_images_are_refused(folder, tmp_path):
    image = save(tmp_path / "a.png")
    edited = ",".join([image] * 4)
    for flags in (
        "--prompts 'a|b|c|d'",
        "--labels 1,2,3,4",
        f"--init_image {edited}",
        "--num_samples 2",
        "--num_samples 3",
    ):
        with pytest.raises(InputError, match="holds 3 images, which is .* leave num_samples out"):
            upsampled(folder, flags)
    save(f"{folder}/d.png", height=5)
    with pytest.raises(InputError, match="images of one size, but a.png has 6 × 4 pixels and d.png 6 × 5 pixels"):
        upsampled(folder)
    with pytest.raises(InputError, match="low_res_dir .*nowhere"):
        upsampled(f"{folder}/nowhere")


# --------------------------------------------------------------------------------------------------- images to edit


def test_images_and_masks_are_read_and_used_in_turn(tmp_path):
    images = [save(tmp_path / f"{level}.png", level=level) for level in (10, 20)]
    masks = [save(tmp_path / f"mask{level}.png", level=level, mode="L") for level in (0, 255)]
    flags = "--model_path base.pt --strength 0.3 --init_image " + ",".join(images)
    found = request(flags)
    assert found.prompts == ["", ""] and found.edit.masks is None and found.edit.config.strength == 0.3
    assert [image[0, 0, 0] for image in found.edit.images] == [10, 20]
    with pytest.raises(InputError, match="mask0.png cannot be used: it inpaints nothing.*set whole_mask to True"):
        request(flags, "--mask", masks[0])
    flags += " --whole_mask True"
    found = request(flags, "--prompts 'a star' --num_samples 3 --mask", ",".join(masks))
    assert len(found.prompts) == 3 and [mask.any() for mask in found.edit.masks] == [False, True]
    edit = found.edit.at([0, 1, 2], (4, 6), PixelSignal())
    assert edit.unknown.flatten(1).any(1).tolist() == [False, True, False]
    assert ((edit.images[:, 0, 0, 0] + 1) * 127.5).round().tolist() == [10, 20, 10]
    one = request(flags, "--mask", masks[1]).edit
    assert one.at([0, 1], (4, 6), PixelSignal()).unknown.all()


def test_unsuitable_masks_are_refused(tmp_path):
    images = [save(tmp_path / f"{level}.png", level=level) for level in (10, 20, 30)]
    masks = [save(tmp_path / f"mask{i}.png", level=255, mode="L") for i in range(2)]
    flags = "--model_path base.pt --whole_mask True --init_image " + ",".join(images)
    small = save(tmp_path / "small.png", height=2, level=255, mode="L")
    for mask, words in (
        (",".join(masks), "2 masks .mask. for 3 images: give one for all, or one for each"),
        (small, "mask has 6 × 2 pixels, but must have the size of its image, 6 × 4"),
        (",".join([*masks, small]), r"mask \(number 3\) has 6 × 2"),
        (f"{masks[0]} --variation 0.5", "mask and variation exclude each other"),
        (f"{tmp_path}/nowhere.png", "nowhere.png does not exist"),
    ):
        with pytest.raises(InputError, match=words):
            request(flags, "--mask", mask)


def test_an_upsampler_alone_supports_masks(folder, tmp_path):
    image, mask = save(tmp_path / "a.png", 8, 12), save(tmp_path / "m.png", 8, 12, 255, "L")
    found = upsampled(folder, f"--init_image {image} --mask {mask} --whole_mask True")
    assert len(found.prompts) == 3 and np.all(found.edit.masks[0]) and found.low_res.shape == (3, 4, 6, 3)


def test_embeddings_are_read_from_a_file(tmp_path):
    """One image for each, or used in turn."""
    path, values = str(tmp_path / "e.npy"), np.random.default_rng(0).normal(size=(3, 5))
    for dtype in (np.float16, np.float32, np.float64):
        np.save(path, values.astype(dtype))
        found = request(f"--model_path a.pt --embeddings {path}")
        assert found.embeddings.dtype == np.float32 and len(found) == 3
        np.testing.assert_array_equal(found.embeddings, values.astype(dtype).astype(np.float32))
    again = request(f"--model_path a.pt --embeddings {path} --num_samples 4").embeddings
    np.testing.assert_array_equal(again, found.embeddings[[0, 1, 2, 0]])
    for other, what in (
        (np.zeros((2, 3), dtype=int), "int64"),
        (np.zeros(3), "float64"),
        (np.zeros((0, 3)), "float64"),
        (np.array([[None]]), ".npy"),
    ):
        np.save(path, other, allow_pickle=True)
        with pytest.raises(InputError, match=f"e.npy is .*{what}.*, but embeddings must be a .npy file of numbers"):
            request(f"--model_path a.pt --embeddings {path}")
    np.save(path, values)
    data = (tmp_path / "e.npy").read_bytes()
    for cut in (data[:-8], data[:20], b"text"):
        (tmp_path / "e.npy").write_bytes(cut)
        with pytest.raises(InputError, match="but embeddings must be a .npy file of numbers"):
            request(f"--model_path a.pt --embeddings {path}")
    with pytest.raises(InputError, match="does not exist"):
        request(f"--model_path a.pt --embeddings {path}x")
