"""A flag that has no effect with the others is refused."""

import pytest

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun
from diff_dalle.commands.flag_names import by_name
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import InputError
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.lora import GeneratorLora

SHAPES = "--model_path a.pt --shapes_dir s"
SHARDS = "--model_path a.pt --classifier_path c.pt --data_dir d"
TRANSFORMER = "--network transformer --patch_size 8 --iterations 9"
PERCEPTUAL = "--perceptual_weight 1 --perceptual_path p"
INPAINTED = "--model_path a --init_image i"
UPSAMPLED = "--model_path a --upsampler_paths b"
# Command, what another setting is (→ what to set it to), flags with which others have no effect, flags with which they
# have one, and the others.
GROUPS = [
    (GeneratorRun, "noise_schedule is linear → flow", "", "--noise_schedule flow", ["loss_space flow", "flow_shift 2"]),
    (
        GeneratorRun,
        "schedule_sampler is uniform → logit_normal",
        "",
        "--schedule_sampler logit_normal",
        ["logit_mean 1"],
    ),
    (
        ClassifierRun,
        "schedule_sampler is uniform → logit_normal",
        "",
        "--schedule_sampler logit_normal",
        ["logit_std 2"],
    ),
    (
        GeneratorRun,
        "alignment_path is none",
        "",
        "--alignment_path a",
        [
            "alignment_weight 1",
            "alignment_block b",
            "alignment_until 0.5",
            "alignment_width 64",
            "alignment_image_size 224",
            "alignment_encoder 01ab",
        ],
    ),
    (GeneratorRun, "perceptual_weight is 0.0", "", "--perceptual_weight 1", ["perceptual_path p"]),
    (
        GeneratorRun,
        "perceptual_weight is 0.0",
        "",
        PERCEPTUAL,
        ["perceptual_net alex", "perceptual_snr 1", "perceptual_encoder 0"],
    ),
    (GeneratorRun, "lr_anneal_steps is 0", "", "--lr_anneal_steps 10 --iterations 10", ["lr_anneal cosine"]),
    (ClassifierRun, "lr_anneal_steps is 0", "--lr_anneal_steps 0", "", ["lr_anneal linear"]),
    (GeneratorRun, "optimizer is adamw → muon", "", "--optimizer muon", ["muon_lr 0.01"]),
    (ClassifierRun, "optimizer is adamw → muon", "--optimizer adamw", "--optimizer muon", ["muon_momentum 0.9"]),
    (
        GeneratorRun,
        "val_data_dir is none",
        "",
        "--val_data_dir v",
        ["keep_best", "eval_interval 10", "set training.eval_samples=10"],
    ),
    (ClassifierRun, "val_data_dir is none", "", "--val_data_dir v", ["keep_best True"]),
    (GeneratorRun, "loss_weighting is none → min_snr", "", "--loss_weighting min_snr", ["min_snr_gamma 5"]),
    (
        GeneratorRun,
        "loss_weighting is p2 → min_snr",
        "--loss_weighting p2",
        "--loss_weighting min_snr",
        ["min_snr_gamma 4"],
    ),
    (GeneratorRun, "loss_weighting is min_snr → p2", "--loss_weighting min_snr", "--loss_weighting p2", ["p2_k 2"]),
    (GeneratorRun, "loss_weighting is none → p2", "", "--loss_weighting p2", ["p2_gamma 2"]),
    (
        GeneratorRun,
        "variance is fixed_large → learned or learned_range",
        "",
        "--variance learned",
        ["vb_loss_weight 0.1"],
    ),
    (
        GeneratorRun,
        "variance is fixed_large → learned_range",
        "",
        "--learn_sigma True",
        ["learned_variance_constrain_frac True"],
    ),
    (GeneratorRun, "thresholding is static → dynamic", "", "--thresholding dynamic", ["dynamic_percentile 0.9"]),
    (
        SampleRun,
        "thresholding is none → dynamic",
        "--model_path a",
        "--model_path a --thresholding dynamic",
        ["dynamic_percentile 0.9"],
    ),
    (
        GeneratorRun,
        "sample_interval is 0",
        "--sample_interval 0",
        "",
        [
            "preview_samples 4",
            "preview_share 0.1",
            "sampler unipc",
            "use_ddim",
            "preview_steps 9",
            "timestep_respacing 9",
            "spacing karras",
            "eta 0",
        ],
    ),
    (
        GeneratorRun,
        "trackers is console,log,csv,jsonl,samples → wandb",
        "",
        "--trackers console,wandb",
        ["wandb_project p", "wandb_entity p", "wandb_run_name p", "wandb_run_id p", "wandb_resume never"],
    ),
    (GeneratorRun, "trackers is console → samples", "--trackers console", "--trackers samples", ["samples_dir s"]),
    (GeneratorRun, "keep_checkpoints is 0", "", "--keep_checkpoints 2", ["backup_interval 100"]),
    (ClassifierRun, "parallel is ddp → fsdp or hsdp", "", "--parallel fsdp", ["consolidate True"]),
    (GeneratorRun, "ema_rate is none", "--ema_rate=", "", ["ema_start 10", "ema_every 10"]),
    (GeneratorRun, "parallel is fsdp → hsdp", "--parallel fsdp", "--parallel hsdp", ["shard_processes 2"]),
    (
        GeneratorRun,
        "parallel is ddp → fsdp or hsdp",
        "",
        "--parallel fsdp",
        ["reshard_after_forward True", "forward_prefetch 2"],
    ),
    (ClassifierRun, "parallel is ddp → fsdp or hsdp", "", "--parallel hsdp", ["backward_prefetch 2"]),
    (GeneratorRun, "resblock_updown is True → False", "--resblock_updown", "", ["conv_resample True"]),
    (
        GeneratorRun,
        "network is unet → transformer",
        "",
        TRANSFORMER,
        ["depth 6", "separate_blocks 1", "patch_channels 8", "position_patches 8", "route_share 0.5"],
    ),
    (
        GeneratorRun,
        "route_share is 0.0",
        TRANSFORMER,
        f"{TRANSFORMER} --route_share 0.5",
        ["route_blocks 1,5", "route_until 0.8"],
    ),
    (
        GeneratorRun,
        "network is transformer → unet",
        TRANSFORMER,
        "",
        [
            "num_res_blocks 1",
            "channel_mult 1,2",
            "attention_resolutions 8",
            "num_heads_upsample 2",
            "use_scale_shift_norm True",
            "resblock_updown True",
            "conv_resample True",
            "text_attention joint",
        ],
    ),
    (ClassifierRun, "noised is False", "--noised False", "", ["schedule_sampler uniform"]),
    (
        GeneratorRun,
        "multi_aspect_ratio is none",
        "",
        "--multi_aspect_ratio 1/1,1/2",
        ["bucketeer_random_ratio 0", "bucket_factor 16", "bucket_distance log", "bucket_crop center"],
    ),
    (
        SampleRun,
        "clip_path is none",
        "--model_path a --images i",
        "--model_path a --images i --clip_path c",
        ["clip_make openai"],
    ),
    (
        SampleRun,
        "classifier_path is none",
        "--model_path a.pt",
        SHARDS,
        ["classifier_gradient x_start", "classifier_form score", "classifier_precision fp16"],
    ),
    (SampleRun, "mask is none", INPAINTED, f"{INPAINTED} --mask m", ["inpaint_resamples 2", "inpaint_jump 2"]),
    (SampleRun, "stage_b is none", "--semantic s", "--semantic s --stage_b b", ["reconstruct r"]),
    (
        SampleRun,
        "stage_b is none",
        "--model_path c",
        "--model_path c --stage_b b",
        [
            "stage_a a",
            *(
                f"stage_b_{flag}"
                for flag in (
                    "sampler ddim",
                    "steps 5",
                    "spacing karras",
                    "eta 0",
                    "guidance_scale 2",
                    "guidance_scale_end 2",
                    "guidance_rescale 0.7",
                    "guidance_interval 0,0.9",
                    "perturbed_attention_scale 3",
                    "perturbed_attention_interval 0,0.9",
                    "shift 2",
                    "t_start 0.9",
                    "t_end 0.1",
                    "seed 3",
                    "batch_size 2",
                    "tile_size 64",
                )
            ),
        ],
    ),
    (
        SampleRun,
        "stage_b_tile_size is none",
        "--model_path c --stage_b b",
        "--model_path c --stage_b b --stage_b_tile_size 64",
        ["stage_b_tile_overlap 8"],
    ),
    (
        SampleRun,
        "controlnet is none",
        "--model_path c",
        "--model_path c --controlnet n --control_image i",
        ["control_mask m", "control_ready", "control_scale 2", "control_interval 0,0.5"],
    ),
    (SampleRun, "controlnet is none", "--model_path c", "--model_path c --controlnet n", ["control_image i"]),
    *(
        (SampleRun, f"{need} is none{to}", UPSAMPLED, f"{UPSAMPLED} --{need} {value}", [flag])
        for flag, need, value, to in (
            ("tile_overlap 8", "tile_size", "64", ""),
            ("upsampler_dynamic_percentile 0.9", "upsampler_thresholding", "dynamic", " → dynamic"),
            ("upsampler_classifier_gradient x_start", "upsampler_classifier_paths", "c", ""),
            ("upsampler_classifier_form score", "upsampler_classifier_paths", "c", ""),
        )
    ),
    (SampleRun, "data_dir is none", "--model_path a", "--model_path a --data_dir d", ["caption_field json:a"]),
    (EvaluateRun, "shapes_dir is none", SHARDS, SHAPES, ["prompts_per_task 4", "guidance_prompts 4"]),
    (EvaluateRun, "data_dir is none", SHAPES, SHARDS, ["num_samples 4", "caption_field json:a"]),
    (
        EvaluateRun,
        "metrics is fid → lpips",
        f"{SHARDS} --metrics fid",
        f"{SHARDS} --metrics fid,lpips",
        ["lpips_weights a.pth"],
    ),
    (EvaluateRun, "emoji_dir is none", SHAPES, "--model_path m.pt --emoji_dir e", ["judge_path j.pt"]),
    (EvaluateRun, "decoder_path is none", SHAPES, "--shapes_dir s --decoder_path d.pt", ["clip_path c.pt"]),
    *(
        (command, "--lora and --controlnet are none", own, f"{own} {flags}", ["accept_changed_base"])
        for command, own, control in (
            (SampleRun, "--model_path a.pt", "--controlnet n --control_image i"),
            (EvaluateRun, SHAPES, "--controlnet n"),
        )
        for flags in ("--lora l", control)
    ),
    (GeneratorLora, "prior_data_dir is none", "", "--prior_data_dir d", ["prior_weight 0.5", "prior_target base"]),
    (GeneratorLora, "lora_checkpoint_path is none", "", "--lora_checkpoint_path l", ["accept_changed_base True"]),
]
CASES = [(command, f"--{flag}", *rest) for command, *rest, flags in GROUPS for flag in flags]


