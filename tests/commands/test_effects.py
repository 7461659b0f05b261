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
# Command, flag and value, flags with which it has no effect, flags with which it has one, and what is named.
CASES = [
    (GeneratorRun, "--loss_space flow", "", "--noise_schedule flow", "noise_schedule is linear"),
    (GeneratorRun, "--flow_shift 2", "", "--noise_schedule flow", "noise_schedule is linear"),
    (GeneratorRun, "--logit_mean 1", "", "--schedule_sampler logit_normal", "schedule_sampler is uniform"),
    (ClassifierRun, "--logit_std 2", "", "--schedule_sampler logit_normal", "schedule_sampler is uniform"),
    (GeneratorRun, "--alignment_weight 1", "", "--alignment_path a", "alignment_path is"),
    (GeneratorRun, "--alignment_block b", "", "--alignment_path a", "alignment_path is"),
    (GeneratorRun, "--alignment_until 0.5", "", "--alignment_path a", "set --alignment_path, or leave it out"),
    (GeneratorRun, "--alignment_width 64", "", "--alignment_path a", "alignment_path is"),
    (GeneratorRun, "--alignment_image_size 224", "", "--alignment_path a", "alignment_path is"),
    (GeneratorRun, "--alignment_encoder 01ab", "", "--alignment_path a", "alignment_path is"),
    (GeneratorRun, "--perceptual_path p", "", "--perceptual_weight 1", "perceptual_weight is 0"),
    (GeneratorRun, "--perceptual_net alex", "", "--perceptual_weight 1 --perceptual_path p", "perceptual_weight is 0"),
    (GeneratorRun, "--perceptual_snr 1", "", "--perceptual_weight 1 --perceptual_path p", "perceptual_weight is 0"),
    (GeneratorRun, "--perceptual_encoder 0", "", "--perceptual_weight 1 --perceptual_path p", "perceptual_weight is"),
    (GeneratorRun, "--lr_anneal cosine", "", "--lr_anneal_steps 10 --iterations 10", "lr_anneal_steps is 0"),
    (ClassifierRun, "--lr_anneal linear", "--lr_anneal_steps 0", "", "lr_anneal_steps is 0"),
    (GeneratorRun, "--muon_lr 0.01", "", "--optimizer muon", "optimizer is adamw"),
    (ClassifierRun, "--muon_momentum 0.9", "--optimizer adamw", "--optimizer muon", "set --optimizer to muon"),
    (GeneratorRun, "--keep_best", "", "--val_data_dir v", "val_data_dir is none: set --val_data_dir, or leave"),
    (ClassifierRun, "--keep_best True", "", "--val_data_dir v", "val_data_dir is none"),
    (GeneratorRun, "--eval_interval 10", "", "--val_data_dir v", "val_data_dir is none"),
    (GeneratorRun, "--set training.eval_samples=10", "", "--val_data_dir v", "val_data_dir is none"),
    (GeneratorRun, "--min_snr_gamma 5", "", "--loss_weighting min_snr", "loss_weighting is none"),
    (GeneratorRun, "--min_snr_gamma 4", "--loss_weighting p2", "--loss_weighting min_snr", "loss_weighting is p2"),
    (GeneratorRun, "--p2_k 2", "--loss_weighting min_snr", "--loss_weighting p2", "to p2, or leave it out"),
    (GeneratorRun, "--p2_gamma 2", "", "--loss_weighting p2", "loss_weighting is none"),
    (GeneratorRun, "--vb_loss_weight 0.1", "", "--variance learned", "set --variance to learned or learned_range"),
    (GeneratorRun, "--learned_variance_constrain_frac True", "", "--learn_sigma True", "variance is fixed_large"),
    (GeneratorRun, "--dynamic_percentile 0.9", "", "--thresholding dynamic", "thresholding is static"),
    (SampleRun, "--dynamic_percentile 0.9", "--model_path a.pt", "--model_path a.pt --thresholding dynamic", "none"),
    (GeneratorRun, "--preview_samples 4", "--sample_interval 0", "", "sample_interval is 0"),
    (GeneratorRun, "--preview_share 0.1", "--sample_interval 0", "", "sample_interval is 0"),
    (GeneratorRun, "--sampler unipc", "--sample_interval 0", "", "sample_interval is 0"),
    (GeneratorRun, "--use_ddim", "--sample_interval 0", "", "--use_ddim has no effect while sample_interval is 0"),
    (GeneratorRun, "--preview_steps 9", "--sample_interval 0", "", "set --sample_interval, or leave it out"),
    (GeneratorRun, "--timestep_respacing 9", "--sample_interval 0", "", "set --sample_interval, or leave it out"),
    (GeneratorRun, "--spacing karras", "--sample_interval 0", "", "sample_interval is 0"),
    (GeneratorRun, "--eta 0", "--sample_interval 0", "", "sample_interval is 0"),
    (GeneratorRun, "--wandb_project p", "", "--trackers console,wandb", "set --trackers to wandb"),
    (GeneratorRun, "--wandb_entity p", "", "--trackers wandb", "set --trackers to wandb"),
    (GeneratorRun, "--wandb_run_name p", "", "--trackers wandb", "set --trackers to wandb"),
    (GeneratorRun, "--wandb_run_id p", "", "--trackers wandb", "set --trackers to wandb"),
    (GeneratorRun, "--wandb_resume never", "", "--trackers wandb", "set --trackers to wandb"),
    (GeneratorRun, "--samples_dir s", "--trackers console", "--trackers samples", "set --trackers to samples"),
    (GeneratorRun, "--backup_interval 100", "", "--keep_checkpoints 2", "keep_checkpoints is 0"),
    (ClassifierRun, "--consolidate True", "", "--parallel fsdp", "parallel is ddp"),
    (GeneratorRun, "--ema_start 10", "--ema_rate=", "", "ema_rate is none"),
    (GeneratorRun, "--ema_every 10", "--ema_rate=", "", "ema_rate is none"),
    (GeneratorRun, "--shard_processes 2", "--parallel fsdp", "--parallel hsdp", "set --parallel to hsdp"),
    (GeneratorRun, "--reshard_after_forward True", "", "--parallel fsdp", "set --parallel to fsdp or hsdp"),
    (GeneratorRun, "--forward_prefetch 2", "", "--parallel fsdp", "parallel is ddp"),
    (ClassifierRun, "--backward_prefetch 2", "", "--parallel hsdp", "parallel is ddp"),
    (GeneratorRun, "--conv_resample True", "--resblock_updown", "", "resblock_updown is True: set"),
    *(
        (GeneratorRun, f"--{flag}", "", "--network transformer --patch_size 8", "network is unet")
        for flag in (
            "depth 6",
            "separate_blocks 1",
            "patch_channels 8",
            "position_patches 8",
            "route_share 0.5",
        )
    ),
    *(
        (
            GeneratorRun,
            f"--{flag}",
            "--network transformer --patch_size 8 --iterations 9",
            "--network transformer --patch_size 8 --iterations 9 --route_share 0.5",
            "route_share is 0.0",
        )
        for flag in ("route_blocks 1,5", "route_until 0.8")
    ),
    *(
        (GeneratorRun, f"--{flag}", "--network transformer --patch_size 8", "", "network is transformer")
        for flag in (
            "num_res_blocks 1",
            "channel_mult 1,2",
            "attention_resolutions 8",
            "num_heads_upsample 2",
            "use_scale_shift_norm True",
            "resblock_updown True",
            "conv_resample True",
            "text_attention joint",
        )
    ),
    (ClassifierRun, "--schedule_sampler uniform", "--noised False", "", "noised is False"),
    (
        SampleRun,
        "--clip_make openai",
        "--model_path a --images i",
        "--model_path a --images i --clip_path c",
        "clip_path is",
    ),
    (GeneratorRun, "--bucketeer_random_ratio 0", "", "--multi_aspect_ratio 1/1,1/2", "multi_aspect_ratio is none"),
    (GeneratorRun, "--bucket_factor 16", "", "--multi_aspect_ratio 1/1", "set --multi_aspect_ratio, or leave it out"),
    (GeneratorRun, "--bucket_distance log", "", "--multi_aspect_ratio 1/2", "multi_aspect_ratio is none"),
    (GeneratorRun, "--bucket_crop center", "", "--multi_aspect_ratio 1/2", "multi_aspect_ratio is none"),
    (SampleRun, "--classifier_gradient x_start", "--model_path a.pt", SHARDS, "classifier_path is"),
    (SampleRun, "--classifier_form score", "--model_path a.pt", SHARDS, "classifier_path is"),
    (SampleRun, "--classifier_precision fp16", "--model_path a.pt", SHARDS, "classifier_path is"),
    (
        SampleRun,
        "--inpaint_resamples 2",
        "--model_path a --init_image i",
        "--model_path a --init_image i --mask m",
        "mask",
    ),
    (
        SampleRun,
        "--inpaint_jump 2",
        "--model_path a --init_image i",
        "--model_path a --init_image i --mask m",
        "mask is",
    ),
    (SampleRun, "--stage_a a", "--model_path c", "--model_path c --stage_b b", "stage_b is"),
    (SampleRun, "--reconstruct r", "--semantic s", "--semantic s --stage_b b", "stage_b is"),
    *(
        (
            SampleRun,
            f"--{flag}",
            "--model_path c",
            "--model_path c --controlnet n --control_image i",
            "set --controlnet, or leave it out",
        )
        for flag in (
            "control_mask m",
            "control_ready",
            "control_scale 2",
            "control_interval 0,0.5",
        )
    ),
    (SampleRun, "--control_image i", "--model_path c", "--model_path c --controlnet n", "controlnet is none"),
    *(
        (
            SampleRun,
            f"--stage_b_{flag}",
            "--model_path c",
            "--model_path c --stage_b b",
            "set --stage_b, or leave it out",
        )
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
    *(
        (
            SampleRun,
            f"--{flag}",
            "--model_path a --upsampler_paths b",
            f"--model_path a --upsampler_paths b --{need}",
            f"{need.split()[0]} is none",
        )
        for flag, need in (
            ("tile_overlap 8", "tile_size 64"),
            ("upsampler_dynamic_percentile 0.9", "upsampler_thresholding dynamic"),
            ("upsampler_classifier_gradient x_start", "upsampler_classifier_paths c"),
            ("upsampler_classifier_form score", "upsampler_classifier_paths c"),
        )
    ),
    (
        SampleRun,
        "--stage_b_tile_overlap 8",
        "--model_path c --stage_b b",
        "--model_path c --stage_b b --stage_b_tile_size 64",
        "stage_b_tile_size is",
    ),
    (SampleRun, "--caption_field json:a", "--model_path a.pt", "--model_path a.pt --data_dir d", "data_dir is none"),
    (EvaluateRun, "--prompts_per_task 4", SHARDS, SHAPES, "shapes_dir is"),
    (EvaluateRun, "--guidance_prompts 4", SHARDS, SHAPES, "shapes_dir is"),
    (EvaluateRun, "--num_samples 4", SHAPES, SHARDS, "data_dir is none"),
    (EvaluateRun, "--caption_field json:a", SHAPES, SHARDS, "data_dir is none"),
    (EvaluateRun, "--lpips_weights a.pth", f"{SHARDS} --metrics fid", f"{SHARDS} --metrics fid,lpips", "to lpips"),
    (EvaluateRun, "--judge_path j.pt", SHAPES, "--model_path m.pt --emoji_dir e", "emoji_dir is"),
    (EvaluateRun, "--clip_path c.pt", SHAPES, "--shapes_dir s --decoder_path d.pt", "decoder_path is none"),
    *(
        (SampleRun, "--accept_changed_base", "--model_path a.pt", f"--model_path a.pt {flags}", "are none: set one")
        for flags in ("--lora l", "--controlnet n --control_image i")
    ),
    *(
        (EvaluateRun, "--accept_changed_base", SHAPES, f"{SHAPES} {flags}", "are none: set one")
        for flags in ("--lora l", "--controlnet n")
    ),
    (GeneratorLora, "--prior_weight 0.5", "", "--prior_data_dir d", "prior_data_dir is none"),
    (GeneratorLora, "--prior_target base", "", "--prior_data_dir d", "prior_data_dir is none"),
    (GeneratorLora, "--accept_changed_base True", "", "--lora_checkpoint_path l", "set --lora_checkpoint_path, or"),
]


@pytest.mark.parametrize(("command", "flag", "without", "with_effect", "words"), CASES, ids=[case[1] for case in CASES])
def test_a_flag_without_effect_is_refused(command, flag, without, with_effect, words):
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
