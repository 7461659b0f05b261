"""What a name that does not exist is taken for."""

import pytest

from diff_dalle.commands.flag_names import by_name
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config.names import OTHER_NAMES, nearest
from diff_dalle.diffusion.sampling import SAMPLERS
from diff_dalle.models.options import PRECISIONS
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.planning.cluster import GPUS

# Flags of other projects' scripts by what they mean here.
TRAINING = {
    "iterations": ("steps", "max_train_steps", "num_train_epochs", "epochs", "num_iterations", "max_steps"),
    "lr": ("learning_rate", "learning-rate", "base_lr"),
    "batch_size": ("train_batch_size", "bs"),
    "image_size": ("resolution", "img_size"),
    "logdir": ("output_dir", "outdir", "results_dir"),
    "data_dir": ("train_data_dir", "dataset_name", "data_path"),
    "guidance_scale": ("cfg", "cfg-scale"),
    "precision": ("mixed_precision", "fp16", "dtype"),
    "microbatch": ("gradient_accumulation_steps",),
    "use_checkpoint": ("gradient_checkpointing",),
    "ema_rate": ("ema_decay", "use_ema"),
    "num_workers": ("dataloader_num_workers",),
    "save_interval": ("checkpointing_steps",),
    "resume_checkpoint": ("resume_from_checkpoint", "resume"),
    "grad_clip": ("max_grad_norm",),
    "warmup_steps": ("lr_warmup_steps",),
    "min_snr_gamma": ("snr_gamma",),
    "num_channels": ("model_channels", "num_chanels"),
    "noise_schedule": ("beta_schedule",),
    "prediction": ("prediction_type",),
    "preview_steps": ("num_inference_steps",),
}
SAMPLING = {
    "steps": ("num_inference_steps", "ddim_steps"),
    "guidance_scale": ("cfg", "guidance"),
    "prompts": ("prompt",),
    "num_samples": ("num_images_per_prompt", "n_samples"),
    "model_path": ("ckpt", "pretrained_model_name_or_path"),
    "sample_size": ("resolution",),
    "sampler": ("scheduler",),
}


@pytest.mark.parametrize(("command", "expected"), [(GeneratorRun, TRAINING), (SampleRun, SAMPLING)])
def test_flags_of_other_projects(command, expected):
    flags = [f"--{name}" for name in by_name(command)]
    found = {name: nearest(f"--{name}", flags) for names in expected.values() for name in names}
    assert found == {name: f"; did you mean --{ours}?" for ours, names in expected.items() for name in names}


@pytest.mark.parametrize(
    ("name", "names", "ours"),
    [
        ("a100", GPUS, "a100_80"),
        ("4090", GPUS, "rtx4090"),
        ("euler_a", SAMPLERS, "ancestral"),
        ("dpmpp_2m", SAMPLERS, "dpm++2m"),
        ("DDIM", SAMPLERS, "ddim"),
        ("half", PRECISIONS, "fp16"),
        ("batch", ["batch_size", "big_batch"], "batch_size"),
        ("image-size", ["image_size", "images"], "image_size"),
        ("imag", ["image_sizes", "images"], "images"),
        ("steps", ["epoch", "step"], "step"),
    ],
)
def test_values_and_beginnings(name, names, ours):
    assert nearest(name, names) == f"; did you mean {ours}?"


@pytest.mark.parametrize("name", ["v100", "rtx3090"])
def test_what_has_no_counterpart_is_not_taken_for_another(name):
    assert nearest(name, GPUS) == ""


@pytest.mark.parametrize("name", ["foo", "xyzzy", "epocs_of_it"])
def test_what_is_not_alike_is_nothing(name):
    assert nearest(f"--{name}", [f"--{each}" for each in by_name(GeneratorRun)]) == ""


def test_the_table_names_settings_that_exist():
    """Ours or values of ours, of some command."""
    known = {*by_name(GeneratorRun), *by_name(SampleRun), *SAMPLERS, *PRECISIONS}
    elsewhere = {"dim", "dim_mults", "epochs", "prompt", "source", "resize", "out_dir", "out", "report_dir", "to"}
    elsewhere |= {"checkpoint_path", "updates", "models", "timesteps", "cosine", "epsilon", "x_start", "v", "sample"}
    assert {ours for names in OTHER_NAMES.values() for ours in names} <= known | elsewhere
