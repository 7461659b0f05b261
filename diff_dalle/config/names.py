"""Names that a user may misspell."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from .errors import InputError, quoted

MAX_NAME = 64  # characters; the longest of ours has half
T = TypeVar("T")
#: What other projects call settings and values of ours: diffusers, kohya's scripts, Lightning, timm, papers. By our
#: names in the order of preference, of which a command may have only some; names without any have no counterpart here,
#: and are not taken for misspellings of others.
_CALLED_ELSEWHERE: dict[tuple[str, ...], tuple[str, ...]] = {
    # training
    ("iterations", "updates"): (
        "steps",
        "max_steps",
        "max_train_steps",
        "num_train_steps",
        "train_steps",
        "total_steps",
        "num_iterations",
    ),
    ("epochs", "iterations"): ("epochs", "epoch", "num_epochs", "max_epochs", "num_train_epochs"),
    ("lr",): ("learning_rate", "base_lr", "max_lr"),
    ("lr_anneal",): ("lr_scheduler", "scheduler_type"),
    ("warmup_steps",): ("warmup", "lr_warmup_steps", "num_warmup_steps"),
    ("batch_size",): ("train_batch_size", "per_device_train_batch_size", "bs", "batch"),
    ("microbatch",): ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation_steps"),
    ("use_checkpoint",): ("gradient_checkpointing", "grad_checkpointing"),
    ("grad_clip",): ("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "clip_grad"),
    ("ema_rate",): ("ema", "ema_decay", "use_ema"),
    ("weight_decay",): ("wd", "adam_weight_decay"),
    ("precision",): ("mixed_precision", "dtype", "torch_dtype", "fp16", "bf16", "amp", "weight_dtype"),
    ("num_workers",): ("workers", "dataloader_num_workers", "nworkers"),
    ("save_interval",): ("checkpointing_steps", "save_steps", "save_every", "save_freq"),
    ("log_interval",): ("logging_steps", "log_every", "log_freq"),
    ("eval_interval",): ("validation_steps", "eval_steps", "eval_every"),
    ("resume_checkpoint",): ("resume", "resume_from", "resume_from_checkpoint"),
    ("keep_checkpoints",): ("checkpoints_total_limit",),
    ("trackers",): ("report_to",),
    ("seed",): ("random_seed",),
    # data
    ("data_dir", "source"): (
        "dataset",
        "dataset_name",
        "train_data_dir",
        "instance_data_dir",
        "data_path",
        "data_root",
        "data",
        "train_dir",
    ),
    ("caption_field",): ("caption_column", "caption_key", "text_column"),
    ("sample_size", "image_size", "resize"): ("resolution", "res", "size", "img_size", "input_size"),
    ("random_flip",): ("flip", "hflip", "horizontal_flip"),
    ("random_crop",): ("center_crop",),
    # files
    ("logdir", "out_dir", "out", "report_dir", "checkpoint_path", "to"): (
        "output_dir",
        "outdir",
        "output",
        "output_path",
        "results_dir",
        "save_dir",
        "save_path",
    ),
    ("model_path", "models", "init_checkpoint"): (
        "model",
        "model_id",
        "ckpt",
        "ckpt_path",
        "checkpoint",
        "pretrained_model_name_or_path",
        "weights",
    ),
    ("bpe_path",): ("tokenizer",),
    # sampling
    ("steps", "preview_steps"): ("num_inference_steps", "sampling_steps", "num_steps", "ddim_steps", "inference_steps"),
    ("guidance_scale",): ("cfg", "cfg_scale", "guidance", "guidance_strength", "text_guidance_scale"),
    ("prompts", "prompt"): ("prompt", "text", "caption"),
    ("negative_prompt",): ("neg_prompt", "negative_prompts", "uncond_prompt"),
    ("num_samples",): ("num_images", "num_images_per_prompt", "n_samples", "n_images", "n_iter"),
    ("sampler", "lr_anneal"): ("scheduler", "solver"),
    ("lora",): ("lora_path", "lora_weights", "lora_scale"),
    ("init_image", "control_image", "images"): ("image", "init_img"),
    ("strength",): ("denoising_strength",),
    # networks and noise
    ("num_channels", "dim"): ("dim", "width", "model_channels", "hidden_size", "base_channels"),
    ("channel_mult", "dim_mults"): ("dim_mults", "ch_mult", "channel_mults"),
    ("attention_resolutions",): ("attn_resolutions", "attention_levels"),
    ("depth", "num_res_blocks"): ("n_layer", "num_layers", "layers"),
    ("num_heads",): ("heads", "n_heads", "n_head"),
    ("noise_schedule",): ("beta_schedule", "schedule"),
    ("diffusion_steps", "timesteps"): ("timesteps", "num_train_timesteps", "num_timesteps"),
    ("prediction",): ("prediction_type", "objective", "parameterization"),
    ("min_snr_gamma",): ("snr_gamma",),
    ("caption_dropout",): ("cond_drop_prob", "cfg_dropout", "uncond_prob"),
    # values
    ("fp16",): ("float16", "half"),
    ("bf16",): ("bfloat16",),
    ("fp32",): ("float32", "float", "no", "full"),
    ("dpm++2m",): ("dpmpp", "dpmpp_2m", "dpmsolver++", "dpm_solver++", "dpm"),
    ("ancestral",): ("ddpm", "euler_a", "euler_ancestral"),
    ("ddim",): ("euler",),
    ("cosine",): ("squaredcos_cap_v2",),
    ("epsilon",): ("eps", "noise"),
    ("x_start", "sample"): ("x0", "sample", "pred_x0"),
    ("v",): ("v_prediction", "velocity"),
    (): ("v100", "p100", "t4", "l4", "a10", "b100", "b300", "rtx3090", "rtx5090", "mi300x"),
}
OTHER_NAMES = {other: ours for ours, others in _CALLED_ELSEWHERE.items() for other in others}


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint ``; did you mean X?`` for a name that is not among ``names``, or an empty string: the one that other
    projects call so, else the shortest that begins so, else one that is spelled much alike."""
    if len(name) > MAX_NAME:
        return ""
    known, plain = {_plain(each): each for each in names}, _plain(name)
    meant = OTHER_NAMES.get(plain, (plain,))
    found = [each for each in (plain, *meant) if each in known]
    if meant and not found:
        begun = [each for each in known if len(plain) > 2 and each.startswith(plain)]
        cutoff = 0.6 if len(plain) <= 4 else 0.7  # of a short word one letter is much
        found = sorted(begun, key=len) or difflib.get_close_matches(plain, known, n=1, cutoff=cutoff)
    return f"; did you mean {known[found[0]]}?" if found else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """``table[name]``, or an InputError that lists the known names. ``what`` says what the name is of."""
    if name not in table:
        raise InputError(f"{what} {quoted(name)} is unknown{nearest(name, table)} (known: {', '.join(table)})")
    return table[name]
