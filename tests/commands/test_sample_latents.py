"""sample.py with a latent cascade: flags and files, pictures on the command line."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from checkpoint_making import samples_in
from latent_file_making import make_cascade
from script_running import run

import diff_dalle
from diff_dalle.checkpoints.cascade import LatentSampling, StageBSampling
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.sampling.stage_settings import BASE, STAGE_B, StageSettings

FILES = "--model_path c.pt --stage_b b.pt --stage_a a.pt"


def parsed(*flags):
    return parse(SampleRun, shlex.split(" ".join(flags)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_cascade(tmp_path_factory.mktemp("latent"))


def flags(files):
    return f"--model_path {files.c} --stage_b {files.b} --stage_a {files.a} --device cpu"


STAGE_C_FILE = {
    "model_version": "3.6B",
    "effnet_checkpoint_path": "effnet.safetensors",
    "previewer_checkpoint_path": "previewer.safetensors",
    "generator_checkpoint_path": "c.safetensors",
}


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({}, "--model_path c.safetensors --semantic effnet.safetensors"),
        (
            {"lora_checkpoint_path": "l.safetensors", "controlnet_checkpoint_path": "n.safetensors"},
            "--model_path c.safetensors --semantic effnet.safetensors --controlnet n.safetensors --lora l.safetensors",
        ),
        (
            {"stage_a_checkpoint_path": "a.safetensors"},
            "--stage_b c.safetensors --stage_a a.safetensors --semantic effnet.safetensors",
        ),
    ],
)
def test_a_published_file_of_sampling_is_answered_with_the_flags(tmp_path, changes, given):
    path = tmp_path / "inference.yaml"
    path.write_text(yaml.safe_dump({**STAGE_C_FILE, **changes}))
    message = f"{path} is a file of Stable Cascade, but this command takes networks by flags: leave it out, and give "
    with pytest.raises(InputError) as error:
        parsed(f"--config {path}")
    assert str(error.value).startswith(f"{message}{given} (a published file")


def test_flags_of_each_stage():
    """What is given replaces what the checkpoints say; those of stage B have no effect on stage C."""
    c, b = LatentSampling(), StageBSampling()
    stages = [
        SimpleNamespace(
            defaults=StageSettings(each.sampler_config, each.guidance, batch_size=4, shift=each.shift), flags=flags
        )
        for each, flags in ((c, BASE), (b, STAGE_B))
    ]
    pipeline = SimpleNamespace(stages=stages)

    def settings(*flags):
        return parsed(FILES, *flags).settings(pipeline, 1.0)

    plain = settings()
    assert plain[0] == StageSettings(c.sampler_config, c.guidance, shift=2.0) and plain[1] == stages[1].defaults
    assert c.guidance == GuidanceConfig(
        4.0, guidance_rescale=0.7, thresholding="none"
    ) and c.sampler_config == SamplerConfig("ancestral", 20)
    given = {"shift": 3, "t_start": 0.9, "t_end": 0.1}
    assert settings("--shift 3 --t_start 0.9 --t_end 0.1") == [replace(plain[0], **given), plain[1]]
    changed = settings(
        "--stage_b_sampler ddim --stage_b_steps 7 --stage_b_spacing karras --stage_b_eta 0.5",
        "--stage_b_guidance_scale 2 --stage_b_guidance_scale_end 1.5 --stage_b_guidance_rescale 0.7",
        "--stage_b_guidance_interval 0.1,0.9 --stage_b_perturbed_attention_scale 3",
        "--stage_b_perturbed_attention_interval 0.2,0.8 --stage_b_shift 1.5 --stage_b_t_start 0.8",
        "--stage_b_t_end 0.2 --stage_b_seed 9 --stage_b_batch_size 2 --stage_b_tile_size 64",
        "--stage_b_tile_overlap 16",
    )
    guidance = GuidanceConfig(2.0, 1.5, 0.7, (0.1, 0.9), 3.0, (0.2, 0.8), "none")
    assert changed[0] == plain[0]
    sampler, ends = SamplerConfig("ddim", 7, 0.5, "karras"), {"t_start": 0.8, "t_end": 0.2}
    tiles = {"tile_size": 64, "tile_overlap": 16}
    assert changed[1] == StageSettings(sampler, guidance, batch_size=2, seed=9, shift=1.5, **ends, **tiles)
    with pytest.raises(InputError, match="stage_b_.*eta is 0.5, but only the .*sampler ddim has it"):
        settings("--stage_b_eta 0.5")
    del stages[0]
    for each in given:
        with pytest.raises(InputError, match="sampler, guidance, shift, t_start, t_end or classifier are given, but"):
            settings(f"--{each} {given[each]}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"{FILES} --reconstruct a.png", "make again: leave --model_path and --low_res_dir out"),
        (f"{FILES} --upsampler_seed 3", "stage B is no upsampler: set its own"),
        (f"{FILES} --stage_b_sampler ddpm", "stage_b_sampler"),
        (f"{FILES} --stage_b_sampler heun --stage_b_eta 0.5", "stage_b_.*eta is 0.5, but"),
        (f"{FILES} --stage_b_guidance_rescale 2", "stage_b_.*guidance_rescale is 2, but"),
        (f"{FILES} --stage_b_guidance_interval 1,0", "stage_b_.*guidance_interval is .*, but"),
    ],
)
def test_impossible_flags_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        parsed(given)


def test_text_to_image_from_flags_from_a_file_and_in_python(files, tmp_path):
    chosen = {"sample_size": "32,72", "seed": 3, "shift": 1.5, "stage_b_steps": 2, "steps": 3}
    common = " ".join(f"--{name} {value}" for name, value in chosen.items())
    given = "--prompts 'a red circle|a star' --precision fp32"
    run("sample.py", flags(files), common, given, "--logdir", tmp_path / "flags")
    samples = samples_in(tmp_path / "flags")
    assert samples.shape == (2, 32, 72, 3) and (samples[0] != samples[1]).any()

    content = {"model_path": files.c, "stage_b": files.b, "stage_a": files.a, **chosen, "sample_size": [32, 72]}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(content))
    given += f" --device cpu --config {tmp_path}/pipeline.yaml --batch_size 1 --logdir {tmp_path}/file"
    run("sample.py", given, ranks=2)
    again = samples_in(tmp_path / "file")
    assert np.abs(samples.astype(int) - again).max() <= 1

    pipeline = diff_dalle.load(files.c, "cpu", "fp32", stage_b=files.b, stage_a=files.a)
    settings = parsed(FILES, common).settings(pipeline, 1.0)
    request = diff_dalle.Request(["a red circle", "a star"], [3, 4], size=(32, 72))
    assert np.abs(pipeline.sample_stages(request, settings, progress=False)[-1].astype(int) - samples).max() <= 1
