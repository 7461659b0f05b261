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
# Command, what is named, flags with which others have no effect, flags with which they have one, and the others.
GROUPS = [
    (GeneratorRun, "noise_schedule is linear", "", "--noise_schedule flow", ["loss_space flow", "flow_shift 2"]),
    (GeneratorRun, "schedule_sampler is", "", "--schedule_sampler logit_normal", ["logit_mean 1"]),
    (ClassifierRun, "schedule_sampler is", "", "--schedule_sampler logit_normal", ["logit_std 2"]),
    (
        GeneratorRun,
        "set --alignment_path, or leave it out",
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
    (GeneratorRun, "perceptual_weight is 0", "", "--perceptual_weight 1", ["perceptual_path p"]),
    (
        GeneratorRun,
        "perceptual_weight is 0",
        "",
        PERCEPTUAL,
        ["perceptual_net alex", "perceptual_snr 1", "perceptual_encoder 0"],
    ),
    (GeneratorRun, "lr_anneal_steps is 0", "", "--lr_anneal_steps 10 --iterations 10", ["lr_anneal cosine"]),
    (ClassifierRun, "lr_anneal_steps is 0", "--lr_anneal_steps 0", "", ["lr_anneal linear"]),
    (GeneratorRun, "optimizer is adamw", "", "--optimizer muon", ["muon_lr 0.01"]),
    (ClassifierRun, "set --optimizer to muon", "--optimizer adamw", "--optimizer muon", ["muon_momentum 0.9"]),
    (
        GeneratorRun,
        "val_data_dir is none: set --val_data_dir, or leave",
        "",
        "--val_data_dir v",
        ["keep_best", "eval_interval 10", "set training.eval_samples=10"],
    ),
    (ClassifierRun, "val_data_dir is none", "", "--val_data_dir v", ["keep_best True"]),
    (GeneratorRun, "loss_weighting is none", "", "--loss_weighting min_snr", ["min_snr_gamma 5"]),
    (GeneratorRun, "is p2", "--loss_weighting p2", "--loss_weighting min_snr", ["min_snr_gamma 4"]),
    (GeneratorRun, "to p2, or leave", "--loss_weighting min_snr", "--loss_weighting p2", ["p2_k 2", "p2_gamma 2"]),
    (GeneratorRun, "set --variance to learned or learned_range", "", "--variance learned", ["vb_loss_weight 0.1"]),
    (GeneratorRun, "variance is", "", "--learn_sigma True", ["learned_variance_constrain_frac True"]),
    (GeneratorRun, "thresholding is static", "", "--thresholding dynamic", ["dynamic_percentile 0.9"]),
    (SampleRun, "is none", "--model_path a", "--model_path a --thresholding dynamic", ["dynamic_percentile 0.9"]),
    (
        GeneratorRun,
        "sample_interval is 0: set --sample_interval, or leave it out",
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
        "set --trackers to wandb",
        "",
        "--trackers console,wandb",
        ["wandb_project p", "wandb_entity p", "wandb_run_name p", "wandb_run_id p", "wandb_resume never"],
    ),
    (GeneratorRun, "to samples", "--trackers console", "--trackers samples", ["samples_dir s"]),
    (GeneratorRun, "keep_checkpoints is 0", "", "--keep_checkpoints 2", ["backup_interval 100"]),
    (ClassifierRun, "parallel is ddp", "", "--parallel fsdp", ["consolidate True"]),
    (GeneratorRun, "ema_rate is none", "--ema_rate=", "", ["ema_start 10", "ema_every 10"]),
    (GeneratorRun, "set --parallel to hsdp", "--parallel fsdp", "--parallel hsdp", ["shard_processes 2"]),
    (GeneratorRun, "to fsdp or hsdp", "", "--parallel fsdp", ["reshard_after_forward True", "forward_prefetch 2"]),
    (ClassifierRun, "parallel is ddp", "", "--parallel hsdp", ["backward_prefetch 2"]),
    (GeneratorRun, "resblock_updown is True: set", "--resblock_updown", "", ["conv_resample True"]),
    (
        GeneratorRun,
        "network is unet",
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
        "network is transformer",
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
        "set --multi_aspect_ratio, or leave it out",
        "",
        "--multi_aspect_ratio 1/1,1/2",
        ["bucketeer_random_ratio 0", "bucket_factor 16", "bucket_distance log", "bucket_crop center"],
    ),
    (
        SampleRun,
        "clip_path is",
        "--model_path a --images i",
        "--model_path a --images i --clip_path c",
        ["clip_make openai"],
    ),
    (
        SampleRun,
        "classifier_path is",
        "--model_path a.pt",
        SHARDS,
        ["classifier_gradient x_start", "classifier_form score", "classifier_precision fp16"],
    ),
    (SampleRun, "mask is", INPAINTED, f"{INPAINTED} --mask m", ["inpaint_resamples 2", "inpaint_jump 2"]),
    (SampleRun, "stage_b is", "--semantic s", "--semantic s --stage_b b", ["reconstruct r"]),
    (
        SampleRun,
        "set --stage_b, or leave it out",
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
        "stage_b_tile_size is",
        "--model_path c --stage_b b",
        "--model_path c --stage_b b --stage_b_tile_size 64",
        ["stage_b_tile_overlap 8"],
    ),
    (
        SampleRun,
        "set --controlnet, or leave it out",
        "--model_path c",
        "--model_path c --controlnet n --control_image i",
        ["control_mask m", "control_ready", "control_scale 2", "control_interval 0,0.5"],
    ),
    (SampleRun, "controlnet is none", "--model_path c", "--model_path c --controlnet n", ["control_image i"]),
    *(
        (SampleRun, f"{need.split()[0]} is none", UPSAMPLED, f"{UPSAMPLED} --{need}", [flag])
        for flag, need in (
            ("tile_overlap 8", "tile_size 64"),
            ("upsampler_dynamic_percentile 0.9", "upsampler_thresholding dynamic"),
            ("upsampler_classifier_gradient x_start", "upsampler_classifier_paths c"),
            ("upsampler_classifier_form score", "upsampler_classifier_paths c"),
        )
    ),
    (SampleRun, "data_dir is none", "--model_path a", "--model_path a --data_dir d", ["caption_field json:a"]),
    (EvaluateRun, "shapes_dir is", SHARDS, SHAPES, ["prompts_per_task 4", "guidance_prompts 4"]),
    (EvaluateRun, "data_dir is none", SHAPES, SHARDS, ["num_samples 4", "caption_field json:a"]),
    (EvaluateRun, "to lpips", f"{SHARDS} --metrics fid", f"{SHARDS} --metrics fid,lpips", ["lpips_weights a.pth"]),
    (EvaluateRun, "emoji_dir is", SHAPES, "--model_path m.pt --emoji_dir e", ["judge_path j.pt"]),
    (EvaluateRun, "decoder_path is none", SHAPES, "--shapes_dir s --decoder_path d.pt", ["clip_path c.pt"]),
    *(
        (command, "are none: set one", own, f"{own} {flags}", ["accept_changed_base"])
        for command, own, control in (
            (SampleRun, "--model_path a.pt", "--controlnet n --control_image i"),
            (EvaluateRun, SHAPES, "--controlnet n"),
        )
        for flags in ("--lora l", control)
    ),
    (GeneratorLora, "prior_data_dir is none", "", "--prior_data_dir d", ["prior_weight 0.5", "prior_target base"]),
    (
        GeneratorLora,
        "set --lora_checkpoint_path, or",
        "",
        "--lora_checkpoint_path l",
        ["accept_changed_base True"],
    ),
]
CASES = [(command, f"--{flag}", *rest) for command, *rest, flags in GROUPS for flag in flags]


@pytest.mark.parametrize(("command", "flag", "words", "without", "with_effect"), CASES, ids=[case[1] for case in CASES])
def test_a_flag_without_effect_is_refused(command, flag, words, without, with_effect):
    with pytest.raises(InputError, match="has no effect while") as error:
        parse(command, [*flag.split(), *without.split()])
    assert words in str(error.value) and "leave it out" in str(error.value)
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
