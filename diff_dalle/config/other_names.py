"""What other projects call settings and values of ours: diffusers, kohya's scripts, Lightning, timm, papers.

Each name with ours, in the order of preference; a command may have only some of them. One without any has no
counterpart here, and is not taken for a misspelling of another.
"""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # training
    **dict.fromkeys(
        ("steps", "max_steps", "max_train_steps", "num_train_steps", "train_steps", "total_steps", "num_iterations"),
        ("iterations", "updates"),
    ),
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "max_epochs", "num_train_epochs"), ("epochs", "iterations")),
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), ("lr",)),
    **dict.fromkeys(("lr_scheduler", "scheduler_type"), ("lr_anneal",)),
    **dict.fromkeys(("warmup", "lr_warmup_steps", "num_warmup_steps"), ("warmup_steps",)),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size", "bs", "batch"), ("batch_size",)),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation_steps"), ("microbatch",)
    ),
    **dict.fromkeys(("gradient_checkpointing", "grad_checkpointing"), ("use_checkpoint",)),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "clip_grad"), ("grad_clip",)),
    **dict.fromkeys(("ema", "ema_decay", "use_ema"), ("ema_rate",)),
    **dict.fromkeys(("wd", "adam_weight_decay"), ("weight_decay",)),
    **dict.fromkeys(("mixed_precision", "dtype", "torch_dtype", "fp16", "bf16", "amp", "weight_dtype"), ("precision",)),
    **dict.fromkeys(("workers", "dataloader_num_workers", "nworkers"), ("num_workers",)),
    **dict.fromkeys(("checkpointing_steps", "save_steps", "save_every", "save_freq"), ("save_interval",)),
    **dict.fromkeys(("logging_steps", "log_every", "log_freq"), ("log_interval",)),
    **dict.fromkeys(("validation_steps", "eval_steps", "eval_every"), ("eval_interval",)),
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint"), ("resume_checkpoint",)),
    "checkpoints_total_limit": ("keep_checkpoints",),
    "report_to": ("trackers",),
    "random_seed": ("seed",),
    # data
    **dict.fromkeys(
        (
            "dataset",
            "dataset_name",
            "train_data_dir",
            "instance_data_dir",
            "data_path",
            "data_root",
            "data",
            "train_dir",
        ),
        ("data_dir", "source"),
    ),
    **dict.fromkeys(("caption_column", "caption_key", "text_column"), ("caption_field",)),
    **dict.fromkeys(("resolution", "res", "size", "img_size", "input_size"), ("sample_size", "image_size", "resize")),
    **dict.fromkeys(("flip", "hflip", "horizontal_flip"), ("random_flip",)),
    "center_crop": ("random_crop",),
    # files
    **dict.fromkeys(
        ("output_dir", "outdir", "output", "output_path", "results_dir", "save_dir", "save_path"),
        ("logdir", "out_dir", "out", "report_dir", "checkpoint_path", "to"),
    ),
    **dict.fromkeys(
        ("model", "model_id", "ckpt", "ckpt_path", "checkpoint", "pretrained_model_name_or_path", "weights"),
        ("model_path", "models", "init_checkpoint"),
    ),
    "tokenizer": ("bpe_path",),
    # sampling
    **dict.fromkeys(
        ("num_inference_steps", "sampling_steps", "num_steps", "ddim_steps", "inference_steps"),
        ("steps", "preview_steps"),
    ),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance", "guidance_strength", "text_guidance_scale"), ("guidance_scale",)),
    **dict.fromkeys(("prompt", "text", "caption"), ("prompts", "prompt")),
    **dict.fromkeys(("neg_prompt", "negative_prompts", "uncond_prompt"), ("negative_prompt",)),
    **dict.fromkeys(("num_images", "num_images_per_prompt", "n_samples", "n_images", "n_iter"), ("num_samples",)),
    **dict.fromkeys(("scheduler", "solver"), ("sampler", "lr_anneal")),
    **dict.fromkeys(("lora_path", "lora_weights", "lora_scale"), ("lora",)),
    **dict.fromkeys(("image", "init_img"), ("init_image", "control_image", "images")),
    "denoising_strength": ("strength",),
    # networks and noise
    **dict.fromkeys(("dim", "width", "model_channels", "hidden_size", "base_channels"), ("num_channels", "dim")),
    **dict.fromkeys(("dim_mults", "ch_mult", "channel_mults"), ("channel_mult", "dim_mults")),
    **dict.fromkeys(("attn_resolutions", "attention_levels"), ("attention_resolutions",)),
    **dict.fromkeys(("n_layer", "num_layers", "layers"), ("depth", "num_res_blocks")),
    **dict.fromkeys(("heads", "n_heads", "n_head"), ("num_heads",)),
    **dict.fromkeys(("beta_schedule", "schedule"), ("noise_schedule",)),
    **dict.fromkeys(("timesteps", "num_train_timesteps", "num_timesteps"), ("diffusion_steps", "timesteps")),
    **dict.fromkeys(("prediction_type", "objective", "parameterization"), ("prediction",)),
    "snr_gamma": ("min_snr_gamma",),
    **dict.fromkeys(("cond_drop_prob", "cfg_dropout", "uncond_prob"), ("caption_dropout",)),
    # values
    **dict.fromkeys(("float16", "half"), ("fp16",)),
    "bfloat16": ("bf16",),
    **dict.fromkeys(("float32", "float", "no", "full"), ("fp32",)),
    **dict.fromkeys(("dpmpp", "dpmpp_2m", "dpmsolver++", "dpm_solver++", "dpm"), ("dpm++2m",)),
    **dict.fromkeys(("ddpm", "euler_a", "euler_ancestral"), ("ancestral",)),
    "euler": ("ddim",),
    "squaredcos_cap_v2": ("cosine",),
    **dict.fromkeys(("eps", "noise"), ("epsilon",)),
    **dict.fromkeys(("x0", "sample", "pred_x0"), ("x_start", "sample")),
    **dict.fromkeys(("v_prediction", "velocity"), ("v",)),
    **dict.fromkeys(("v100", "p100", "t4", "l4", "a10", "b100", "b300", "rtx3090", "rtx5090", "mi300x"), ()),
}