@pytest.mark.parametrize(("command", "flag", "words", "without", "with_effect"), CASES, ids=[case[1] for case in CASES])
def test_a_flag_without_effect_is_refused(command, flag, words, without, with_effect):
    with pytest.raises(InputError) as error:
        parse(command, [*flag.split(), *without.split()])
    name = flag.partition("=")[0] if "=" in flag else flag.split()[0]
    found, _, value = words.partition(" → ")
    remedy = "one of them" if " and " in found else f"--{found.split()[0]}{f' to {value}' if value else ''}"
    assert str(error.value) == f"{name} has no effect while {found}: set {remedy}, or leave it out"
    parse(command, [*flag.split(), *with_effect.split()])


@pytest.mark.parametrize("command", [GeneratorRun, ClassifierRun, SampleRun, EvaluateRun, GeneratorLora])
def test_every_need_is_in_the_table(command):
    table = by_name(command)
    known = {
        flag.replace("=", " ").replace("training.", "").split()[0 if "set" not in flag else 1] for _, flag, *_ in CASES
    }
    needy = {leaf.name for leaf in table.values() if any(name in table for name, *_ in leaf.needs)}
    assert needy and needy <= {name.removeprefix("--") for name in known}


def test_turning_something_off_is_allowed_in_any_case():
    assert parse(ClassifierRun, ["--keep_best", "False"]).training.keep_best is False


def test_guidance_needs_no_previews():
    """It is in the checkpoint, for all sampling from it."""
    run = parse(GeneratorRun, ["--sample_interval", "0", "--guidance_scale", "2", "--thresholding", "none"])
    assert (run.preview.guidance.guidance_scale, run.preview.guidance.thresholding) == (2, "none")


def test_files_may_hold_settings_without_effect(tmp_path):
    """A dump of all settings is one."""
    path = tmp_path / "run.yaml"
    path.write_text("diffusion: {min_snr_gamma: 4.0}\n")
    assert parse(GeneratorRun, ["--config", str(path)]).diffusion.min_snr_gamma == 4.0
