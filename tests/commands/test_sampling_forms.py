"""Guided-Diffusion's form of a sampling command and ours, and files from when they had one name."""

import re
import shlex
from types import SimpleNamespace

import pytest
from checkpoint_making import make_classifier_file, make_file, make_run

from diff_dalle.checkpoints.kinds import find_kind
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import InputError, present_form, to_dict
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig, space_timesteps
from diff_dalle.diffusion.sampling import PreviewConfig, SamplerConfig
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.request import Request
from diff_dalle.sampling.stage_settings import BASE, StageSettings

PREVIEWS = GuidanceConfig(5.0, guidance_scale_end=2.0, guidance_interval=(0.1, 0.9), perturbed_attention_scale=2.0)
OFF = GuidanceConfig(1.0)
PROCESS = DiffusionConfig(noise_schedule="cosine")
NOTHING, ALL = SamplerConfig(), list(range(1000))


def resolved(flags, says=NOTHING, diffusion=PROCESS):
    """The base generator's settings, of a checkpoint whose previews are guided."""
    run = parse(SampleRun, shlex.split(f"--model_path a.pt {flags}"))
    stage = SimpleNamespace(defaults=StageSettings(says, PREVIEWS), flags=BASE, path="a.pt", diffusion=diffusion)
    return run.settings(SimpleNamespace(stages=[stage]), run.classifier.scales[0])[0]


@pytest.mark.parametrize(
    ("flags", "sampler", "steps", "form", "guidance", "classifier_scale"),
    [
        ("", "dpm++2m", 30, "score", PREVIEWS, 0),
        ("--use_ddim True", "ddim", 30, "score", PREVIEWS, 0),
        ("--classifier_path c", "ancestral", ALL, "mean", OFF, 1),
        ("--classifier_path c --use_ddim False", "ancestral", ALL, "mean", OFF, 1),
        (
            "--classifier_path c --classifier_scale 4 --guidance_scale 2",
            "ancestral",
            ALL,
            "mean",
            GuidanceConfig(2.0),
            4,
        ),
        ("--classifier_path c --timestep_respacing 250", "ancestral", "250", "mean", OFF, 1),
        ("--classifier_path c --timestep_respacing ddim25 --use_ddim True", "ddim", "ddim25", "score", OFF, 1),
        ("--timestep_respacing 10,10,20", "ancestral", "10,10,20", "mean", OFF, 0),
        ("--timestep_respacing fast27", "ancestral", "10,10,3,2,2", "mean", OFF, 0),
        ("--timestep_respacing 1000", "ancestral", ALL, "mean", OFF, 0),
        ("--timestep_respacing 50 --sampler unipc", "unipc", "50", "score", OFF, 0),
        ("--classifier_path c --steps 20", "dpm++2m", 20, "score", PREVIEWS, 1),
        ("--classifier_path c --sampler ancestral", "ancestral", 30, "mean", PREVIEWS, 1),
        ("--classifier_path c --sampler ancestral --classifier_form score", "ancestral", 30, "score", PREVIEWS, 1),
        ("--steps 0", "dpm++2m", ALL, "score", PREVIEWS, 0),
    ],
)
def test_what_is_default_when(flags, sampler, steps, form, guidance, classifier_scale):
    """The table of sampling/README.md."""
    found = resolved(flags)
    assert (found.sampler.algorithm, found.form) == (sampler, form)
    assert (found.guidance, found.classifier_scale) == (guidance, classifier_scale)
    taken = found.sampler.process(PROCESS).timestep_map
    if isinstance(steps, int):
        assert len(taken) == steps and taken != sorted(space_timesteps(1000, str(steps)))  # not even
    else:
        assert taken == (steps if isinstance(steps, list) else sorted(space_timesteps(1000, steps)))


def test_what_a_checkpoint_says_of_its_sampler_is_not_replaced_by_a_classifier():
    says = SamplerConfig("ddim", 7, 0.5)
    assert resolved("--classifier_path c", says).sampler == says
    assert resolved("--timestep_respacing 9", says).sampler == SamplerConfig(timestep_respacing="9")
    assert resolved("--steps 9", SamplerConfig("heun", timestep_respacing="3,4")).sampler == SamplerConfig("heun", 9)


def test_a_flow_samples_as_ever_with_a_classifier():
    """It has no steps of training, of which Guided-Diffusion takes all."""
    found = resolved("--classifier_path c", diffusion=DiffusionConfig(noise_schedule="flow"))
    assert (found.sampler, found.guidance, found.classifier_scale) == (NOTHING, PREVIEWS, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps 20 --timestep_respacing 20", "--steps and --timestep_respacing exclude each other"),
        ("--spacing even --timestep_respacing 20", "--spacing and --timestep_respacing exclude each other"),
        ("--timestep_respacing fast28", "--timestep_respacing is 'fast28', but must look like"),
        ("--timestep_respacing 0,0", "keeps no step"),
        ("--steps 10,20", "--steps is '10,20', but must be an integer"),
        ("--classifier_path c --classifier_form mean --steps 9", "classifier_form is 'mean', but only .* ancestral"),
        ("--upsampler_paths u --upsampler_steps 3 --upsampler_timestep_respacing 4", "upsampler_steps and .* exclude"),
    ],
)
def test_forms_do_not_mix(flags, words):
    with pytest.raises(InputError, match=words):
        resolved(flags)


OLD = {"sampler": "ddim", "eta": 0.0, "spacing": None}  # beside timestep_respacing


def test_files_from_before_keep_their_meaning():
    """Steps under the name timestep_respacing: in checkpoints, run folders, and dumps of --dry_run."""
    for old, new in {
        "30": {"steps": 30},
        30: {"steps": 30},
        "": {"steps": 0},
        "10,15": {"timestep_respacing": "10,15"},
        "ddim25": {"timestep_respacing": "ddim25"},
    }.items():
        preview = {"sample_interval": 9, "sampler": {**OLD, "timestep_respacing": old}}
        assert present_form(PreviewConfig, preview) == {"sample_interval": 9, "sampler": {**OLD, **new}}
        run = {**to_dict(make_run(GeneratorRun)), "preview": preview}
        assert find_kind("generator").read({key: run[key] for key in ("preview",)}).preview.sampler == SamplerConfig(
            "ddim", **new
        )
    now = to_dict(PreviewConfig(sampler=SamplerConfig(timestep_respacing="30")))
    assert present_form(PreviewConfig, now) == now


def test_a_dry_run_from_before_is_read_as_it_was_meant(tmp_path):
    """Complete sections; what a user writes by hand has its present meaning."""
    up = {"upsampler_sampler": [], "upsampler_eta": [], "upsampler_timestep_respacing": ["9", "4"]}
    b = {"stage_b_sampler": None, "stage_b_eta": None, "stage_b_timestep_respacing": "12"}
    old = {"what": {"model_path": ["a"]}, "sampler": {**OLD, "timestep_respacing": "20"}, "upsamplers": up}
    (tmp_path / "old.json").write_text(repr(old | {"cascade": b}).replace("'", '"').replace("None", "null"))
    run = parse(SampleRun, ["--config", str(tmp_path / "old.json"), "--upsampler_paths", "u,v"])
    assert (run.sampler.steps, run.sampler.timestep_respacing) == (20, None)
    assert run.upsamplers.upsampler_steps == (9, 4) and run.cascade.stage_b_steps == 12
    assert parse(SampleRun, ["--model_path", "c", "--stage_b", "b", "--stage_b_timestep_respacing", "9"]).cascade == (
        parse(SampleRun, ["--model_path", "c", "--stage_b", "b", "--stage_b_steps", "9"]).cascade
    )
    (tmp_path / "new.yaml").write_text("model_path: a\ntimestep_respacing: 20\n")
    assert parse(SampleRun, ["--config", str(tmp_path / "new.yaml")]).sampler.timestep_respacing == "20"


def test_the_console_says_how_every_stage_samples(tmp_path):
    pipeline = load(make_file(tmp_path), "cpu")
    classifier = make_classifier_file(tmp_path)
    given = {"classifier": classifier, "classifier_scale": 2.0, "batch_size": 2}
    lines = []
    for more in ({"timestep_respacing": "4"}, {"steps": 3, "sampler": "ddim", "eta": 0.5, "guidance_scale_end": 1.5}):
        settings = StageSettings().changed(**given, **more)
        pipeline.sample_stages(Request.of(["a star"]), [settings], progress=False, tell=lines.append)
    named = re.escape(str(tmp_path / "ema.pt"))
    assert re.fullmatch(f"{named}: ancestral, 4 steps .even., guidance scale 1, classifier scale 2 .mean.", lines[0])
    assert re.fullmatch(
        rf"{named}: ddim \(eta 0.5\), 3 steps \(log_snr\), guidance scale 3 to 1.5, classifier scale 2 \(score\)",
        lines[1],
    )
    assert len(lines) == 2
